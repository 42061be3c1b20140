"""Concurrent channels: each has its own stream of launches on every rank, over its own words.

Ranks 0 and 1 have two channels here. Each stream is a rank of the model, and only its slots determine the memory that
it writes and polls. So channels that share nothing may advance in any order. There is also a case for each thing that
they must not share, in which they do share it.
"""

from __future__ import annotations

from collections.abc import Callable

from devtools.mailbox_model.explore import LOSES, SAFE, Block, Case, Launch, Op, Ranks, poll, push

_CALLS = 3
Numbers = Callable[[int, int, int], int]  # (rank, channel, number of the call in the channel) -> epoch


def call(rank: int, channel: int, epoch: int, own_headers: bool = True, own_words: bool = True) -> Launch:
    """One block pushes a word and its header to the other rank, and polls the other's."""
    peer = [1 - rank]
    words = [f"a{channel if own_words else 0}", f"h{channel if own_headers else 0}"]
    return [push(rank, peer, epoch, words) + poll(rank, peer, epoch, words)]


def side_by_side(numbers: Numbers, own_headers: bool = True, own_words: bool = True) -> Ranks:
    """A stream for each rank and channel."""
    return [
        [call(rank, channel, numbers(rank, channel, n), own_headers, own_words) for n in range(1, _CALLS + 1)]
        for rank in (0, 1)
        for channel in (0, 1)
    ]


def own_epochs(rank: int, channel: int, number: int) -> int:
    """Each channel counts its own calls; channel 1 has made two before."""
    return number + 2 * channel


def shared_epoch(rank: int, channel: int, number: int) -> int:
    """Both channels share one counter, in the order of their launches; on rank 1 those of channel 1 come first."""
    return 2 * number - (channel != rank)


def one_queue() -> Ranks:
    """One call in each channel, on a single queue per rank, in a different order on each rank."""
    return [[call(rank, channel, 1) for channel in (rank, 1 - rank)] for rank in (0, 1)]


def one_launch(rank: int) -> Launch:
    """The blocks of both channels in one launch."""
    return [*call(rank, 0, 1), *call(rank, 1, 1)]


def half_resident(rank: int) -> list[Launch]:
    """Both channels' kernels have two blocks, and the device holds two: the rank's own order decides which run."""
    blocks: list[Block] = [_block(rank, channel, block) for channel in (rank, 1 - rank) for block in (0, 1)]
    return [blocks[:2], blocks[2:]]


def _block(rank: int, channel: int, block: int) -> Block:
    word = [f"{channel}{block}"]
    ops: list[Op] = push(rank, [1 - rank], 1, word) + poll(rank, [1 - rank], 1, word)
    return ops


def cases() -> list[Case]:
    return [
        Case("two channels, in any order against each other", SAFE, side_by_side(own_epochs)),
        Case("two channels with one epoch", LOSES, side_by_side(shared_epoch)),
        Case("two channels with one header region", LOSES, side_by_side(own_epochs, own_headers=False)),
        Case("two channels with one mailbox", LOSES, side_by_side(own_epochs, own_words=False)),
        Case("two channels' kernels resident at once", SAFE, [[one_launch(rank)] for rank in (0, 1)]),
        Case("two channels' kernels in one hardware queue", LOSES, one_queue()),
        Case("two channels' kernels, of which one alone is resident", LOSES, [half_resident(rank) for rank in (0, 1)]),
    ]
