"""Variables of other libraries are parsed as those libraries do, and no value of them fails a group."""

import pytest

from tests.store.cuda.jobs import two_gpus
from tests.store.store_ranks import in_threads
from tricomm import env
from tricomm.deadline import Deadline

SWITCHES = {
    "NCCL_P2P_DISABLE": lambda: env.peer_access_disabled() is not None,
    "NCCL_MULTI_RANK_GPU_ENABLE": env.share_device,
    "NCCL_NVLS_ENABLE": env.multicast,
}
ON = ["1", "2", "-1", " 1 ", "0x1", "1,2", "9" * 5000]
OFF = ["0", "00", "0x0", "yes", "?", "\udcff"]  # strtol, which NCCL uses, parses a word as no integer


@pytest.mark.parametrize("value", [*ON, *OFF], ids=lambda value: ascii(value[:8]))
@pytest.mark.parametrize("name", SWITCHES)
def test_a_switch_of_nccl_is_an_integer(name, value, monkeypatch):
    monkeypatch.setenv(name, value)
    assert SWITCHES[name]() is (value in ON)


@pytest.mark.parametrize("value", [None, ""])
def test_a_switch_of_nccl_that_is_not_set_has_nccls_default(value, monkeypatch):
    for name in SWITCHES:
        if value is None:
            monkeypatch.delenv(name, raising=False)
        else:
            monkeypatch.setenv(name, value)
    assert [read() for read in SWITCHES.values()] == [False, False, True]


@pytest.mark.parametrize("value", [*ON, *OFF], ids=lambda value: ascii(value[:8]))
def test_no_variable_raises(value, monkeypatch):
    for name in ("CUDA_DEVICE_MAX_CONNECTIONS", "TORCHELASTIC_USE_AGENT_STORE", "LOCAL_RANK"):
        monkeypatch.setenv(name, value)
    assert env.hardware_queues() >= 1 and not env.agent_store() and isinstance(env.foreign("LOCAL_RANK"), int)


def test_nvls_enable_2_is_nccls_default_and_every_rank_tries_multicast(monkeypatch):
    monkeypatch.setenv("NCCL_NVLS_ENABLE", "2")
    job = two_gpus()
    arenas = in_threads(2, job.open)
    assert in_threads(2, lambda rank: arenas[rank].look_for_switch(Deadline(10.0))) == [None] * 2
    assert all(arena.multicast and not arena.no_multicast for arena in arenas), arenas[0].no_multicast
    assert job.close_all(arenas) == [None] * 2
    job.verify()
