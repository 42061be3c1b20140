"""A small model in vLLM with tensor parallelism has the same tokens with and without tricomm: make engines."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from tests.wheel_gate import ROOT

pytestmark = [pytest.mark.engines, pytest.mark.timeout(1500)]
pytest.importorskip("vllm")

from tests.engines.bodies import vllm_model  # noqa: E402

ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "PYTHONPATH": str(ROOT),
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
}
OURS = {"VLLM_TRICOMM": "1", "TRICOMM_CPU": "kernels"}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    vllm_model.make(str(folder))
    return str(folder)


def _start(model, log, *arguments, **more):
    command = [sys.executable, "-m", vllm_model.__name__, model, "2", *arguments]
    with open(log, "w") as out:
        return subprocess.Popen(command, stdout=out, stderr=out, cwd=ROOT, env={**os.environ, **ENVIRONMENT, **more})


def _result(process, log):
    code = process.wait(1200)
    text = log.read_text()
    lines = [line for line in text.splitlines() if line.startswith("RESULT ")]
    assert code == 0 and len(lines) == 1, text[-5000:]
    return json.loads(lines[0].removeprefix("RESULT ")), text


def test_a_model_gives_the_same_tokens_eager_and_compiled(model, tmp_path):
    logs = {name: tmp_path / f"{name}.log" for name in ("own", "ours", "compiled")}
    running = {"own": _start(model, logs["own"]), "ours": _start(model, logs["ours"], **OURS)}
    try:
        results = {name: _result(process, logs[name]) for name, process in running.items()}
        running["compiled"] = _start(model, logs["compiled"], "compiled", **OURS)
        results["compiled"] = _result(running["compiled"], logs["compiled"])
    finally:
        for process in running.values():
            process.kill()
            process.wait(30)
    own, text = results.pop("own")
    assert own["calls"] == [{}, {}] and "tricomm runs" not in text
    assert len({token for tokens in own["tokens"] for token in tokens}) > 10
    for result, text in results.values():
        assert result["tokens"] == own["tokens"]
        for calls in result[
            "calls"
        ]:  # two all-reduces in each of two layers, and one of the embedding, for each of 12 or more tokens
            assert calls["all_reduce"] >= 60 and calls["all_gather"] >= 12
        assert text.count("tricomm runs: group 'tp:0', rank 0 of 2 on cpu: all_reduce of any size") == 1
