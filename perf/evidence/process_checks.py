"""The tasks of ranks that are processes: sweeps, graphs, ends of the epoch, two groups, messages, fused calls, memory.

    python -m tricomm.perf.evidence.process_checks WORLD [COLLECTIVE]

makes a few small calls of every kernel under a tool that watches processes. Such a tool may run the kernels of one
process one after another, so no kernel may wait for another one of its process.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection
from dataclasses import replace
from typing import Any

import torch

import tricomm
from tricomm import Communicator
from tricomm.kernels import layout
from tricomm.kernels.collectives import registry
from tricomm.kernels.collectives.registry import Kernel
from tricomm.options import Tuning
from tricomm.perf.bench import check_data, collective_calls, timing
from tricomm.perf.evidence import checks, hardware, memory_checks, message_checks, row_checks
from tricomm.perf.workers import run_workers

# The epoch before a signed counter of 32 bits overflows, before an unsigned one does, and before a mailbox is cleared.
_EDGES = ((1 << 31) - 2, (1 << 32) - 3, layout.CLEAR_EVERY - 1, 2 * layout.CLEAR_EVERY - 2)
_NAME, _DTYPE = "float32", torch.float32
_REPLAYS_S = 20.0  # seconds
_WATCHED = 150.0  # seconds that a call under a tool may take
_SILENCE = 180.0  # seconds without a message of a rank under a tool
_ROOT = 1  # of a graph's calls
Join = Callable[..., Communicator]
Checked = tuple[str, int, list[str]]  # kind of arena, calls, errors


def rank_main(emit: Callable[..., None], rank: int, world_size: int, url: str, data: Any) -> None:
    """One rank, a process of its own: does the tasks, and emits the errors, the arena's kind and the calls of each."""
    device = hardware.begin_rank(rank, data)

    def join(name: str, **more: Any) -> Communicator:
        options = replace(checks.options(data["dry_run"]), share_device=data.get("one_gpu", True), **more)
        return tricomm.init(f"{url}-{name}", rank, world_size, device, options=options)

    kernel = next((k for k in registry.ALL if k.name == data["kernel"]), registry.KERNELS[0])
    for task in data["tasks"]:
        if task == "graphs":
            kind, calls, wrong = graphs(join, kernel, data["dry_run"], data.get("slice_us"))
        elif task == "small":
            kind, calls, wrong = small(join, data["kernels"])
        else:
            kind, calls, wrong = _TASKS[task](join, kernel, data["dry_run"])
        emit("checked", task=task, wrong=wrong, kind=kind, calls=calls)


def one_size(join: Join, kernel: Kernel, dry_run: bool) -> Checked:
    """One size of every kernel."""
    with join("one-size") as comm:
        wrong: list[str] = []
        calls = 0
        for each in checks.of_processes(comm.world_size, dry_run):
            made, errors = checks.sweep(comm, each, checks.PARTS[0], dry_run)
            calls, wrong = calls + made, wrong + [f"{each.name}: {text}" for text in errors]
        return comm.kind, calls, wrong


def small(join: Join, names: Collection[str]) -> Checked:
    """A few small calls of the kernels of these names, with time limits for a tool that slows them."""
    with join("small", timeout=_WATCHED, stall_timeout=_WATCHED) as comm:
        wrong: list[str] = []
        calls = 0
        for kernel in registry.KERNELS:
            if kernel.name in names:
                wanted = checks.calls(kernel, comm.world_size, checks.FIRST_TYPE, True)
                wrong += [f"{kernel.name}: {text}" for text in checks.wrong(comm, kernel, torch.bfloat16, wanted)]
                calls += len(wanted)
        return comm.kind, calls, wrong


def sweep(join: Join, kernel: Kernel, dry_run: bool) -> Checked:
    """Every type and operation."""
    with join("sweep") as comm:
        parts = [checks.sweep(comm, kernel, part, dry_run) for part in checks.parts(kernel)]
        return comm.kind, sum(made for made, _ in parts), [text for _, errors in parts for text in errors]


def epochs(join: Join, kernel: Kernel, dry_run: bool) -> Checked:
    """Calls across the overflow of the counters."""
    wrong, calls = [], 0
    for first in _EDGES[:2] if dry_run else _EDGES:
        with join(f"epoch-{first}", _tuning=Tuning(first_epoch=first)) as comm:
            wanted = checks.calls(kernel, comm.world_size, _NAME, True) * 2
            wrong += [f"from epoch {first}: {text}" for text in checks.wrong(comm, kernel, _DTYPE, wanted)]
            calls += len(wanted)
            kind = comm.kind
    return kind, calls, wrong


def two_groups(join: Join, kernel: Kernel, dry_run: bool) -> Checked:
    """Two communicators of the same ranks, in turns, with all kernels."""
    wrong, calls = [], 0
    with join("one") as one, join("two") as two:
        for turn, kernel in enumerate(checks.of_processes(one.world_size, dry_run) * (1 if dry_run else 5)):
            for comm in (one, two) if turn % 2 else (two, one):
                wanted = checks.calls(kernel, comm.world_size, _NAME, True)[:2]
                wrong += checks.wrong(comm, kernel, _DTYPE, wanted)
                calls += len(wanted)
        return one.kind, calls, wrong


def graphs(join: Join, kernel: Kernel, dry_run: bool, slice_us: float | None) -> Checked:
    """Replays of a CUDA graph of two calls, mixed with eager calls; without a GPU the calls themselves.

    A thousand replays with two ranks, and fewer with more: processes take turns on a device, so that a call of four
    ranks takes at least four times as long. Fewer, too, if they would take more than `_REPLAYS_S` with this time slice.
    """
    with join("graphs") as comm:
        name, world_size, wrong = kernel.collective, comm.world_size, 0
        replays, count = (2, 37) if dry_run else (4000 // world_size**2, 1000)
        if slice_us:  # in each of two calls every rank waits for the others' turns
            replays = min(replays, max(10, int(_REPLAYS_S * 1e6 / (2 * world_size * slice_us))))
        given, y = collective_calls.tensors(comm, name, count, _DTYPE, kernel)
        x = collective_calls.local(given)
        data = torch.zeros_like(x) if x is y else x  # a call in place leaves no input for the next one
        checked = name != "barrier" and check_data.gets(name, world_size, comm.rank, _ROOT)

        def call() -> None:
            if x is y:
                x.copy_(data)
            collective_calls.call(comm, name, _ROOT, given, y, kernel)

        stream = torch.cuda.Stream() if not dry_run else None
        with torch.cuda.stream(stream):
            call()
            comm.synchronize()
            replay = _captured(call, stream)
            for turn in range(replays):
                number = _ROOT + turn * world_size  # of the same root
                data.copy_(check_data.values(name, "sum", world_size, comm.rank, number, count))
                replay()
                if turn % 7 == 3:
                    call()
                if checked and (turn % 50 == 0 or turn == replays - 1):
                    comm.synchronize()
                    wrong += check_data.wrong(y, check_data.expected(name, "sum", world_size, number, count, comm.rank))
            comm.synchronize()
        return comm.kind, 2 * replays, [f"{wrong} elements are wrong"] if wrong else []


def messages(join: Join, kernel: Kernel, dry_run: bool) -> Checked:
    """Messages between two ranks, also across the overflow of the counters."""
    wrong: list[str] = []
    calls = 0
    for first in (1, (1 << 32) - 6):
        with join(f"messages-{first}", _tuning=Tuning(first_epoch=first)) as comm:
            made, errors = message_checks.sweep(comm, dry_run)
            wrong, calls, kind = wrong + errors, calls + made, comm.kind
    return kind, calls, wrong


def fused(join: Join, kernel: Kernel, dry_run: bool) -> Checked:
    """Rows that end in RMSNorm and a quantisation, by every fused kernel."""
    with join("fused") as comm:
        made, errors = row_checks.sweep(comm, dry_run)
        return comm.kind, made, errors


def memory(join: Join, kernel: Kernel, dry_run: bool) -> Checked:
    """Users' own tensors, and memory that is given back and taken again under a captured graph."""
    with join("memory") as comm:
        registered, suspended = memory_checks.registered(comm), memory_checks.suspend_and_resume(comm)
        return comm.kind, registered[0] + suspended[0], registered[1] + suspended[1]


def switch(join: Join, kernel: Kernel, dry_run: bool) -> Checked:
    """Kernels through a switch that adds, if the ranks have one."""
    with join("switch") as comm:
        made, errors = memory_checks.through_the_switch(comm, dry_run)
        return comm.kind, made, errors


def _captured(call: Callable[[], None], stream: Any) -> Callable[[], None]:
    if stream is None:
        return timing.repeated(call, 2)
    return timing.capture(call, 2, stream)


_TASKS: dict[str, Callable[[Join, Kernel, bool], Checked]] = {
    "one size": one_size, "sweep": sweep, "epochs": epochs, "two groups": two_groups, "messages": messages,
    "fused": fused, "memory": memory, "switch": switch,
}  # fmt: skip


def main(world_size: int, collective: str = "") -> int:
    """Run the ranks of small calls; exit code 1 if a result is wrong."""
    names = [k.name for k, ranks in pairs() if ranks == world_size and collective in ("", k.collective)]
    settings = {"tasks": ["small"], "kernel": "", "kernels": names, "dry_run": False}
    ranks = run_workers("tricomm.perf.evidence.process_checks:rank_main", world_size, settings, _SILENCE)
    replies = [message for _, message in ranks]
    bad = [text for reply in replies for text in reply["wrong"]]
    print("\n".join(bad))
    return 1 if bad or len(replies) != world_size else 0


def pairs() -> list[tuple[Kernel, int]]:
    """Every kernel that this Triton compiles, with the fewest ranks that can run it."""
    known = checks.kernels(registry.CUBE_RANKS, False)
    return [(k, registry.CUBE_RANKS if k.needs_cube else 2) for k in known]


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), *sys.argv[2:]))
