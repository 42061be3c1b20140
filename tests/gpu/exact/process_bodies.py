"""Bodies of ranks that are processes. Each returns the kind of its memory and its errors in words.

`where` is "one gpu", "many gpus" (one for each rank), or "cpu" for a few small calls on the CPU.
"""

from dataclasses import replace

import torch

import tricomm
from tests.gpu.exact import checks, memory_checks, message_checks, row_checks
from tricomm.kernels import layout
from tricomm.kernels.collectives import registry
from tricomm.options import tuned
from tricomm.perf.bench import check_data, collective_calls, timing

# The epoch before a signed counter of 32 bits overflows, before an unsigned one does, and before a mailbox is cleared.
EDGES = ((1 << 31) - 2, (1 << 32) - 3, layout.CLEAR_EVERY - 1, 2 * layout.CLEAR_EVERY - 2)
_ROOT = 1  # of a graph's calls


def join(rank, world_size, url, where, name="", first=1, **more):
    """The communicator on the device that `where` names, whose first epoch is `first`."""
    few = where == "cpu"
    if few:
        torch.set_num_threads(1)
        device = "cpu"
    else:
        device = f"cuda:{rank if where == 'many gpus' else 0}"
        torch.cuda.set_device(device)
    options = replace(checks.FEW_OPTIONS if few else checks.OPTIONS, share_device=where == "one gpu", **more)
    options = tuned(options, first_epoch=first)
    return tricomm.init(f"{url}{name}", rank, world_size, device, options=options)


def swept(rank, world_size, tell, url, where, names, parts):
    """The `parts` of the checks of the kernels of these names."""
    with join(rank, world_size, url, where) as comm:
        kernels = [kernel for kernel in registry.ALL if kernel.name in names]
        errors = [text for kernel in kernels for text in checks.sweep(comm, kernel, parts, where == "cpu")]
        return comm.kind, errors


def epochs(rank, world_size, tell, url, where, name):
    """Calls across the overflow of the counters."""
    kernel, errors, kind = find(name), [], ""
    for first in EDGES[:2] if where == "cpu" else EDGES:
        with join(rank, world_size, url, where, f"-{first}", first) as comm:
            wanted = checks.calls(kernel, comm.world_size, "float32", True) * 2
            errors += [f"epoch {first}: {text}" for text in checks.wrong(comm, kernel, torch.float32, wanted)]
            kind = comm.kind
    return kind, errors


def two_groups(rank, world_size, tell, url, where, names):
    """Two communicators of the same ranks, in turns, with the kernels of these names."""
    errors = []
    with join(rank, world_size, url, where, "-one") as one, join(rank, world_size, url, where, "-two") as two:
        for turn, name in enumerate(names):
            kernel = find(name)
            for comm in (one, two) if turn % 2 else (two, one):
                wanted = checks.calls(kernel, comm.world_size, "float32", True)[:2]
                errors += checks.wrong(comm, kernel, torch.float32, wanted)
        return one.kind, errors


def graphs(rank, world_size, tell, url, where, name, replays):
    """Replays of a CUDA graph of two calls, mixed with eager calls; on a CPU the calls themselves."""
    kernel, count, wrong = find(name), 37 if where == "cpu" else 1000, 0
    with join(rank, world_size, url, where) as comm:
        collective = kernel.collective
        given, y = collective_calls.tensors(comm, collective, count, torch.float32, kernel)
        x = collective_calls.local(given)
        data = torch.zeros_like(x) if x is y else x  # a call in place leaves no input for the next one
        checked = collective != "barrier" and check_data.gets(collective, world_size, comm.rank, _ROOT)

        def call():
            if x is y:
                x.copy_(data)
            collective_calls.call(comm, collective, _ROOT, given, y, kernel)

        stream = None if where == "cpu" else torch.cuda.Stream()
        with torch.cuda.stream(stream):
            call()
            comm.synchronize()
            replay = timing.repeated(call, 2) if stream is None else timing.capture(call, 2, stream)
            for turn in range(replays):
                number = _ROOT + turn * world_size  # of the same root
                data.copy_(check_data.values(collective, "sum", world_size, comm.rank, number, count))
                replay()
                if turn % 7 == 3:
                    call()
                if checked and (turn % 50 == 0 or turn == replays - 1):
                    comm.synchronize()
                    exact = check_data.expected(collective, "sum", world_size, number, count, comm.rank)
                    wrong += check_data.wrong(y, exact)
            comm.synchronize()
        return comm.kind, [f"{wrong} elements are wrong"] if wrong else []


def messages(rank, world_size, tell, url, where, first):
    """Messages between two ranks, from epoch `first`."""
    with join(rank, world_size, url, where, first=first) as comm:
        return comm.kind, message_checks.sweep(comm, where == "cpu")


def fused(rank, world_size, tell, url, where, names):
    """Rows that end in RMSNorm and a quantisation, by the fused kernels of these names."""
    with join(rank, world_size, url, where) as comm:
        kernels = [kernel for kernel in row_checks.kernels(world_size) if kernel.name in names]
        return comm.kind, [text for kernel in kernels for text in row_checks.sweep(comm, kernel, where == "cpu")]


def memory(rank, world_size, tell, url, where):
    """Users' tensors, and memory that is suspended and resumed under a captured graph."""
    with join(rank, world_size, url, where) as comm:
        return comm.kind, memory_checks.registered(comm) + memory_checks.suspend_and_resume(comm)


def multicast(rank, world_size, tell, url, where):
    """Kernels over multicast memory; None in place of errors if the ranks have none."""
    with join(rank, world_size, url, where) as comm:
        return comm.kind, memory_checks.multicast(comm)


def find(name):
    return next(kernel for kernel in registry.ALL if kernel.name == name)
