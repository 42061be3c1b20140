"""Memory that the ranks' processes share on the CPU.

    rank 0: memfd, sealed ── size, and over a Unix socket its descriptor ──▶ rank 1: maps it

Set-up has stages. After each stage all ranks continue, or all ranks raise and undo the stages before.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack

import torch

from tricomm.deadline import Deadline
from tricomm.errors import GroupAborted, ResourceError
from tricomm.store.arenas.local_arena import check_view
from tricomm.store.arenas.memory_records import RecordFormat
from tricomm.store.collective_stages import CollectiveStages, pass_descriptors
from tricomm.store.control import ControlPage
from tricomm.store.descriptors import DescriptorSocket
from tricomm.store.records import NAME_BYTES
from tricomm.store.segments import Segment

_FORMAT = RecordFormat(b"TCSH", f"{NAME_BYTES}s")  # the name of the socket


def open_posix_shm(control: ControlPage, nbytes: int, timeout: float) -> PosixShmArena:
    """A zeroed block of `nbytes` bytes for each rank, mapped by all ranks; called by all ranks together.

    Takes `timeout` seconds at most. Raises the same error on all ranks, with everything undone: `ResourceError` if
    memory or a descriptor is refused, `InvalidArgument` for a bad size or a bad TRICOMM_SOCKET_DIR,
    `RendezvousError` if the ranks' records do not fit together; and as `ControlPage.exchange` does if a rank is gone.
    """
    deadline = Deadline(timeout)
    stage = CollectiveStages(control, "posix_shm", deadline)
    with ExitStack() as undo:
        passing = DescriptorSocket()
        undo.callback(passing.abandon)
        own: list[Segment] = []
        records = stage.gather("allocate memory", lambda: _allocate(control, nbytes, passing, own, undo))
        [mine] = own
        segments = stage("map peers' memory", lambda: _attach_all(control, passing, records, mine, deadline, undo))
        mine.close_fd()
        undo.pop_all()
    return PosixShmArena(control.rank, segments)


class PosixShmArena:
    """One segment per rank, mapped here. `bases[r]` is the address of rank r's."""

    kind = "posix_shm"
    reason = no_suspend = ""
    multicast, no_multicast = 0, ""

    def __init__(self, rank: int, segments: Sequence[Segment]) -> None:
        self.nbytes = segments[0].nbytes
        self.suspended = False
        self._rank = rank
        self.bases = tuple(segment.address for segment in segments)
        self._segments = tuple(segments)

    def tensor(self, rank: int, offset: int, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """View of rank `rank`'s block from byte `offset` on; it keeps that block mapped, also after `close`.

        Raises `InvalidArgument` if it would leave the block, `GroupAborted` after `close`."""
        if not self._segments:
            raise GroupAborted("this posix_shm arena is closed")
        numel = check_view(self.nbytes, self.bases, rank, offset, shape, dtype.itemsize)
        if numel == 0:
            return torch.empty(tuple(shape), dtype=dtype, device="cpu")
        flat = torch.frombuffer(self._segments[rank].buffer, dtype=dtype, count=numel, offset=offset)
        return flat.view(tuple(shape))

    @property
    def closed(self) -> bool:
        return not self._segments

    def suspend(self) -> None:
        """Return this rank's pages to the system, for all ranks; see `Arena.suspend`. A suspended block reads as zeros,
        and touching it allocates pages again."""
        self.suspended = True
        self._segments[self._rank].give_back()

    def resume(self, control: ControlPage, timeout: float) -> None:
        """Zeroed pages again, on all ranks or on none; see `Arena.resume`."""
        own = self._segments[self._rank]
        stage = CollectiveStages(control, "posix_shm: resume", Deadline(timeout))
        with ExitStack() as undo:
            undo.callback(own.give_back)
            stage("allocate memory", own.take_again)
            undo.pop_all()
        self.suspended = False

    def close(self) -> None:
        """Unmap all blocks; a block that tensors still view is unmapped with the last of them. Idempotent."""
        segments, self._segments = self._segments, ()
        for segment in segments:
            segment.close()

    def keep(self) -> None:
        """Instead of `close`: all blocks stay mapped."""


def _allocate(
    control: ControlPage, nbytes: int, passing: DescriptorSocket, own: list[Segment], undo: ExitStack
) -> bytes:
    """Add this rank's memory to `own`; returns its record."""
    own.append(_kept(undo, Segment.create(f"tricomm-{control.group}", nbytes)))
    if control.world_size > 1:
        passing.bind()
    return _FORMAT.pack(control.rank, nbytes, passing.name)


def _attach_all(
    control: ControlPage,
    passing: DescriptorSocket,
    records: Sequence[bytes],
    mine: Segment,
    deadline: Deadline,
    undo: ExitStack,
) -> list[Segment]:
    names = [_FORMAT.parse(record, rank, mine.nbytes)[0] for rank, record in enumerate(records)]
    segments = {control.rank: mine}

    def take(rank: int, held: list[int]) -> None:
        try:
            segments[rank] = _kept(undo, Segment.attach(held, mine.nbytes, readonly=False))
        except ResourceError as error:
            raise ResourceError(f"rank {rank}'s memory cannot be mapped: {error}") from error

    pass_descriptors(control, passing, names, [mine.fd], take, "posix_shm", deadline)
    passing.close()
    return [segments[rank] for rank in range(control.world_size)]


def _kept(undo: ExitStack, segment: Segment) -> Segment:
    undo.callback(segment.close)
    return segment
