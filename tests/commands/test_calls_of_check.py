"""The calls that `tricomm check` makes of the shipped kernels: mistakes that only they show, in the first schedule."""

from unittest.mock import patch

import pytest

import tricomm
from tests.explorer.compiled import ptx_mutants
from tests.explorer.mutation import Edit, _keep, loaded
from tests.marks import some
from tricomm.explorer import campaign, shipped
from tricomm.kernels import layout, multimem
from tricomm.kernels.collectives import registry

CHUNKS = "kernels/device/chunks.py"
_MEET = "            status = synchronize(ahead, 0, SPEC)\n"
_TURN = "parts = parts + (tiles[r][k],)\n        reduced"
_PIECE = "base = part * piece"
_ACK = "(number << 32) + lane * 0, lane == 0, True, SPEC.PTX)"
_LEFT = "            status = synchronize(behind, 1, SPEC)\n        number += 1\n    leave(group, start, owner, call, "

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
        ("send", "one_shot", "simple"), "kernels/collectives/send.py", _PIECE, _PIECE.replace("part", "0 * part"),
    ),
    "a relaxed ack behind words with flags": (
        ("send", "one_shot", "ll"), "kernels/device/message_queues.py", _ACK, _ACK.replace("True", "not SPEC.LL"),
    ),
}  # fmt: skip


def report(key, edits, sizes=None):
    kernel = registry.find(*key)
    memory = shipped.options(3, kernel=kernel)
    body = shipped.body(kernel, sizes or shipped.sizes(kernel, 3, memory))
    with loaded(edits), patch.object(campaign.Campaign, "_keep", _keep):
        return tricomm.check(body, 3, 1, options=memory)


@pytest.mark.parametrize("name", some(MISTAKES, 3))
def test_calls_of_several_chunks_and_of_an_order_show_it(name):
    key, *edit = MISTAKES[name]
    assert report(key, ()).ok
    assert not report(key, (Edit(*edit),)).ok
    if "ack" not in name:  # the short messages may show that one, too
        assert report(key, (Edit(*edit),), shipped.SIZES).ok


@pytest.mark.parametrize("kernel", shipped.kernels(None, None, None), ids=lambda kernel: kernel.name)
@pytest.mark.parametrize("world_size", [2, 3, 5, 8])
def test_the_first_call_has_three_chunks(kernel, world_size):
    memory = shipped.options(world_size, kernel=kernel)
    first = shipped.sizes(kernel, world_size, memory)[0]
    if kernel.needs_cube or kernel.collective in ("barrier", shipped.FUSED):
        assert first == shipped.SIZES[0]
        return
    plan = layout.plan(world_size, memory.arena_bytes)
    chunk = plan.buffer_words(kernel.algorithm, kernel.protocol, kernel.collective) * (world_size**kernel.staged)
    largest = plan.largest_tile(kernel.algorithm, kernel.protocol)
    if kernel.pairwise:
        chunk = plan.slot_words(kernel.protocol)
        largest = plan.slot_words("ll")
    assert -(-first // chunk) == 3 or first == shipped.SIZES[0] > 2 * chunk
    assert memory.tile <= largest
    compiled = shipped.options(world_size, compiled="sm_90")
    assert shipped.sizes(kernel, world_size, compiled, "sm_90")[0] > chunk


@pytest.mark.skipif(multimem.why_not(90) is not None, reason="this Triton is refused multimem")
def test_a_copy_of_the_kernels_through_a_switch_is_clean_too():
    """A copy has the exemptions of the original: what fills up a pair may stay unread."""
    with loaded(()):
        report = ptx_mutants.explore(("all_reduce", "multicast", "simple"), 1, 3)
    assert report.ok, report
