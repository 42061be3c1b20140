"""A user's tensor that every rank reaches in place: no copy is made, and the user still owns the tensor.

    on a GPU     the CUDA allocations that hold it are passed to the peers (`registered_memory`), or torch's
                 symmetric memory has mapped it already
    on a CPU     torch's shared memory (`share_memory_()`): the descriptor of its file is passed to the peers

A peer maps the whole allocation that holds a tensor, but reads and writes only the tensor.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch

from tricomm.deadline import Deadline
from tricomm.errors import InvalidArgument, ResourceError
from tricomm.store.arenas.arena import NOT_BOUND, Arena, host_view, raw_view
from tricomm.store.arenas.posix_shm import FilePart, map_peers
from tricomm.store.collective_stages import CollectiveStages
from tricomm.store.control import ControlPage
from tricomm.store.segments import Segment

_PLACE = struct.Struct("<iiqq")  # rank and size of torch's group, offset of the tensor in its segment, bytes
_REASON_BYTES = 200
_MULTICAST_ALIGNMENT = 16  # of an access by the switch


class RegisteredArena(Arena):
    """The tensors of all ranks, at `bases`. `segments`: by rank, a peer's mapped memory and the tensor's offset in it;
    they are closed with the arena."""

    no_suspend = "registered memory is the user's"

    def __init__(
        self,
        kind: str,
        tensor: torch.Tensor,
        bases: Sequence[int],
        segments: Mapping[int, tuple[Segment, int]] = MappingProxyType({}),
        multicast: int = 0,
        no_multicast: str = NOT_BOUND,
    ) -> None:
        self.kind, self.nbytes, self.bases = kind, tensor.nbytes, tuple(bases)
        self.multicast, self.no_multicast = multicast, no_multicast
        self._device, self._segments = tensor.device, dict(segments)

    def _view(self, rank: int, offset: int, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        if rank in self._segments:  # the view keeps it mapped
            segment, start = self._segments[rank]
            return host_view(segment.buffer, start + offset, shape, dtype)
        return raw_view(self.bases[rank] + offset, shape, dtype, self._device)

    def close(self) -> None:
        """Unmap the other ranks' memory; the user's own stays. Idempotent."""
        self.closed = True
        for segment, _ in self._segments.values():
            segment.close()
        self._segments.clear()


def open_registered(
    control: ControlPage, tensor: torch.Tensor, timeout: float, group: Any = None, no_multicast: str = ""
) -> Arena:
    """Map the memory of each rank's `tensor` on all ranks; called by all ranks together, with tensors of one size.

    `group`: the process group over which to share a tensor of torch's symmetric memory. torch's multicast address, if
    it has one, is used unless `no_multicast` gives a reason not to, which is the same on all ranks. Takes about
    `timeout` seconds at most. Raises the same error on all ranks, with everything undone: `ResourceError` for memory
    that cannot be shared, `InvalidArgument` if `group` has other ranks or the tensors' offsets in torch's memory
    differ.
    """
    if group is not None:
        return _of_torch(control, tensor, timeout, group, no_multicast)
    if tensor.device.type == "cuda":
        from tricomm.store.arenas.registered_memory import open_registered_gpu

        return open_registered_gpu(control, tensor.data_ptr(), tensor.nbytes, tensor.device, timeout)
    return _of_shared_memory(control, tensor, timeout)


# torch's symmetric memory


def _rendezvous(tensor: torch.Tensor, group: Any) -> Any:
    from torch.distributed import _symmetric_memory

    return _symmetric_memory.rendezvous(tensor, group)


def _of_torch(
    control: ControlPage,
    tensor: torch.Tensor,
    timeout: float,
    group: Any,
    no_multicast: str,
    rendezvous: Callable[[torch.Tensor, Any], Any] = _rendezvous,
) -> RegisteredArena:
    """The arena of a tensor in torch's symmetric memory. torch's pointers are to segments: a tensor may be anywhere in
    its segment, but its offset must be the same on all ranks, which torch does not check. All ranks use torch's
    multicast address, or none does."""
    deadline = Deadline(timeout)
    stage = CollectiveStages(control, "register", deadline)
    handles: list[Any] = []
    multicast = 0

    def place() -> bytes:
        nonlocal multicast
        handle = rendezvous(tensor, group)
        if handle is None:
            raise ResourceError("this is no tensor of torch's symmetric memory; leave group= out")
        handles.append(handle)
        offset = tensor.data_ptr() - int(handle.buffer_ptrs[handle.rank])
        if offset < 0 or offset + tensor.nbytes > int(handle.buffer_size):
            raise ResourceError(f"the tensor is not in its segment of {handle.buffer_size} bytes")
        multicast, why = (0, no_multicast) if no_multicast else _of_the_switch(handle, tensor, offset)
        return _PLACE.pack(handle.rank, handle.world_size, offset, tensor.nbytes) + why.encode()[:_REASON_BYTES]

    told = stage.gather("torch's rendezvous", place)
    places = [_PLACE.unpack(data[: _PLACE.size]) for data in told]
    for rank, (theirs, size, offset, _) in enumerate(places):
        if (theirs, size) != (rank, control.world_size):
            raise InvalidArgument(
                f"register: rank {rank} of {control.world_size} is rank {theirs} of {size} in the given group: the "
                "same ranks in the same order are needed"
            )
        if offset != places[0][2]:
            raise InvalidArgument(
                f"register: rank 0's tensor begins {places[0][2]} bytes into its segment, rank {rank}'s {offset}: "
                "allocate the same on all ranks, in the same order"
            )
    reasons = [data[_PLACE.size :].decode(errors="replace") for data in told]
    why_not = no_multicast or next((f"rank {rank}: {why}" for rank, why in enumerate(reasons) if why), "")
    bases = [int(p) + places[0][2] for p in handles[0].buffer_ptrs]
    at_all = 0 if why_not else multicast
    return RegisteredArena("torch", tensor, bases, multicast=at_all, no_multicast=why_not)


def _of_the_switch(handle: Any, tensor: torch.Tensor, offset: int) -> tuple[int, str]:
    """torch's multicast address of a tensor that begins `offset` bytes into its segment, or 0 and why there is none.

    In some versions torch gives the address of the segment, in others of the storage. So it is used only if both begin
    at the same place.
    """
    try:
        address = int(handle.multicast_ptr or 0)
    except RuntimeError as error:  # this kind of torch's symmetric memory has no multicast address
        return 0, f"torch gives no multicast address: {str(error).partition(chr(10))[0]}"
    if not address:
        return 0, "torch's symmetric memory has no multicast address here"
    if tensor.untyped_storage().data_ptr() != int(handle.buffer_ptrs[handle.rank]):
        return 0, "the tensor's storage begins inside a segment, where torch's versions mean different multicast places"
    if (address + offset) % _MULTICAST_ALIGNMENT:
        return 0, f"torch's multicast address is no multiple of {_MULTICAST_ALIGNMENT}"
    return address + offset, ""


# torch's shared memory on a CPU


def _of_shared_memory(control: ControlPage, tensor: torch.Tensor, timeout: float) -> RegisteredArena:
    stages = CollectiveStages(control, "register", Deadline(timeout))
    with ExitStack() as undo:
        look = partial(_file_behind, tensor)
        segments = map_peers(stages, undo, "look at the memory", look, tensor.nbytes, "registered memory", sealed=False)
        undo.pop_all()
    bases = [tensor.data_ptr()] * control.world_size
    for rank, (segment, offset) in segments.items():
        bases[rank] = segment.address + offset
    return RegisteredArena("posix_shm", tensor, bases, segments)


def _file_behind(tensor: torch.Tensor) -> FilePart:
    """The part of a file that holds a tensor; torch owns the descriptor. Raises `ResourceError` if the tensor is not in
    shared memory."""
    storage = tensor.untyped_storage()
    inode = _shared_inode(storage.data_ptr()) if storage.is_shared() else None
    if inode is None:
        raise ResourceError(
            "the tensor is not in shared memory: call x.share_memory_() first, with torch's sharing strategy "
            "file_descriptor, or use comm.symmetric()"
        )
    fd, size = storage._share_fd_cpu_()  # changes nothing: the memory is shared already
    status = os.fstat(fd)
    if status.st_ino != inode:
        raise ResourceError("torch's descriptor is not that of the memory behind the tensor")
    return FilePart(int(fd), tensor.data_ptr() - storage.data_ptr(), int(size))


def _shared_inode(address: int) -> int | None:
    """The inode of the unlinked file whose beginning is mapped, shared, at `address`; None if there is none."""
    for line in Path("/proc/self/maps").read_bytes().splitlines():
        where, mode, offset, _, inode, *path = line.split(None, 5)
        if int(where.split(b"-")[0], 16) == address:
            nameless = bool(path) and path[0].endswith(b"(deleted)")
            return int(inode) if mode[3:4] == b"s" and not int(offset, 16) and nameless else None
    return None
