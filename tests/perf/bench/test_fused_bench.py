"""`tricomm bench --collective all_reduce_rms_norm`: every implementation's results, and wrong elements are counted."""

import sys

import pytest
import torch

import tricomm
import tricomm.flashinfer
from tests import forked
from tricomm.errors import InvalidArgument
from tricomm.perf import row_calls, units
from tricomm.perf.bench import fused_bench, request
from tricomm.perf.bench.request import Case

NAME = "all_reduce_rms_norm"


def test_the_command_measures_fused_and_unfused(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    options = ["--nproc", "2", "--collective", NAME, "--dtype", "float16", "--hidden", "32", "--sizes", "100"]
    done = forked.command(
        "bench", "--device", "cpu", *options, "--iters", "1", "--warmup", "0", "--against", "nccl,gloo"
    )
    assert done.returncode == 0, done.stdout + done.stderr
    rows = [line.replace("*", " ").split() for line in done.stdout.splitlines() if line.startswith("     ")]
    assert [row[:2] + [row[5]] for row in rows] == [["64", name, "0"] for name in ("one_shot/ll", "unfused", "gloo")]
    assert f"# {NAME} float16 norm@32, eager" in done.stdout
    assert "# nccl: these ranks run on a CPU" in done.stdout


@pytest.mark.parametrize(
    ("quantize", "top_k"),
    [
        ("", 0),
        pytest.param("fp8", 0, marks=pytest.mark.exhaustive),
        ("fp8_per_token", 0),
        ("nvfp4", 0),
        ("", 2),
        ("fp8", 3),
    ],
)
def test_a_wrong_element_is_counted(quantize, top_k, monkeypatch):
    """tricomm's call, its unfused form, and FlashInfer's, for which tricomm's facade is used here."""
    monkeypatch.setitem(sys.modules, "flashinfer.comm", tricomm.flashinfer)
    case = Case(NAME, None, None, "bfloat16", hidden=32, quantize=quantize, top_k=top_k)

    def body(comm):
        made = fused_bench.tensors(comm, case, 3 * 32)
        runs = [fused_bench.ours(comm, case, made)]
        runs += [fused_bench.offered(name)[name](comm, case, made, lambda: comm) for name in ("unfused", "flashinfer")]
        counts = []
        for number, run in enumerate(runs):
            made.load(comm, number)
            before = made.wrong(comm, number)
            run()
            counts.append((before > 90, made.wrong(comm, number)))
        if top_k:
            assert made.call.experts.summed(made.call.x).equal(made.call.x)
            made.call.experts.rows[3, 7] += 1  # a summand of row 0
            runs[0]()
            assert made.wrong(comm, 2) > 0
            made.call.experts.rows[3, 7] -= 1
            runs[2]()
        made.call.residual_out[1, 5] += 1
        codes = made.call.quant_out
        if codes is not None:
            codes.view(torch.uint8)[0, 3] ^= 0x40
        return counts, made.wrong(comm, 2)

    assert tricomm.simulate(body, 1) == [([(True, 0)] * 3, 2 if quantize else 1)]


def test_the_requested_algorithms_are_run():
    cases = request.cases((NAME,), "all", "ll", 2, ("float16",), ("nccl",), (64, "fp8", 0))
    assert [(c.library, c.algorithm, c.protocol, c.hidden, c.quantize) for c in cases] == [
        ("tricomm", "one_shot", "ll", 64, "fp8"),
        ("tricomm", "two_shot", "ll", 64, "fp8"),
        ("unfused", None, None, 64, "fp8"),
        ("nccl", None, None, 64, "fp8"),
    ]
    (experts,) = request.cases((NAME,), None, None, 2, row=(64, "fp8", 8))[:1]
    form = fused_bench.form(experts)
    assert form.name == "fp8@64+top8" and row_calls.parse(form.name) == form
    form = fused_bench.form(cases[0])
    assert form.name == "fp8@64" and row_calls.parse(form.name) == form
    assert [form.rows(size, 2) for size in (1, 128, 300)] == [1, 1, 2]
    assert request.parse_dtypes("all", "sum", (NAME,)) == ("float32", "float16", "bfloat16")
    with pytest.raises(InvalidArgument, match="no kernel fits algorithm any, protocol simple"):
        request.cases((NAME,), None, "simple", 2)
    assert units.least(NAME, 4) == units.least("all_reduce", 4)
    assert units.bus_factor(NAME, 4) == units.bus_factor("all_reduce", 4)
