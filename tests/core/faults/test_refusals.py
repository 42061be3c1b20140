"""Any call of the library that makes a thread, file, descriptor, memory or tensor may be refused: all ranks get a named
error in time, the processes keep running, and a new group works."""

from __future__ import annotations

import builtins
import errno
import gc
import io
import mmap
import os
import random
import socket
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from datetime import timedelta
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

import tricomm
from tests import ranks
from tests.core.bodies.common_bodies import SMALL
from tests.open_files import open_files
from tricomm.c10d import group_over
from tricomm.core import entry_guard
from tricomm.errors import ResourceError, TricommError
from tricomm.store import segments
from tricomm.store.control import ControlPage


class _Libc:
    """libc as `segments` uses it, whose mmap returns an address or raises."""

    def __init__(self, libc):
        self._libc = libc

    def mmap(self, *args):
        return self._libc.mmap(*args)

    def __getattr__(self, name):
        return getattr(self._libc, name)


def _no_tensor():
    return RuntimeError("DefaultCPUAllocator: can't allocate memory")


def _no_memory():
    return OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))


def _no_descriptor():
    return OSError(errno.EMFILE, os.strerror(errno.EMFILE))


def _no_thread():
    return RuntimeError("can't start new thread")


KINDS = {
    "thread": (_no_thread, [(threading.Thread, "start")]),
    "file": (_no_descriptor, [(os, "open"), (io, "open"), (builtins, "open"), (os, "listdir"), (os, "scandir")]),
    "descriptor": (
        _no_descriptor,
        [
            (os, "memfd_create"),
            (os, "pidfd_open"),
            (os, "dup"),
            (os, "eventfd"),
            (socket.socket, "__init__"),
            (socket, "create_connection"),
        ],
    ),
    "memory": (_no_memory, [(os, "posix_fallocate"), (mmap, "mmap"), (_Libc, "mmap"), (os, "mkdir"), (os, "fchmod")]),
    "tensor": (_no_tensor, [(torch, name) for name in ("empty", "zeros", "tensor", "frombuffer", "ones")]),
}


class Steps:
    """Makes calls one after another until one raises; `text` has the error and the step."""

    def __init__(self):
        self.kind, self.text, self.slowest = "", "", 0.0

    def __call__(self, name, action):
        if self.kind:
            return None
        return self.always(name, action)

    def always(self, name, action):
        began, result = time.monotonic(), None
        try:
            result = action()
        except BaseException as error:
            named = isinstance(error, TricommError)
            self.kind = type(error).__name__ if named else f"bare {type(error).__name__}"
            self.text += f"[{name}] {type(error).__name__}: {error}"
        self.slowest = max(self.slowest, time.monotonic() - began)
        return result


_LINES = 5  # lines of the library by which places are distinguished


def _place(frame):
    """The lines of the library around a call, innermost first; None if something else made the call."""
    lines = []
    while frame is not None and len(lines) < _LINES:
        module = frame.f_globals.get("__name__", "")
        if module.split(".")[0] == "tricomm":
            lines.append(f"{module.removeprefix('tricomm.')}:{frame.f_lineno}")
        elif lines or module.split(".")[0] not in sys.stdlib_module_names:
            break
        frame = frame.f_back
    return " < ".join(lines) or None


class Refusal:
    """Counts the library's calls of all `KINDS` by place, in `places`, and refuses those of `kind` at `place`.

    Refuses the first one, or if `lasting` all of this kind from then on. `hits` counts the refused calls.
    """

    def __init__(self, kind=None, place=None, lasting=False):
        self._kind, self._place, self._lasting = kind, place, lasting
        self.places, self.hits = {}, 0
        self._undo = ExitStack()

    def __enter__(self):
        libc = segments._libc
        self._undo.enter_context(patch.object(segments, "_libc", _Libc(libc)))
        for kind, (error, calls) in KINDS.items():
            for owner, name in calls:
                self._undo.enter_context(patch.object(owner, name, self._counted(kind, error, getattr(owner, name))))
        return self

    def __exit__(self, *_):
        self._undo.close()

    def _counted(self, kind, error, call):
        def counted(*args, **keywords):
            place = _place(sys._getframe(1)) if keywords.get("fileno") is None else None  # this one is open already
            if place is not None:
                self.places.setdefault((kind, place))
                if kind == self._kind and (place == self._place and not self.hits or self._lasting and self.hits):
                    self.hits += 1
                    raise error()
            return call(*args, **keywords)

        return counted


class Counted:
    """Counts the library's descriptors and mappings in this process."""

    def __init__(self):
        self._first = self._now()

    def more(self):
        """Those added since, after at most 3 s: an error's frames hold memory until they are collected."""
        gc.collect()
        end = time.monotonic() + 3.0
        while (more := self._now() - self._first) and time.monotonic() < end:
            time.sleep(0.02)
        return sorted(more)

    @staticmethod
    def _now():
        with open("/proc/self/maps") as maps:
            mapped = {line.split()[0] for line in maps if "memfd:tricomm" in line}
        held = set()
        for fd, name in open_files().items():
            with suppress(OSError):
                if "memfd" in name or "pidfd" in name or "tricomm" in name:
                    held.add(f"{fd} {name}")
        return mapped | held


def with_c10d(step, rank, url, route):
    os.environ.update(TRICOMM_CPU=route, TRICOMM_ARENA_BYTES=str(256 * 1024))
    limit = timedelta(seconds=LIMIT)
    step("init", lambda: dist.init_process_group("tricomm", init_method=url, rank=rank, world_size=2, timeout=limit))
    step("all_reduce", lambda: _sum(dist.all_reduce))
    step("async", lambda: dist.all_reduce(torch.ones(5), async_op=True).wait())
    step("message", lambda: dist.send(torch.ones(3), 1) if rank == 0 else dist.recv(torch.zeros(3), 0))
    sub = step("new_group", lambda: dist.new_group([0, 1], timeout=limit))
    step("sub", lambda: _sum(lambda x: dist.all_reduce(x, group=sub)))
    step("suspend", lambda: tricomm.suspend())
    step("resume", lambda: tricomm.resume())
    step("barrier", lambda: dist.barrier())
    if dist.is_initialized():
        step.always("destroy", dist.destroy_process_group)


def with_communicator(step, rank, url):
    options = tricomm.Options(**{**SMALL, "timeout": LIMIT})
    comm = step("init", lambda: tricomm.init(url, rank, 2, "cpu", options=options))
    step("all_reduce", lambda: _sum(comm.all_reduce))
    step("message", lambda: comm.send(torch.ones(3), 1) if rank == 0 else comm.recv(torch.zeros(3), 0))
    step("symmetric", lambda: comm.symmetric((4,), torch.float32))
    sub = step("split", lambda: comm.split([1, 0]))
    step("sub", lambda: _sum(sub.all_reduce))
    step("suspend", lambda: comm.suspend())
    step("resume", lambda: comm.resume())
    step("gather", lambda: comm.all_gather(torch.ones(3)))
    for one in (sub, comm):
        if one is not None:
            step.always("close", one.close)


def _run(step, rank, url, route):
    with_communicator(step, rank, url) if route == "communicator" else with_c10d(step, rank, url, route)


def _sum(all_reduce):
    x = torch.tensor([1.0, 2.0])
    all_reduce(x)
    assert torch.equal(x, torch.tensor([2.0, 4.0])), x


def _again(rank, path, route):
    store = dist.FileStore(path, 2)
    if route == "communicator":
        with tricomm.Communicator(store, rank, 2, "cpu", 60.0, tricomm.Options(**SMALL)) as comm:
            _sum(comm.all_reduce)
    else:
        group = group_over(store, rank, 2, timedelta(seconds=60))
        _sum(lambda x: dist.all_reduce(x, group=group))
        group.shutdown()


def _without_last_exchange():
    exchange = ControlPage.exchange

    def skipped(page, payload, what, *args, **keywords):
        return [] if what == "the communicator" else exchange(page, payload, what, *args, **keywords)

    ControlPage.exchange = skipped


def _without_names():
    entry_guard.name_refusal = lambda error: None


WITHOUT = {"names": _without_names, "last exchange": _without_last_exchange}


def scenario(rank, world_size, tell, folder, route, kind=None, place=None, victim=0, lasting=False, without=None):
    """The scenario over `route`, with `Refusal(kind, place, lasting)` on rank `victim`; then another group, unhurt.

    Returns the steps of both groups and the resources that they left; the places of all calls; the number of calls
    that were refused. `without`: a protection that is taken away.
    """
    if without is not None:
        WITHOUT[without]()
    torch.set_num_threads(1)
    before, step = Counted(), Steps()
    with Refusal(kind, place, lasting) if rank == victim else Refusal() as refusal:
        _run(step, rank, f"file://{folder}/hurt", route)
    again = Steps()
    ranks.together(f"file://{folder}/again", rank, range(world_size))
    again("again", lambda: _again(rank, f"{folder}/again", route))
    return (
        (step.kind, step.text, step.slowest),
        (again.kind, again.text),
        before.more(),
        list(refusal.places),
        refusal.hits,
    )


def run(folder, *case):
    folder.mkdir(mode=0o700)
    return ranks.run(2, scenario, str(folder), *case, timeout=60)


def places(folder, route):
    """(rank, kind, place) of each call that both ranks' scenario makes over `route`."""
    recorded = run(folder, route)
    assert all(first[0] == again[0] == "" and left == [] for first, again, left, _, _ in recorded), recorded
    return [(rank, kind, place) for rank, (*_, seen, _) in enumerate(recorded) for kind, place in seen]


LIMIT = 4.0  # seconds for each call and for making a group


def wrong(results):
    """The guarantees that these results violate."""
    found = []
    for rank, ((kind, text, slowest), (_, again), left, _, _) in enumerate(results):
        found += [f"rank {rank}: {text}"] * kind.startswith("bare")
        found += [f"rank {rank}: {slowest:.1f} s: {text}"] * (slowest > LIMIT + 1.0 + ranks.BUSY)
        found += [f"rank {rank}, another group: {again}"] * (again != "")
        found += [f"rank {rank}: left: {left}"] * (left != [])
    return found


def check(folder, route, cases):
    """Run each case in new processes, two cases at a time."""

    def one(numbered):
        number, (rank, kind, place, lasting) = numbered
        return [
            f"{kind} {place} {lasting}: {text}"
            for text in wrong(run(folder / str(number), route, kind, place, rank, lasting))
        ]

    with ThreadPoolExecutor(2) as pool:
        assert [text for found in pool.map(one, enumerate(cases)) for text in found] == []


@pytest.mark.parametrize("route", ["communicator", "gloo", "kernels"])
def test_some_refusals_on_one_rank_are_named_on_both(route, tmp_path):
    found = places(tmp_path / "first", route)
    starts = [place for place in found if place[1] == "thread" and place[0] == 1]
    assert len(found) > 20 and len(starts) > 1
    chosen = [*starts, *random.Random(7).sample(found, 4)]
    check(tmp_path, route, [(*place, number % 2 == 1) for number, place in enumerate(chosen)])


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("lasting", [False, True])
@pytest.mark.parametrize("route", ["communicator", "gloo", "kernels"])
def test_every_refusal_on_one_rank_is_named_on_both(route, lasting, tmp_path):
    check(tmp_path, route, [(*place, lasting) for place in places(tmp_path / "first", route)])


@pytest.mark.parametrize(
    "without, kind, at, seen",
    [
        ("names", "tensor", "core.group", "[init] RuntimeError"),
        ("last exchange", "thread", "core.watch.watcher", "[all_reduce] GroupAborted"),
    ],
)
def test_without_a_protection_a_refusal_has_its_damage(without, kind, at, seen, tmp_path):
    place = next(p for r, k, p in places(tmp_path / "first", "communicator") if r == 1 and k == kind and at in p)
    results = run(tmp_path / "hurt", "communicator", kind, place, 1, False, without)
    assert any(seen in text for (_, text, _), *_ in results), results


@pytest.mark.parametrize("error", [TimeoutError("alarm"), ConnectionResetError(104, "reset"), OSError("of a handler")])
def test_an_error_that_a_signal_handler_may_raise_keeps_its_class(error):
    assert entry_guard.name_refusal(error) is None


@pytest.mark.parametrize("error", [OSError(24, "Too many open files"), OSError(12, "no memory"), MemoryError("none")])
def test_a_refusal_of_the_system_is_named(error):
    with pytest.raises(ResourceError, match="a limit of this process"):
        entry_guard.name_refusal(error)
