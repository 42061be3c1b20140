"""What ranks do in several channels at once. Integer-valued inputs, different by channel, call and rank."""

from __future__ import annotations

import os
import signal
import threading
import time

import torch

import tricomm
from tricomm.kernels import layout
from tricomm.kernels.launch import interpreter

SMALL = {"channels": 2, "arena_bytes": 1 << 18, "timeout": 60.0}


def numbers(rank, channel, call, count):
    """Small whole numbers, different for every rank, channel and call."""
    return (torch.arange(count, dtype=torch.float32) * 7 + 31 * rank + 17 * channel + 5 * call) % 101


def total(world_size, channel, call, count):
    return sum(numbers(rank, channel, call, count) for rank in range(world_size))


def all_kinds_at_once(comm):
    """Three channels, each with other collectives, protocols and sizes; wrong results, if there are any."""
    n, me, wrong = comm.world_size, comm.rank, []
    w = comm.symmetric((256,), torch.float32)
    w.local.copy_(numbers(me, 2, 9, 256))
    comm.barrier()

    def check(name, got, want):
        if not torch.equal(got, want):
            wrong.append(name)

    def small():
        for call, protocol in enumerate(("ll", "simple", "ll")):
            x = torch.full((515,), -1.0)
            x[1:514] = numbers(me, 0, call, 513)
            comm.all_reduce(x[1:514], protocol=protocol)
            check(f"all_reduce {protocol}", x[1:514], total(n, 0, call, 513))
            assert x[0] == -1 and x[-1] == -1

    def rows():
        channel = comm.channel(1)
        for call in range(2):
            y = channel.all_gather(numbers(me, 1, call, 33))
            check("all_gather", y, torch.cat([numbers(r, 1, call, 33) for r in range(n)]))
        z = channel.reduce_scatter(numbers(me, 1, 7, 12 * n))
        check("reduce_scatter", z, total(n, 1, 7, 12 * n)[12 * me : 12 * me + 12])

    def others():
        channel = comm.channel(2)
        x = numbers(me, 2, 0, 1001)
        channel.broadcast(x, n - 1)
        check("broadcast", x, numbers(n - 1, 2, 0, 1001))
        y = channel.all_to_all(numbers(me, 2, 1, 4 * n))
        check("all_to_all", y, torch.cat([numbers(r, 2, 1, 4 * n)[4 * me : 4 * me + 4] for r in range(n)]))
        out = torch.empty(256)
        channel.all_reduce(w, out=out)  # the handle is the communicator's, whatever channel reads it
        check("zero copy", out, total(n, 2, 9, 256))

    comm.side_by_side(small, rows, others)
    comm.barrier()
    return wrong


def one_sum_in_every_channel(comm):
    """The same floats, summed in every channel, alone and beside each other."""
    x = torch.rand(1001, generator=torch.Generator().manual_seed(comm.rank))
    each = [x.clone() for _ in range(4)]
    comm.all_reduce(each[0])
    comm.side_by_side(*(lambda k=k: comm.channel(k).all_reduce(each[1 + k]) for k in range(3)))
    return each


def two_at_once(comm):
    """Different numbers of calls in two channels, of one protocol each."""
    me, n = comm.rank, comm.world_size

    def run(channel, calls, count, protocol):
        for call in range(calls):
            x = numbers(me, channel, call, count)
            comm.channel(channel).all_reduce(x, protocol=protocol)
            assert torch.equal(x, total(n, channel, call, count))

    comm.side_by_side(lambda: run(0, 2, 70, "ll"), lambda: run(1, 3, 90, "simple"))


def one_channel_twice(comm):
    """Two functions share channel 1: their calls take turns, as those of two threads."""
    side, (x, y) = comm.channel(1), (torch.full((4,), comm.rank + 1.0) for _ in range(2))
    comm.side_by_side(lambda: side.all_reduce(x), lambda: side.all_reduce(y))
    return x.tolist(), y.tolist()


def different_in_channel_1(comm):
    x, y = torch.ones(4), torch.ones(8 + comm.rank)
    comm.side_by_side(lambda: comm.all_reduce(x), lambda: comm.channel(1).all_reduce(y))


def one_call_in_two_channels(comm):
    comm.channel(comm.rank).all_reduce(torch.ones(4))


def overlapped_in_channel_1(comm):
    comm.channel(1).all_reduce(torch.ones(4))
    comm.barrier()
    if comm.rank == 0:
        comm.channel(1).group_table[layout.BUSY] = 12345  # as the kernel of a replayed graph would have set it
    comm.channel(1).all_reduce(torch.ones(4))


# Processes


def in_threads(rank, world_size, tell, url):
    """Rank 0 begins with channel 0, rank 1 with channel 1, and the other channel's call comes while that one waits."""
    with tricomm.init(url, rank, world_size, "cpu", options=tricomm.Options(**SMALL)) as comm:
        out = [[], []]

        def run(channel):
            x = torch.full((100,), float(5 + 10 * channel))
            comm.channel(channel).all_reduce(x)
            out[channel] = x[0].item()

        thread = threading.Thread(target=run, args=(rank,))
        thread.start()
        time.sleep(0.3)  # it waits in its kernel by now
        run(1 - rank)
        thread.join()
        control = comm._group.control
        return [out, [control.sequence(rank, channel) for channel in (0, 1)]]


def in_threads_without_turns(rank, world_size, tell, url):
    interpreter.triton_adapter.give_way = lambda: False
    SMALL["timeout"] = 3.0
    try:
        return in_threads(rank, world_size, tell, url)
    except tricomm.TricommError as error:
        return f"{type(error).__name__}: {error}"


def interrupted_side_by_side(rank, world_size, tell, url):
    """Threads have the modes of their caller. Then rank 0 waits for calls that rank 1 never makes, until a Ctrl-C."""
    with tricomm.init(url, rank, world_size, "cpu", options=tricomm.Options(**SMALL)) as comm:
        side, parameter = comm.channel(1), torch.nn.Parameter(torch.full((5,), rank + 1.0))
        with torch.no_grad():
            comm.side_by_side(lambda: comm.all_reduce(parameter), lambda: side.all_reduce(torch.ones(3)))
        assert parameter.tolist() == [3.0] * 5
        with torch.inference_mode():
            assert comm.side_by_side(lambda: torch.ones(1).is_inference()) == [True]
        if rank == 1:
            time.sleep(0.5)
            end = time.monotonic() + 20.0
            while time.monotonic() < end:
                try:
                    comm.check()
                except tricomm.GroupAborted as error:
                    return str(error)
                time.sleep(0.01)
            return "nothing was told"
        threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()
        try:
            comm.side_by_side(comm.barrier, side.barrier)
        except KeyboardInterrupt:
            tell(time.monotonic())
        time.sleep(1.0)  # the group is not closed by now
        return sorted(thread.name for thread in threading.enumerate() if "tricomm-side" in thread.name)


def killed_in_channel_1(rank, world_size, tell, url):
    comm = tricomm.init(url, rank, world_size, "cpu", options=tricomm.Options(**SMALL))
    comm.barrier()
    tell(os.getpid())
    if rank == 1:
        time.sleep(60)
    try:
        comm.channel(1).all_reduce(torch.ones(4))
    except tricomm.TricommError as error:
        comm.close()
        return type(error).__name__, str(error)


def join(rank, world_size, tell, url, options):
    try:
        tricomm.init(url, rank, world_size, "cpu", timeout=30.0, options=tricomm.Options(**options[rank])).close()
    except tricomm.TricommError as error:
        return type(error).__name__, str(error)
