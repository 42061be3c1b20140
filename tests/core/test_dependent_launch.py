"""Dependent launches are agreed by all ranks, and one group of a GPU has them."""

from __future__ import annotations

import gc
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from cuda.bindings.driver import CUresult
from torch.distributed import HashStore

import tricomm
from tests.store.store_ranks import pages, succeed
from tricomm import simulate
from tricomm.core import dependent_launch, group, topology_agreement
from tricomm.core.topology_agreement import DeviceFacts
from tricomm.errors import InvalidArgument, ResourceError
from tricomm.options import Options
from tricomm.policy.backend_choice import GroupFacts

RANKS = 3


@dataclass(eq=False)
class Device:
    dependent: dict[str, Any] = field(default_factory=dict)


@dataclass(eq=False)
class Group:
    control: Any
    gpu: Device | None
    options: Options = field(default_factory=Options)
    closed: bool = False
    routes: GroupFacts = GroupFacts("cuda", RANKS, 1, None, None)


def facts(rank: int, possible: bool = True, shared: bool = False) -> DeviceFacts:
    return DeviceFacts("one" if shared else f"GPU {rank}", "sm_90", 132, possible)


def agreed(groups: list[Group], how: Any = facts) -> str:
    """The reason on all ranks, which has to be the same."""
    with pages(len(groups)) as control:
        for rank, group in enumerate(groups):
            group.control = control[rank]
        reasons = succeed(len(groups), lambda rank: dependent_launch.agree(groups[rank], how(rank), 10.0))
    assert len(set(reasons)) == 1, reasons
    return reasons[0]


def groups(devices: list[Device], **options: Any) -> list[Group]:
    return [Group(None, device, Options(**options)) for device in devices]


def devices() -> list[Device]:
    return [Device() for _ in range(RANKS)]


def test_the_first_group_of_a_gpu_has_them_until_it_is_closed_or_gone() -> None:
    gpus = devices()
    first, second = groups(gpus), groups(gpus)
    assert agreed(first) == ""
    assert agreed(second) == "another communicator of the GPU has it (rank 0)"
    first[1].closed = first[2].closed = True
    assert agreed(second) == "another communicator of the GPU has it (rank 0)"
    assert agreed(groups(devices())) == ""
    first[0].closed = True
    assert agreed(second) == ""
    del first, second
    gc.collect()
    assert agreed(groups(gpus)) == ""


def test_a_rank_that_cannot_decides_for_all_and_keeps_nobody_from_it() -> None:
    gpus = devices()
    old = groups(gpus)
    assert agreed(old, lambda rank: facts(rank, possible=rank != 1)).endswith("CUDA 12.3 or newer (rank 1)")
    assert agreed(groups(gpus)) == ""


def test_ranks_that_share_a_gpu_have_none() -> None:
    assert agreed(groups(devices()), lambda rank: facts(rank, shared=rank != 1)) == "ranks share a GPU"


def test_a_group_that_has_no_kernels_keeps_nobody_from_it() -> None:
    gpus = devices()
    spanning = groups(gpus)
    for each in spanning:
        each.routes = GroupFacts("cuda", RANKS, 2, "the group spans 2 nodes", "nccl")
    assert agreed(spanning) == "NCCL serves every call"
    assert agreed(groups(gpus)) == ""


@pytest.mark.parametrize("error", [TimeoutError("a rank is late"), KeyboardInterrupt()], ids=repr)
def test_an_agreement_that_fails_keeps_nobody_from_it(error: BaseException) -> None:
    gpus = devices()
    failed = groups(gpus)[0]
    failed.control = SimpleNamespace(exchange=lambda *_: (_ for _ in ()).throw(error))
    with pytest.raises(type(error)):
        dependent_launch.agree(failed, facts(0), 10.0)
    assert agreed(groups(gpus)) == "" and not failed.closed


def test_a_set_up_that_fails_later_closes_its_group() -> None:
    """So the claim ends with it, even if the error lives on, and the group with it."""
    earlier = set(group._groups)
    with patch("tricomm.communicator.Planner", side_effect=InvalidArgument("no plan")):
        with pytest.raises(InvalidArgument, match="no plan") as kept:
            tricomm.Communicator(HashStore(), 0, 1, "cpu")
    assert [each.closed for each in group._groups - earlier] == [True] and kept.tb is not None


@pytest.mark.parametrize(
    ("major", "answer", "possible"),
    [
        (9, (CUresult.CUDA_SUCCESS, 12030), True),
        (12, (CUresult.CUDA_SUCCESS, 13000), True),
        (9, (CUresult.CUDA_SUCCESS, 12020), False),
        (9, (CUresult.CUDA_ERROR_INVALID_VALUE, None), False),
        (9, ResourceError("no bindings"), False),
        (8, AssertionError("not asked"), False),
    ],
)
def test_which_devices_can(major: int, answer: Any, possible: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without bindings NCCL serves a group's calls, and the group is made as before."""

    def bindings(name: str) -> Any:
        if isinstance(answer, Exception):
            raise answer
        return SimpleNamespace(cuDriverGetVersion=lambda: answer)

    properties = SimpleNamespace(major=major, minor=0, uuid="GPU", multi_processor_count=132)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setattr(topology_agreement, "load_bindings", bindings)
    found = topology_agreement.device_facts(torch.device("cuda", 0))
    assert found == DeviceFacts("GPU", f"sm_{major}0", 132, possible)


def test_option_and_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    gpus = devices()
    assert agreed(groups(gpus, dependent_launch=False)) == "Options(dependent_launch=False) (rank 0)"
    monkeypatch.setenv("TRICOMM_DEPENDENT_LAUNCH", "0")
    assert agreed(groups(gpus)) == "TRICOMM_DEPENDENT_LAUNCH=0 (rank 0)"
    monkeypatch.setenv("TRICOMM_DEPENDENT_LAUNCH", "1")
    assert agreed(groups(gpus)) == ""
    with pytest.raises(InvalidArgument, match="dependent_launch='no'"):
        Options(dependent_launch="no")  # type: ignore[arg-type]


@pytest.mark.explorer
@pytest.mark.parametrize(
    ("architecture", "said"), [("sm_90", "; a dependent launch"), ("sm_80", "it needs a GPU of sm")]
)
def test_explain_tells_and_a_second_communicator_has_none(architecture: str, said: str) -> None:
    def reasons(comm: Any) -> tuple[str, str]:
        with comm.split(range(comm.world_size)) as second:
            return tuple(each.explain("all_reduce", 4096).reason for each in (comm, second))  # type: ignore[return-value]

    for first, second in simulate(reasons, 2, compiled=architecture):
        assert said in first
        assert "no dependent launch: " in second
        assert ("another communicator of the GPU has it" in second) == (architecture == "sm_90")
