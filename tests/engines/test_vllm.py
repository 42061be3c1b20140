"""vLLM's own GroupCoordinator over tricomm's communicator, with the real package: make engines."""

from __future__ import annotations

import os
import signal

import pytest

from tests import ranks

pytestmark = pytest.mark.engines
vllm = pytest.importorskip("vllm")

from tests.engines.bodies import vllm_bodies as bodies  # noqa: E402


@pytest.fixture(scope="module", autouse=True)
def preloaded():
    """vLLM takes seconds to import: the fork server does it once."""
    ranks.CONTEXT.set_forkserver_preload(["tests.preloaded", "tests.ranks", "tests.engines.bodies.vllm_bodies"])


@pytest.mark.parametrize("world_size", [2, 4])
def test_collectives_are_exact_and_run_by_the_kernels(url, world_size):
    for wrong, kind, ran in ranks.run(world_size, bodies.exact, url, timeout=240):
        assert wrong == []
        assert kind == "TricommCpuCommunicator"
        assert min(ran[name] for name in ("all_reduce", "all_gather", "reduce_scatter")) >= 40


def test_under_torch_compile(url):
    for wrong, ran in ranks.run(2, bodies.compiled, url):
        assert wrong == []
        assert ran == {"all_reduce": 3, "all_gather": 3, "reduce_scatter": 3}


def test_vllm_runs_calls_that_the_kernels_do_not_take(url):
    (wrong, ran, said), (also, _, nothing) = ranks.run(2, bodies.limited, url)
    assert wrong == also == [] and ran == {"all_reduce": 2} and nothing == ""
    assert "all_reduce sum float32 1028 B -> vLLM: 1028 bytes are over the limit of 1024" in said
    assert "all_gather uint16 6 B -> vLLM: no kernel takes torch.uint16" in said


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("gloo", "unless TRICOMM_CPU=kernels on all ranks"),
        ("memory", "RendezvousError"),
        ("limit", "the engine's settings: rank 0 has"),
        ("bad limit", "TRICOMM_ENGINE_MAX_BYTES='many' is not an integer"),
        ("unset", "rank(s) [1] did not come"),
        ("broken", "PeerDied"),
    ],
)
def test_if_one_rank_cannot_use_tricomm_no_rank_does(url, how, said):
    first, second = ranks.run(2, bodies.one_cannot, url, how)
    assert first[:2] == (True, True) and said in first[2]
    assert second[0] and second[1] in (True, None)


def test_without_the_variable_nothing_is_patched(url):
    for result in ranks.run(2, bodies.unset, url):
        assert result == (True, "CpuCommunicator", [2.0] * 3)


def test_groups_of_other_kinds_are_left_alone(url):
    for result in ranks.run(2, bodies.other_groups, url):
        assert result == (True, [2.0] * 3)


def test_sleep_mode(url):
    for result, ended in ranks.run(2, bodies.sleeping, url):
        assert result == [([3.0] * 5, 1, False), ([3.0] * 5, 0, True), ([3.0] * 5, 1, False)]
        assert ended


def test_a_killed_rank_is_named(url):
    with ranks.start(2, bodies.killed, url) as running:
        for rank in (0, 1):
            assert running.message(rank) == "ready"
        os.kill(running.pids[1], signal.SIGKILL)
        name, text = running.message(0)
        assert name == "PeerDied" and "rank 1" in text and str(running.pids[1]) in text
