"""Two ranks, one of which is interrupted at a chosen line of a call; every line needs a new communicator."""

from __future__ import annotations

import dis
import gc
import os
import signal
import sys
import threading
import time
from contextlib import nullcontext
from functools import partial
from pathlib import Path

import torch
from torch.distributed import FileStore, HashStore

import tricomm
from tests.core.bodies import user_kernel
from tests.core.bodies.common_bodies import OWN, SMALL, leftovers, more_than
from tricomm.core.entry_guard import Guard
from tricomm.errors import TricommError
from tricomm.store.control import Descriptor

_NOP = dis.opmap["NOP"]
HOME = os.path.dirname(tricomm.__file__)


class Alarm(Exception):
    """The exception of a user's signal handler."""


KINDS = {"KeyboardInterrupt": KeyboardInterrupt, "Alarm": Alarm}


def ones(*shape):
    return torch.ones(shape, dtype=torch.int32)


def message(comm):
    comm.send(ones(3), 1) if comm.rank == 0 else comm.recv(ones(3), 0)


def message_back(comm):
    comm.recv(ones(3), 1) if comm.rank == 0 else comm.send(ones(3), 0)


def from_any(comm):
    comm.recv(ones(3)) if comm.rank == 0 else comm.send(ones(3), 0)


def table(comm):
    comm.use_table([], "none")


def launch(comm):
    flags = ones(16)
    comm.launch(user_kernel.rotate, 1, (ones(16),) * 2, flags, 0, WORLD_SIZE=2, BLOCK=16)
    comm.barrier()


def announce(comm):
    comm._internal.announce(RECORD)
    comm._internal.withdraw(1)
    comm.barrier()


def synchronize(comm):
    comm.synchronize()
    comm.barrier()


FACTS = {"collective": "all_reduce", "op": "sum", "dtype": "int32", "algorithm": "other", "protocol": "other"}
RECORD = Descriptor(sequence=0, fingerprint=1, count=1, root=-1, grid=1, mode="eager", **FACTS).packed()
SPLITS = [([1, 3], [1, 2]), ([2, 2], [3, 2])]
CALLS = {
    "all_reduce": lambda comm: comm.all_reduce(ones(8)),
    "two_shot": lambda comm: comm.all_reduce(ones(8), algorithm="two_shot", out=ones(8)),
    "lists": lambda comm: comm.all_reduce([ones(3), ones(4)]),
    "all_gather": lambda comm: comm.all_gather(ones(2)),
    "reduce_scatter": lambda comm: comm.reduce_scatter(ones(4)),
    "all_to_all": lambda comm: comm.all_to_all(ones(4)),
    "all_to_all_v": lambda comm: comm.all_to_all_v(ones(4), *SPLITS[comm.rank]),
    "broadcast": lambda comm: comm.broadcast(ones(4), 0),
    "reduce": lambda comm: comm.reduce(ones(4), 1),
    "gather": lambda comm: comm.gather(ones(4), 1),
    "scatter": lambda comm: comm.scatter(ones(4), 1),
    "barrier": lambda comm: comm.barrier(),
    "async": lambda comm: comm.all_reduce(ones(8), async_op=True).wait(),
    "send": message,
    "recv": message_back,
    "recv from any": from_any,
    "symmetric": lambda comm: comm.symmetric((4,), torch.float32),
    "use_table": table,
    "launch": launch,
    "announce": announce,
    "synchronize": synchronize,
    "split": lambda comm: comm.split([0]),
}


class Walk:
    """Trace function that raises `kind` at the line event number `at` of a call inside tricomm, or counts them."""

    def __init__(self, kind=None, at=None):
        self.kind, self.at, self.lines, self.raised = kind, at, [], None

    def __enter__(self):
        sys.settrace(self.trace)
        return self

    def __exit__(self, *_):
        sys.settrace(None)

    def trace(self, frame, event, argument):
        name = frame.f_code.co_filename
        # The test reads `rank` before its call.
        inside = name.startswith(HOME) and frame.f_code.co_name not in ("__del__", "rank")
        return self.line if inside else None

    def line(self, frame, event, argument):
        # Python runs signal handlers where functions begin, call and jump back: not in the NOP of `try:`.
        if event == "line" and frame.f_code.co_code[frame.f_lasti] != _NOP:
            where = (frame.f_code.co_filename, frame.f_lineno)
            if self.at is None:
                self.lines.append(where)
            elif where == self.at:
                sys.settrace(None)
                self.raised = time.monotonic()
                raise self.kind
        return self.line


def lock_is_free(comm):
    """Whether another thread gets the call lock."""
    results = []

    def look():
        results.append(comm._launcher.lock.acquire(False))
        comm._launcher.lock.release_all()

    thread = threading.Thread(target=look)
    thread.start()
    thread.join()
    return results[0]


def communicator(rank, folder, number):
    return tricomm.init(
        f"file://{folder}/{number}", rank, 2, "cpu", options=tricomm.Options(**{**SMALL, "timeout": 8.0})
    )


def walk(rank, world_size, tell, folder, name, kind, every, unguarded=False):
    """Interrupt rank 0 at every `every`th line of a call; return what each rank got at each of them."""
    call, folder, got = CALLS[name], Path(folder), []
    if unguarded:
        Guard.unwound = lambda guard, error: None
    with communicator(rank, folder, "first") as comm:
        close(call(comm))
        with Walk() as seen:
            made = call(comm)
        close(made)
        lines = list(dict.fromkeys(seen.lines))
        lines = lines[sum(map(ord, name)) % every :: every]
        count = agreed(rank, folder, comm, lines)
    before = leftovers()
    for number in range(count):
        comm = communicator(rank, folder, number)
        if rank == 0:
            close(call(comm))
            got.append(interrupted(comm, call, kind, lines[number]))
        else:
            got.append(told(comm, call))
        comm.close()
        del comm
    gc.collect()  # an exception and its frames may hold each other
    return got, more_than(before, *OWN)


def constructor(rank, world_size, tell, folder, every):
    """Interrupt rank 0 at every `every`th line of its set-up; then both make another one over the same store."""
    folder, got = Path(folder), []

    def make(name, timeout=60.0):
        store = FileStore(f"{folder}/{name}", 2)
        return tricomm.Communicator(store, rank, 2, "cpu", options=tricomm.Options(**{**SMALL, "timeout": timeout}))

    with Walk() as seen:
        first = make("first")
    first.close()
    lines = list(dict.fromkeys(seen.lines))[2::every]
    with make("count of lines") as comm:
        count = agreed(rank, folder, comm, lines)
    before = leftovers()
    for number in range(count):
        line = lines[number] if rank == 0 else None
        got.append(made_at(line, partial(make, number, timeout=4.0)))  # fails if interrupted before the rendezvous
        together(folder, rank, number)
        with make(f"after {number}") as comm:  # both ranks still work
            comm.barrier()
    del comm, first, seen
    gc.collect()  # an exception and its frames may hold each other
    return got, more_than(before, *OWN)


def replaced(comm, **limits):
    comm.replace([], **limits)
    return comm


def shrunk(comm, **limits):
    return comm.shrink([], **limits)


def recovering(rank, world_size, tell, folder, every, recover):
    """Interrupt rank 0 at every `every`th line of `recover`; what each rank got there, or in the call after it."""
    folder, got = Path(folder), []
    comm = communicator(rank, folder, "first")
    with Walk() as seen:
        made = recover(comm)
    lines = list(dict.fromkeys(seen.lines))[2::every]
    count = agreed(rank, folder, made, lines)
    made.close()
    before = leftovers()
    for number in range(count):
        with communicator(rank, folder, number) as comm:
            line = lines[number] if rank == 0 else None
            got.append(made_at(line, partial(recover, comm, timeout=6.0)))
        together(folder, rank, number)
        del comm
    del seen
    gc.collect()  # an exception and its frames may hold each other
    return got, more_than(before, *OWN)


def agreed(rank, folder, comm, lines):
    """How many lines rank 0 has; rank 1 may have run fewer."""
    if rank == 0:
        (folder / "count").write_text(str(len(lines)))
    comm.barrier()
    return int((folder / "count").read_text())


def made_at(line, make):
    """Make a communicator and a call on it, interrupted at that `line`: what came of it, when the interrupt was raised
    and when it was over, and the line."""
    caught, text, made = "nothing", "", None
    walk = nullcontext() if line is None else Walk(KeyboardInterrupt, line)
    with walk:
        try:
            made = make()
            made.barrier()
        except BaseException as error:
            caught, text = type(error).__name__, str(error)
    heard = time.monotonic()
    close(made)
    if line is None:
        return caught, text, None, heard, ""
    return caught, text, walk.raised, heard, f"{os.path.relpath(line[0], HOME)}:{line[1]}"


def closing(rank, world_size, tell, every):
    """Interrupt `close` at every `every`th line: the communicator is closed all the same."""
    got = []

    def make():
        return tricomm.Communicator(HashStore(), 0, 1, "cpu", options=tricomm.Options(**SMALL))

    comm = make()
    with Walk() as seen:
        comm.close()
    before = leftovers()
    for line in list(dict.fromkeys(seen.lines))[::every]:
        comm, caught = make(), "nothing"
        comm.all_reduce(ones(3))
        with Walk(KeyboardInterrupt, line) as walk:
            try:
                comm.close()
            except BaseException as error:
                caught = type(error).__name__
        comm.close()
        if walk.raised is not None:
            got.append((f"{os.path.relpath(line[0], HOME)}:{line[1]}", caught, comm._group.closed))
        del comm, walk
    gc.collect()  # an exception and its frames may hold each other
    return got, more_than(before, *OWN)


def together(folder, rank, number):
    """Wait until both ranks are here; needs nothing of tricomm."""
    (folder / f"here {number} {rank}").touch()
    end = time.monotonic() + 20.0
    while not (folder / f"here {number} {1 - rank}").exists() and time.monotonic() < end:
        time.sleep(1e-3)


def waits(rank, world_size, tell, url, number, kind):
    """A real signal in the middle of a call that waits; its handler raises."""

    def handle(*_):
        raise KINDS[kind]

    with tricomm.init(url, rank, world_size, "cpu", options=tricomm.Options(**SMALL)) as comm:
        comm.barrier()
        if rank == 0:
            signal.signal(number, handle)
            tell(os.getpid())
        try:
            if rank == 1:
                time.sleep(1.5)  # long after rank 0 was interrupted in its call
            comm.all_reduce(ones(4))
        except BaseException as error:
            return type(error).__name__, str(error), lock_is_free(comm)
    return "nothing", "", True


def interrupted(comm, call, kind, line):
    made = None
    with Walk(KINDS[kind], line) as walk:
        try:
            made = call(comm)
            caught = "nothing"
        except BaseException as error:
            caught = type(error).__name__
    close(made)
    where = f"{os.path.relpath(line[0], HOME)}:{line[1]}"
    free = lock_is_free(comm)
    time.sleep(0.02)  # if the call was over for the other rank, it makes another one
    return where, caught, walk.raised, free


def close(made):
    if hasattr(made, "close"):
        made.close()


def told(comm, call):
    try:
        for _ in range(3):  # the first call may complete, or rank 0 may abort it, because it is in its second one
            close(call(comm))
        comm.barrier()  # short messages are sent without waiting for a receive
    except TricommError as error:
        return type(error).__name__, str(error), time.monotonic()
    return "nothing", "", time.monotonic()
