"""The shipped kernels under many schedules: no finding, with and without faults, nor in the bounded search.

Three ranks, or two if that is enough; the kernels of a hybrid cube mesh need eight, and get fewer schedules of shorter
calls.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from random import Random
from typing import Any

import pytest
import torch
from click.testing import CliRunner

import tricomm
from tests.marks import odd, some
from tests.topology.shapes import dgx1v
from tricomm.cli import cli
from tricomm.errors import InvalidArgument
from tricomm.explorer import campaign, shipped
from tricomm.explorer.shipped_calls import ShippedCalls
from tricomm.kernels import layout
from tricomm.kernels.collectives import registry
from tricomm.kernels.collectives.registry import Kernel
from tricomm.options import tuned

CHECKED = shipped.kernels(None, None, None)
KERNELS = pytest.mark.parametrize(
    "kernel",
    some(CHECKED, 11, lambda _, k: k.needs_cube and not (k.protocol == "ll" and k.reduces)),  # a cube takes minutes
    ids=lambda k: k.name,
)
CUBE = [k for k in registry.KERNELS if k.needs_cube]
# Kernels of which CI runs every schedule with one preemption: one for each synchronization. `make soak` has the others.
SEARCHED = [
    k
    for k in registry.KERNELS
    if k not in CUBE and (k.collective in ("all_reduce", "all_gather", "barrier") or k.name.startswith("broadcast_one"))
]
# CI runs these, and one of the others for each protocol; `make soak` runs all.
SOME = [
    k
    if k in SEARCHED or k.collective in ("reduce_scatter", "all_to_all_v", "send")
    else pytest.param(k, marks=pytest.mark.soak)
    for k in CHECKED
]
SAMPLE = pytest.mark.parametrize("kernel", some(SOME, 6, odd), ids=lambda k: k.name)
FALSE_ALARMS = 2000
SIZES = (20, 1, 17)  # two tiles, a whole one and a partial one; one tile; two again
FEW = (5, 1)  # of tiles of four words
OTHERWISE = dgx1v().of([7, 2, 5, 0, 1, 3, 6, 4])


def clean(kernel: Kernel, world_size: int = 3, **more: Any) -> tricomm.Report:
    """Check `kernel` on `world_size` ranks, or the eight that it needs; the report must have no finding."""
    more = more if not kernel.needs_cube else {"sizes": FEW, "blocks": 1, "tile": 4} | more
    world_size = registry.CUBE_RANKS if kernel.needs_cube else world_size
    sizes, blocks = more.pop("sizes", SIZES), more.pop("blocks", shipped.BLOCKS)
    tile = more.pop(
        "tile", None if kernel.collective == shipped.FUSED or kernel.wire else shipped.TILE
    )  # the sizes are for this arena
    options = shipped.options(world_size, blocks, tile, kernel=kernel)
    options = tuned(options, first_epoch=more.pop("first_epoch", 1))
    return passed(shipped.body(kernel, sizes), world_size, options=options, **more)


def passed(fn: Callable[[tricomm.Communicator], Any], world_size: int, **more: Any) -> tricomm.Report:
    report = tricomm.check(fn, world_size, **more)
    assert report.ok, str(report)
    assert report.complete
    return report


@KERNELS
@pytest.mark.parametrize("schedules", [2, pytest.param(12, marks=pytest.mark.soak)])
def test_random_schedules_from_every_edge_of_the_epoch(kernel, schedules):
    """Some from 1, before 2^31 and before 2^32. Then four calls around 2^30 (of a cube, around 2^31): two epochs clear
    a mailbox each, and the next two use what has been cleared."""
    if kernel.needs_cube:
        clean(kernel, schedules=schedules // 2)
        clean(kernel, schedules=1, blocks=2, sizes=(9,))
        tile = 16 if kernel.wide else 32  # the largest tile that they can use in the smallest arena
        clean(kernel, schedules=1, first_epoch=(1 << 32) - 1, sizes=(1, 2, 1), tile=tile)
        clean(kernel, schedules=1, first_epoch=2 * layout.CLEAR_EVERY - 1, sizes=(3, 1, 2, 1), tile=tile)
    else:
        assert clean(kernel, schedules=schedules).steps > 500 / 7 * schedules
        clean(kernel, schedules=1, first_epoch=(1 << 32) - 2)
        clean(kernel, schedules=1, first_epoch=layout.CLEAR_EVERY - 1, sizes=(17, 1, 20, 1))


@SAMPLE
def test_priorities(kernel):
    clean(kernel, 2, schedules=2 if kernel.needs_cube else 3, strategy="pct", seed=7)


@pytest.mark.parametrize(
    "kernel",
    # A one-shot all-gather synchronizes like an all-reduce, and wide words in two shots like other words.
    some(
        [
            pytest.param(k, marks=pytest.mark.soak) if k.collective == "all_gather" or k.wide and k.hops > 1 else k
            for k in SEARCHED
        ],
        lambda number, kernel: kernel.collective == "barrier",
    ),
    ids=lambda k: k.name,
)
def test_every_schedule_with_one_preemption(kernel):
    """Two ranks, one block, two calls. `make soak` has two preemptions, and the other kernels.

    Neither has kernels of a hybrid cube mesh: whenever one of its ranks waits, any of seven others may run next, which
    is more schedules than can be run even without a preemption.
    """
    report = clean(kernel, 2, schedules=None, strategy="exhaustive", preemptions=1, sizes=(3, 3), blocks=1)
    assert 20 < report.ran < 1000


@SAMPLE
def test_a_rank_that_stops_or_dies_at_any_step(kernel):
    clean(kernel, 2, schedules=4, faults=("stop", "drop"))


@pytest.mark.parametrize(
    "kernel",
    some(
        [k for k in registry.KERNELS if k.collective != "barrier"],
        lambda number, kernel: number % 6 == 0 and not kernel.needs_cube,
        odd,
    ),
    ids=lambda k: k.name,
)
def test_messages_of_several_chunks(kernel):
    """Two and a half mailboxes in one launch, so that they rotate within it."""
    world_size = registry.CUBE_RANKS if kernel.needs_cube else 2
    memory = layout.plan(world_size, campaign.smallest(world_size).arena_bytes)
    tile = min(256, memory.largest_tile(kernel.algorithm, kernel.protocol))
    options = shipped.options(world_size, blocks=1, tile=tile)
    words = chunk(kernel, world_size, memory) * 5 // 2
    calls = shipped.body(kernel, (words,))

    def fn(comm: tricomm.Communicator) -> list[torch.Tensor]:
        results = calls(comm)
        assert comm._group.words[layout.ENDED] == comm.options._tuning.first_epoch + 3, "three chunks are three epochs"
        return results

    passed(fn, world_size, schedules=1, options=options)


def chunk(kernel: Kernel, world_size: int, memory: layout.Layout) -> int:
    """Words of one row of the message, or of one shard of it, that one epoch moves."""
    rooms = {"ll": memory.ll_buffer // 16, "ll128": memory.wide_buffer // 32 * 3, "simple": memory.simple_buffer // 8}
    words = rooms[kernel.protocol]
    if kernel.shards is not None or kernel.name == "all_reduce_hybrid_cube_mesh_simple":
        return words // 2  # half a mailbox for each phase, or for the rank's sum
    # If peers read, all mailboxes are one stage.
    return words * world_size if kernel.read(world_size) else words


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.soak)])
@pytest.mark.parametrize("world_size", some([3, registry.CUBE_RANKS], 2))
def test_kernels_in_turn(world_size, seed):
    """Kernels in any order: all have the same rule that keeps a peer from running ahead."""
    kernels = [k for k in registry.KERNELS if world_size == registry.CUBE_RANKS or not k.needs_cube]
    if world_size == registry.CUBE_RANKS:  # cube mesh kernels between kernels in which all ranks exchange data
        kernels = [*CUBE, *CUBE, *(k for k in kernels if k.algorithm == "one_shot" and k.collective in _SHORT)]
    Random(seed).shuffle(kernels)
    memory = shipped.options(world_size, blocks=1, tile=16)
    passed(turns(kernels, (3, 1)), world_size, schedules=2 if world_size == 3 else 1, seed=seed, options=memory)


_SHORT = ("all_gather", "broadcast", "reduce", "barrier")


def turns(kernels: Sequence[Kernel], sizes: Sequence[int]) -> Callable[[tricomm.Communicator], list[torch.Tensor]]:
    def fn(comm: tricomm.Communicator) -> list[torch.Tensor]:
        calls = ShippedCalls(comm)
        results = (calls.make(k, n, sizes[n % len(sizes)]) for n, k in enumerate(kernels))
        return [result for result in results if result is not None]

    return fn


@pytest.mark.parametrize("kernel", [k for k in CUBE if k.reduces], ids=lambda k: k.name)
@pytest.mark.parametrize("dtype", some([torch.float32, torch.bfloat16], 2))
def test_a_cube_adds_quad_by_quad(kernel, dtype):
    """Numbers whose sum depends on the order and on the rounding; the reference has the guaranteed ones."""

    def fn(comm: tricomm.Communicator) -> torch.Tensor:
        x = torch.tensor((1e8, 3.25, -1e8, 1.0, 257.0, 1e8, 1.0, -1e8)[comm.rank]).to(dtype).repeat(5)
        return comm.all_reduce(x, algorithm=kernel.algorithm, protocol=kernel.protocol)

    options = replace(shipped.options(registry.CUBE_RANKS, 1, 4), topology=OTHERWISE)
    passed(fn, registry.CUBE_RANKS, schedules=1, options=options)


@pytest.mark.soak
@KERNELS
def test_no_false_alarm(kernel):
    schedules = FALSE_ALARMS // (20 if kernel.needs_cube else 2)
    clean(kernel, 2, schedules=schedules, sizes=shipped.SIZES)
    clean(kernel, 2, schedules=schedules, sizes=shipped.SIZES, strategy="pct", blocks=1)
    clean(kernel, 2, schedules=schedules // 5, sizes=shipped.SIZES, faults=campaign.FAULTS)


@pytest.mark.soak
@pytest.mark.parametrize("kernel", [k for k in registry.KERNELS if k not in CUBE], ids=lambda k: k.name)
def test_every_schedule_with_two_preemptions(kernel):
    clean(kernel, 2, schedules=None, strategy="exhaustive", preemptions=2, sizes=(3, 3), blocks=1)


@pytest.mark.parametrize("asked", some([["--collective", "all_gather,send"], []], 2), ids=["some", "all"])
def test_the_command_runs_every_kernel_on_the_number_of_ranks_that_it_needs(asked):
    done = CliRunner().invoke(cli, ["check", "--schedules", "1", *asked])
    assert done.exit_code == 0, done.output
    wanted = [k.name for k in CHECKED if not asked or k.collective in asked[1].split(",")]
    assert [line.split(":")[0] for line in done.stdout.splitlines() if ": no finding in 1 " in line] == wanted


def test_the_command_names_the_kernels_that_this_number_of_ranks_cannot_run():
    asked = ["check", "--schedules", "1", "--world-size", "2", "--algorithm"]
    some_run = CliRunner().invoke(cli, [*asked, "hybrid_cube_mesh,multicast", "--collective", "all_gather"])
    assert some_run.exit_code == 0 and "all_gather_multicast_simple: no finding" in some_run.stdout
    told = "a hybrid cube mesh has 8 ranks, not 2"
    cube = [f"all_gather_hybrid_cube_mesh_{protocol}" for protocol in ("ll", "ll128", "simple")]
    assert some_run.stderr.splitlines() == [f"left out: {', '.join(cube)}: {told}"]
    none = CliRunner().invoke(cli, [*asked, "hybrid_cube_mesh", "--collective", "all_gather"])
    assert none.exit_code == 2 and " ".join(none.stderr.split()).endswith(
        f"no shipped kernel that was asked for can run so: {', '.join(cube)}: {told}. Run it without --world-size"
    )


def test_messages_of_one_rank_are_refused_and_left_out_by_name():
    told = "send_ll, send_simple: a message has a sender and a receiver, so 2 ranks at least, not 1"
    asked = ["check", "--schedules", "1", "--world-size", "1", "--collective"]
    none = CliRunner().invoke(cli, [*asked, "send"])
    assert none.exit_code == 2 and told + ". Run it without --world-size" in " ".join(none.stderr.split())
    some_run = CliRunner().invoke(cli, [*asked, "send,barrier"])
    assert some_run.exit_code == 0 and some_run.stderr == f"left out: {told}\n"
    assert [line.split(":")[0] for line in some_run.stdout.splitlines()] == ["barrier"]


@pytest.mark.parametrize(
    ("asked", "ways"),
    [
        (
            ("multicast", "simple", 2, 80),
            ["without --compiled, which interprets the kernels,", "with --compiled sm_90 or sm_100"],
        ),
        (("hybrid_cube_mesh", "ll", 2, 80), ["without --world-size"]),
        (("hybrid_cube_mesh", "ll", 2, None), ["without --world-size"]),
        (("hybrid_cube_mesh", "ll128", 2, 70), ["without --compiled and --world-size"]),
        (
            ("hybrid_cube_mesh", "ll128", None, 70),
            ["without --compiled, which interprets the kernels,", "with --compiled sm_75 or sm_80 or sm_90 or sm_100"],
        ),
    ],
)
def test_a_choice_without_a_kernel_is_refused_with_those_that_have_one(monkeypatch, asked, ways):
    monkeypatch.setattr(registry.multimem, "why_not", lambda number: "too old" if number < 90 else None)
    monkeypatch.setattr(registry.wide_words, "why_not", lambda number: "too old" if number < 75 else None)
    algorithm, protocol, world_size, capability = asked
    result = shipped.kernels("all_gather", algorithm, protocol)
    architecture = capability and f"sm_{capability}"
    monkeypatch.setattr(shipped, "capability_of", lambda architecture: capability)
    with pytest.raises(InvalidArgument) as refused:
        shipped.usable(result, world_size, architecture)
    assert str(refused.value).endswith(f". Run it {' or '.join(ways)}")


def test_a_function_without_an_examined_access_does_not_pass(tmp_path):
    file = tmp_path / "idle.py"
    file.write_text("def body(comm):\n    return None\n")
    done = CliRunner().invoke(cli, ["check", f"{file}:body", "--world-size", "2", "--schedules", "3"])
    assert done.exit_code == 2 and "no finding" not in done.stdout
    assert "nothing was examined: in 3 schedules of 2 rank(s) no kernel accessed" in " ".join(done.stderr.split())
