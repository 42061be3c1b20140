"""How a rank introduces itself, and whether two ranks belong together. `boot_id` is that of the node (`node_id`)."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping

from tricomm.errors import InvalidArgument, RendezvousError, ResourceError
from tricomm.store import process
from tricomm.store.page import NBYTES, Page, State
from tricomm.store.records import MAX_WORLD_SIZE, Hello, Record
from tricomm.store.segments import Segment


class SpansNodes(RendezvousError):
    """The ranks of a group are on several nodes: all of them find that, and no other reason to part."""


def check_arguments(rank: int, world_size: int, timeout: float) -> None:
    """Raises `InvalidArgument` for what no rank of any group could say."""
    for name, value in (("rank", rank), ("world_size", world_size)):
        if isinstance(value, bool) or not isinstance(value, int) or abs(value) >= 1 << 31:
            raise InvalidArgument(f"{name}={value!r}: an integer is needed")
    if not 1 <= world_size <= MAX_WORLD_SIZE:
        raise InvalidArgument(f"world_size={world_size}: 1 to {MAX_WORLD_SIZE} ranks are possible")
    if not timeout > 0:
        raise InvalidArgument(f"timeout={timeout!r}: a positive number of seconds is needed")


def introduce(segment: Segment, rank: int, world_size: int, nonce: bytes, layout_hash: int) -> Hello:
    """Fill in this rank's control segment, and say where it is. `ResourceError` where /proc is not there."""
    pid = os.getpid()
    started = process.start_time(pid)
    if started is None:
        raise ResourceError(f"/proc/{pid}/stat cannot be read: mount /proc in this container")
    page = Page(segment.buffer, segment.address)
    page.identify(rank, world_size, nonce, pid, started)
    page.state = State.MEETING
    where = (process.pid_namespace(), process.node_id(), os.geteuid(), segment.fd, segment.nbytes)
    return Hello(pid, started, *where, layout_hash, State.MEETING, socket.gethostname())


def hello_of(record: Record) -> Hello:
    """The hello that a record parsed as one carries."""
    assert isinstance(record.body, Hello), "parse gives the kind that it was asked for"
    return record.body


def check(theirs: Record, rank: int, world_size: int, layout_hash: int) -> None:
    """Raises `RendezvousError` or `ResourceError` where `theirs` cannot be in one group with `rank` of this process."""
    hello = hello_of(theirs)
    who = f"rank {theirs.rank} (pid {hello.pid} on {hello.hostname})"
    if theirs.world_size != world_size:
        raise RendezvousError(
            f"{who} says that the world size is {theirs.world_size}, rank {rank} (pid {os.getpid()}) says {world_size}"
        )
    if hello.boot_id != process.node_id():
        here = socket.gethostname()
        raise SpansNodes(f"{who} is on another host than rank {rank} (on {here}): they share no memory")
    if hello.uid != os.geteuid():
        raise RendezvousError(f"{who} runs as uid {hello.uid}, rank {rank} as uid {os.geteuid()}: use one user")
    if hello.pid_namespace != process.pid_namespace():
        raise ResourceError(
            f"{who} lives in another PID namespace than rank {rank}: share it (docker: --pid=host, or one container "
            "for all ranks)"
        )
    if hello.layout_hash != layout_hash or hello.nbytes != NBYTES:
        raise RendezvousError(
            f"{who} has other options than rank {rank} (memory layout {hello.layout_hash:x}, here {layout_hash:x}): "
            "use the same tricomm, device kind and options on every rank"
        )


def who_came(said: Mapping[int, Record], world_size: int) -> str:
    """In words: which ranks are missing, and what those who are there said."""
    missing = [rank for rank in range(world_size) if rank not in said]
    came = (f"rank {r} (pid {hello_of(record).pid}, world size {record.world_size})" for r, record in said.items())
    return f"rank(s) {missing} did not come; there were {', '.join(came)}"
