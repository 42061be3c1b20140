"""Ranks agree on dependent launches, which share a group's limit of blocks."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from cuda.bindings.driver import CUresult

from tests.explorer.compiled.ptx_mutants import launched
from tests.store.store_ranks import pages, succeed
from tricomm import simulate
from tricomm.core import dependent_launch, launch_plan, topology_agreement
from tricomm.core.topology_agreement import DeviceFacts
from tricomm.errors import InvalidArgument, ResourceError
from tricomm.kernels import layout, wide_words
from tricomm.kernels.collectives import registry
from tricomm.options import Options
from tricomm.policy.selection import choose
from tricomm.policy.selection_facts import SelectionFacts

RANKS = 3


def agreed(options: Options | None = None, without: int | None = None) -> str:
    """The reason, which must be the same on all ranks; the device of rank `without` does not support it."""

    def agree(rank: int) -> str:
        facts = DeviceFacts(f"GPU {rank}", "sm_90", 132, rank != without)
        return dependent_launch.agree(control[rank], options or Options(), facts, 10.0)

    with pages(RANKS) as control:
        reasons = succeed(RANKS, agree)
    assert len(set(reasons)) == 1, reasons
    return reasons[0]


def test_one_rank_without_support_disables_it_on_all() -> None:
    assert agreed() == ""
    assert agreed(without=1).endswith("CUDA 12.3 or newer (rank 1)")


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
def test_devices_that_support_it(major: int, answer: Any, possible: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without bindings the group is made as before, and NCCL runs its calls."""

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
    assert agreed(Options(dependent_launch=False)) == "Options(dependent_launch=False) (rank 0)"
    monkeypatch.setenv("TRICOMM_DEPENDENT_LAUNCH", "0")
    assert agreed() == "TRICOMM_DEPENDENT_LAUNCH=0 (rank 0)"
    monkeypatch.setenv("TRICOMM_DEPENDENT_LAUNCH", "1")
    assert agreed() == ""
    with pytest.raises(InvalidArgument, match="dependent_launch='no'"):
        Options(dependent_launch="no")  # type: ignore[arg-type]


@pytest.mark.parametrize("most", [64, 40, 16, 1])
@pytest.mark.parametrize("kilobytes", [1, 16, 64, 256, 1024, 65536])
def test_two_kernels_keep_to_the_blocks_of_a_group(kilobytes: int, most: int) -> None:
    """Other groups rely on `max_blocks`, so a kernel that starts early shares it with the kernel before it."""
    facts = SelectionFacts("sm_90", 8, layout.plan(8, 64 << 20), most, topology="nvswitch", no_dependent_launch="")
    choice = choose(facts, "all_reduce", kilobytes << 10, bits=16)
    kernel = registry.find("all_reduce", choice.algorithm, choice.protocol)
    dependent = launch_plan.constexprs(facts, choice, kernel)["DEPENDENT"]
    assert dependent == (2 * choice.blocks <= most) == (not dependent_launch.refusal(facts, choice.blocks))
    assert dependent or choice.blocks > most // 2
    if most == 64 and wide_words.why_not(90) is None:
        assert dependent == (kilobytes <= 1024), choice


@pytest.mark.explorer
def test_explain_reports_events_between_eager_calls() -> None:
    def reasons(comm: Any) -> list[str]:
        x = torch.ones(4)
        for stream in (torch.cuda.current_stream(), torch.cuda.Stream()):
            with torch.cuda.stream(stream):
                comm.all_reduce(x)
        return [comm.explain("all_reduce", 512, mode=mode).reason for mode in ("eager", "graph")]

    for eager, graph in simulate(reasons, 2, compiled="sm_90"):
        assert "; a dependent launch after an event" in eager
        assert "; a dependent launch" in graph and "after an event" not in graph


@pytest.mark.explorer
@pytest.mark.parametrize(
    ("architecture", "waits"), [("sm_80", 0), ("sm_89", 0), ("sm_90", 1), ("sm_100", 1), ("sm_120", 1)]
)
def test_kernels_wait_from_sm_90_on(architecture: str, waits: int) -> None:
    texts = launched(lambda: simulate(lambda comm: comm.all_reduce(torch.ones(64)), 2, compiled=architecture))
    for text in itertools.chain(*texts.values()):
        assert f".target {architecture}" in text
        assert text.count("griddepcontrol.wait") == text.count("griddepcontrol.launch_dependents") == waits
        assert text.count("griddepcontrol") == 2 * waits


@pytest.mark.explorer
@pytest.mark.parametrize(
    ("architecture", "most", "said"),
    [
        ("sm_90", 4, "; a dependent launch"),
        ("sm_90", 1, "; no dependent launch: 1 blocks are over half of the 1 that this group may have"),
        ("sm_80", 4, "; no dependent launch: it needs a GPU of sm_90"),
    ],
)
def test_explain_reports_it(architecture: str, most: int, said: str) -> None:
    options = Options(arena_bytes=1 << 20, max_blocks=most)
    for reason in simulate(
        lambda comm: comm.explain("all_reduce", 512).reason, 2, compiled=architecture, options=options
    ):
        assert said in reason
