"""Ranks of which one is interrupted at a chosen line of a call: each line costs both ranks a communicator."""

from __future__ import annotations

import os
import sys
import threading
import time
from pathlib import Path

import torch

import tricomm
from tests.tricomm.bodies import SMALL, leftovers
from tricomm.errors import TricommError
from tricomm.faults import Faults

HOME = os.path.dirname(tricomm.__file__)


class Alarm(Exception):
    """What a user's own signal handler may raise."""


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
        inside = name.startswith((HOME, "<guarded")) and frame.f_code.co_name != "__del__"
        return self.line if inside else None

    def line(self, frame, event, argument):
        if event == "line":
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
    found = []

    def look():
        found.append(comm._turn.acquire(False))
        comm._turn.let_go()

    thread = threading.Thread(target=look)
    thread.start()
    thread.join()
    return found[0]


def communicator(rank, folder, number):
    return tricomm.init(
        f"file://{folder}/{number}", rank, 2, "cpu", options=tricomm.Options(**{**SMALL, "timeout": 8.0})
    )


def walk(rank, world_size, tell, folder, name, kind, every, unguarded=False):
    """Interrupt rank 0 at every `every`th line of a call; what each rank got at each of them."""
    call, folder, got = CALLS[name], Path(folder), []
    if unguarded:
        Faults._unwound = lambda comm, error: None
    with communicator(rank, folder, "first") as comm:
        close(call(comm))
        with Walk() as seen:
            made = call(comm)
        close(made)
        lines = list(dict.fromkeys(seen.lines))
        lines = lines[sum(map(ord, name)) % every :: every]
        if rank == 0:
            (folder / "count").write_text(str(len(lines)))
        comm.barrier()
        count = int((folder / "count").read_text())
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
    left = leftovers()
    return got, {what: sorted(left[what] - before[what]) for what in before if left[what] - before[what]}


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
    time.sleep(0.02)  # where the call was over for the other rank, it makes another one
    return where, caught, walk.raised, free


def close(made):
    if hasattr(made, "close"):
        made.close()


def told(comm, call):
    try:
        for _ in range(3):  # the first may end, or may be stopped by rank 0, which has begun its second
            close(call(comm))
    except TricommError as error:
        return type(error).__name__, str(error), time.monotonic()
    return "nothing", "", time.monotonic()
