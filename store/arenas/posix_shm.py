"""Memory that the ranks' processes share on the CPU.

    rank 0: memfd, sealed ── size, and over a Unix socket its descriptor ──▶ rank 1: maps it

Set-up has stages. After each stage all ranks continue, or all ranks raise and undo the stages before.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import NamedTuple

import torch

from tricomm.deadline import Deadline
from tricomm.errors import GroupAborted, RendezvousError, ResourceError
from tricomm.store.arenas.arena import Arena, RecordFormat, host_view
from tricomm.store.arenas.passing import DescriptorPassing
from tricomm.store.collective_stages import CollectiveStages
from tricomm.store.control import ControlPage
from tricomm.store.records import NAME_BYTES
from tricomm.store.segments import MAX_NBYTES, Segment, map_again

_FORMAT = RecordFormat(b"TCSH", f"QQ{NAME_BYTES}s")  # size of the file, offset of the memory in it, name of the socket


class FilePart(NamedTuple):
    """Memory in a file: the descriptor, the offset of the memory in the file, and the size of the file."""

    fd: int
    offset: int
    size: int


def open_posix_shm(
    control: ControlPage, nbytes: int, timeout: float, lender: PosixShmArena | None = None
) -> PosixShmArena:
    """A zeroed block of `nbytes` bytes for each rank, mapped by all ranks; called by all ranks together.

    With a `lender`, this rank maps the blocks at the lender's addresses, in place of the lender's blocks.

    Takes `timeout` seconds at most. Raises the same error on all ranks, with everything undone: `ResourceError` if
    memory or a descriptor is refused, `InvalidArgument` for a bad size or a bad TRICOMM_SOCKET_DIR,
    `RendezvousError` if the ranks' records do not fit together; and as `ControlPage.exchange` does if a rank is gone.
    """
    own: list[Segment] = []
    with ExitStack() as undo:

        def allocate() -> FilePart:
            own.append(Segment.create(f"tricomm-{control.group}", nbytes))
            undo.callback(own[0].close)
            return FilePart(own[0].fd, 0, nbytes)

        stages = CollectiveStages(control, "posix_shm", Deadline(timeout))
        mapped = map_peers(stages, undo, "allocate memory", allocate, nbytes, "posix_shm")
        own[0].close_fd()
        segments = [own[0] if rank == control.rank else mapped[rank][0] for rank in range(control.world_size)]
        if lender is not None:
            lender.show(segments)
        undo.pop_all()
    return PosixShmArena(control.rank, segments, lender)


def map_peers(
    stages: CollectiveStages,
    undo: ExitStack,
    stage: str,
    look: Callable[[], FilePart],
    nbytes: int,
    what: str,
    sealed: bool = True,
) -> dict[int, tuple[Segment, int]]:
    """By rank, the mapped file that holds the `nbytes` of memory of another rank, and the memory's offset in the file.

    `look`, run as the first `stage`, returns this rank's file. All files but a user's own are `sealed`. `undo` closes
    all.
    """
    control, deadline = stages.control, stages.deadline
    descriptors = DescriptorPassing(control, what)
    undo.callback(descriptors.abandon)
    mine: list[int] = []
    mapped: dict[int, tuple[Segment, int]] = {}

    def described() -> bytes:
        part = look()
        mine.append(part.fd)
        return _FORMAT.pack(control.rank, nbytes, part.size, part.offset, descriptors.bind())

    records = stages.gather(stage, described)

    def attach() -> None:
        peers = [_parsed(record, rank, nbytes) for rank, record in enumerate(records)]

        def take(rank: int, held: list[int]) -> None:
            size, offset, _ = peers[rank]
            try:
                segment = Segment.attach(held, size, readonly=False, sealed=sealed)
            except ResourceError as error:
                raise ResourceError(f"rank {rank}'s memory cannot be mapped: {error}") from error
            undo.callback(segment.close)
            mapped[rank] = segment, offset

        descriptors.take([name for _, _, name in peers], mine, take, deadline)

    stages("map peers' memory", attach)
    return mapped


def _parsed(record: bytes, rank: int, nbytes: int) -> tuple[int, int, bytes]:
    """(size of the file, offset of the memory, socket's name) of rank `rank`. Raises `RendezvousError`."""
    size, offset, name = _FORMAT.parse(record, rank, nbytes)
    if not offset + nbytes <= size <= MAX_NBYTES:
        raise RendezvousError(f"rank {rank} shares {nbytes} bytes of a file of {size}")
    return size, offset, name


class PosixShmArena(Arena):
    """One segment per rank, mapped here; a view keeps its block mapped, also after `close`."""

    kind = "posix_shm"

    def __init__(self, rank: int, segments: Sequence[Segment], lender: PosixShmArena | None = None) -> None:
        self.nbytes = segments[0].nbytes
        self._rank, self._lender = rank, lender
        self._segments: tuple[Segment, ...] = tuple(segments) if lender is None else lender._segments
        self.bases = tuple(segment.address for segment in self._segments)

    def _view(self, rank: int, offset: int, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        return host_view(self._segments[rank].buffer, offset, shape, dtype)

    def suspend(self) -> None:
        """Return this rank's pages to the system, for all ranks. A suspended block reads as zeros, and touching it
        allocates pages again."""
        self.suspended = True
        self._segments[self._rank].give_back()

    def resume(self, control: ControlPage, timeout: float) -> None:
        own = self._segments[self._rank]
        stage = CollectiveStages(control, "posix_shm: resume", Deadline(timeout))
        with ExitStack() as undo:
            undo.callback(own.give_back)
            stage("allocate memory", own.take_again)
            undo.pop_all()
        self.suspended = False

    def show(self, segments: Sequence[Segment]) -> None:
        """Map `segments` at the addresses of this arena's segments, in place of these. Raises after `close`."""
        if self.closed:
            raise GroupAborted("this posix_shm arena is closed; its addresses are gone")
        for here, segment in zip(self._segments, segments, strict=True):
            map_again(segment.address, self.nbytes, here.address)

    def own(self) -> None:
        if self._lender is not None:
            self._lender._segments = ()
            self._lender = None

    def close(self) -> None:
        self.closed = True
        segments, self._segments = self._segments, ()
        for segment in segments if self._lender is None else ():
            segment.close()
