"""The calls that `tricomm check` makes of shipped kernels: each finds a mistake that the others miss."""

from unittest.mock import patch

import pytest
import torch

import tricomm
from tests.explorer.compiled import ptx_mutants
from tests.explorer.mutation import Edit, _keep, loaded
from tests.marks import some
from tricomm.explorer import campaign, shipped, shipped_calls
from tricomm.kernels import layout, multimem
from tricomm.kernels.collectives import registry
from tricomm.options import tuned

CHUNKS = "kernels/device/chunks.py"
_MEET = "            status = synchronize(ahead, 0, SPEC)\n"
_TURN = "parts = parts + (tiles[r][k],)\n        reduced"
SEND, QUEUES = "kernels/collectives/send.py", "kernels/device/message_queues.py"
_CLEARED = "SPEC.BLOCK):\n            put_ll(slot"
_ARRIVES = '1, sem="acq_rel", scope="gpu")'
_BEHIND = "        status = barrier(group, start, call, 1, SPEC.WORLD_SIZE, SPEC.LANES, SPEC.PTX)\n"
_READ = "load_words(inputs[r], first, numel"
_PIECE = "base = part * piece"
_ACK = "(number << 32) + lane * 0, lane == 0, True, SPEC.PTX)"
_LEFT = "            status = synchronize(behind, 1, SPEC)\n        number += 1\n    leave(group, start, call, "

MISTAKES = {
    "chunks rounded down": (
        ("all_reduce", "one_shot", "ll"), CHUNKS, "        chunks = tl.cdiv(unnumbered.count, chunk_words)\n    status",
        "        chunks = unnumbered.count // chunk_words + (unnumbered.count < chunk_words)\n    status",
    ),
    "the length of equal chunks rounded down": (
        ("all_reduce", "one_shot", "simple"), CHUNKS, "tl.cdiv(count, chunks * unit) * unit",
        "count // (chunks * unit) * unit",
    ),
    "one barrier for two chunks": (
        ("reduce_scatter", "one_shot", "simple"), CHUNKS, f"{_MEET}        number",
        f"            if number % 2 == 0:\n    {_MEET}        number",
    ),
    "one epoch for all chunks of two hops": (
        ("all_reduce", "two_shot", "simple"), CHUNKS, f"{_LEFT}chunks,", f"{_LEFT}1,",
    ),
    "epochs by twos": (
        ("all_gather", "one_shot", "ll128"), CHUNKS, "advance(whole.epoch, number)", "advance(whole.epoch, number * 2)",
    ),
    "summed from the last rank on": (
        ("reduce_scatter", "one_shot", "ll128"), "kernels/device/planes.py", _TURN,
        _TURN.replace("[r]", "[SPEC.WORLD_SIZE - 1 - r]"),
    ),
    "every piece of a message is the first": (
        ("send", "one_shot", "simple"), SEND, _PIECE, _PIECE.replace("part", "0 * part"),
    ),
    "a relaxed ack after words with flags": (
        ("send", "one_shot", "ll"), QUEUES, _ACK, _ACK.replace("True", "not SPEC.LL"),
    ),
}  # fmt: skip
# Mistakes that need old contents of a slot, a second queue, a reused handle, or the order of a sum to show; with the
# kinds of finding, the number of schedules, and their seed.
LL, ROWS = ("send", "one_shot", "ll"), ("all_reduce_rms_norm", "one_shot", "ll128")
HANDLE = ("all_reduce", "one_shot", "simple", True)
MORE = {
    "plain payload is not remembered": (LL, SEND, "plain |= bit", "plain |= 0", {"wrong_result"}, 12, 3),
    "the first tile of a slot is cleared alone": (
        LL, QUEUES, f"range(0, words, {_CLEARED}", f"range(0, SPEC.BLOCK, {_CLEARED}", {"wrong_result"}, 4, 2,
    ),
    "a slot is cleared, and its header is relaxed": (
        LL, SEND, "tag, cleared, SPEC)", "tag, False, SPEC)", {"race"}, 1, 0,
    ),
    "relaxed arrivals of a message's blocks": (
        LL, QUEUES, _ARRIVES, _ARRIVES.replace("acq_rel", "relaxed"), {"race"}, 1, 0,
    ),
    "a handle's input is written while peers read it": (
        HANDLE, "kernels/collectives/all_reduce_one_shot.py", _BEHIND, "", {"race"}, 1, 0,
    ),
    "a handle is summed from the last rank on": (
        HANDLE, "kernels/collectives/all_reduce_one_shot.py", _READ, _READ.replace("[r]", "[WORLD_SIZE - 1 - r]"),
        {"wrong_result"}, 1, 0,
    ),
    "rows are summed from the last rank on": (
        ROWS, "kernels/device/planes.py", _TURN, _TURN.replace("[r]", "[SPEC.WORLD_SIZE - 1 - r]"),
        {"wrong_result", "exception"}, 1, 0,
    ),
}  # fmt: skip


def report(key, edits, sizes=None, schedules=1, seed=0):
    kernel = registry.find(*key)
    memory = shipped.options(3, kernel=kernel)
    body = shipped.body(kernel, sizes or shipped.sizes(kernel, 3, memory))
    with loaded(edits), patch.object(campaign.Campaign, "_keep", _keep):
        return tricomm.check(body, 3, schedules, options=memory, seed=seed)


@pytest.mark.parametrize("name", some(MORE, 2))
def test_mistakes_that_need_slots_queues_handles_or_orders_are_found(name):
    key, *edit, kinds, schedules, seed = MORE[name]
    assert report(key, (), None, schedules, seed).ok
    assert {f.kind for f in report(key, (Edit(*edit),), None, schedules, seed).findings} & kinds


@pytest.mark.parametrize("protocol", ["ll", "simple"])
@pytest.mark.parametrize("first_epoch", [1, 2**32 - 8])
def test_the_pieces_of_a_message_are_counted_as_the_kernels_count_them(protocol, first_epoch):
    kernel = registry.find("send", "one_shot", protocol)
    memory = tuned(shipped.options(3, kernel=kernel), first_epoch=first_epoch)
    sizes = shipped.sizes(kernel, 3, memory)

    def body(comm):
        calls, counted = shipped_calls.ShippedCalls(comm), []
        for number, size in enumerate(sizes):
            calls.make(kernel, number, size)
            plan = comm._internal.group.layout
            shape = (3, plan.queues, layout.QUEUE_STATE // 8)
            states = comm._group.arena.tensor(comm.rank, plan.queue_states, shape, torch.int64)
            counted.append((calls._messages._next[:], states[(comm.rank + 1) % 3, :, layout.SENT].tolist()))
        return counted

    first = max(first_epoch, layout.SLOTS)
    for counted in tricomm.simulate(body, 3, options=memory)[:2]:
        assert all(ours == theirs and len(ours) == 2 for ours, theirs in counted)
        assert counted[-1][0] != [first] * 2 and len({tuple(ours) for ours, _ in counted}) == len(sizes)


@pytest.mark.parametrize("name", some(MISTAKES, 3))
def test_mistakes_that_need_several_chunks_or_an_order_are_found(name):
    key, *edit = MISTAKES[name]
    assert report(key, ()).ok
    assert not report(key, (Edit(*edit),)).ok
    if "ack" not in name:  # short messages may show this one as well
        assert report(key, (Edit(*edit),), shipped.SIZES).ok


@pytest.mark.parametrize("kernel", shipped.kernels(None, None, None), ids=lambda kernel: kernel.name)
@pytest.mark.parametrize("world_size", [2, 3, 5, 8])
def test_the_first_call_has_three_chunks(kernel, world_size):
    memory = shipped.options(world_size, kernel=kernel)
    first = shipped.sizes(kernel, world_size, memory)[0]
    if kernel.needs_cube or kernel.zero_copy or kernel.collective in ("barrier", shipped.FUSED):
        assert first == shipped.SIZES[0]
        return
    if kernel.pairwise:
        plan = layout.plan(world_size, memory.arena_bytes)
        assert plan.queues >= 2 and memory._tuning.tile == plan.slot_words("ll") // 2
        return
    plan = layout.plan(world_size, memory.arena_bytes)
    chunk = plan.buffer_words(kernel.algorithm, kernel.protocol, kernel.collective) * (world_size**kernel.staged)
    largest = plan.largest_tile(kernel.algorithm, kernel.protocol)
    assert -(-first // chunk) == 3 or first == shipped.SIZES[0] > 2 * chunk
    assert memory._tuning.tile <= largest
    compiled = shipped.options(world_size, compiled="sm_90")
    assert shipped.sizes(kernel, world_size, compiled, "sm_90")[0] > chunk


@pytest.mark.skipif(multimem.why_not(90) is not None, reason="this Triton is refused multimem")
def test_an_unchanged_copy_of_the_nvls_kernels_has_no_finding():
    """A copy of a kernel has the original's exemptions: the padding of a pair may stay unread."""
    with loaded(()):
        report = ptx_mutants.explore(("all_reduce", "multicast", "simple"), 1, 3)
    assert report.ok, report


def test_ranks_that_count_chunks_differently_are_not_reported_as_different_calls():
    more = Edit(CHUNKS, f"{_LEFT}chunks,", f"{_LEFT}1 + (rank_of(group) == 0),")
    (finding,) = report(("all_reduce", "two_shot", "simple"), [more]).findings
    assert finding.kind == "exception" and "their kernels count chunks differently" in finding.text
    assert "different calls" not in finding.text and ".." not in str(finding)
