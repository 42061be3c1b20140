"""The bytes that every kernel moves between ranks, counted from its own accesses: python -m devtools.traffic

Each rank is a process whose kernels are interpreted. Every load, store and atomic in another rank's arena is counted,
headers separately. The counts are exact and also hold for a GPU; they say nothing about time.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from fractions import Fraction
from functools import partial
from typing import Any

import click
import numpy as np
import torch

import tricomm
from tricomm.core.fused.fused_call import FUSED, QUANTIZATIONS
from tricomm.kernels import layout
from tricomm.kernels.collectives import registry
from tricomm.kernels.launch import interpreter
from tricomm.perf import text_table, units
from tricomm.perf.bench import collective_calls, fused_bench
from tricomm.perf.bench.request import Case
from tricomm.perf.row_calls import RowForm
from tricomm.perf.workers import run_workers

WORLDS = (2, 3, 4)
# Small mailboxes: the first epoch clears one, and an interpreted kernel takes seconds for a large one.
_OPTIONS = tricomm.Options(arena_bytes=1 << 20)


@dataclass(frozen=True)
class Moved:
    """The bytes that one rank moved in one call of `nbytes` input (the root's input if there is one): `written` to and
    `read` from peers' mailboxes, the bytes of `headers`, and all bytes by link. `form` names the rows of a fused
    call."""

    collective: str
    algorithm: str
    protocol: str
    world_size: int
    rank: int
    nbytes: int
    written: int
    read: int
    headers: int
    links: tuple[int, ...] = ()
    form: str = ""
    simulated: bool = True

    @property
    def kernel(self) -> registry.Kernel:
        return registry.find(self.collective, self.algorithm, self.protocol)

    @property
    def formula(self) -> Fraction:
        """The bytes written and read that the registry promises."""
        kernel = self.kernel  # through a switch fewer bytes cross the links than the accesses move
        return (kernel.written(self.world_size) + kernel.read(self.world_size)) * self.nbytes

    @property
    def ratio(self) -> float:
        """Bytes moved, divided by bytes promised. Infinite if bytes moved in a direction without promised bytes."""
        promised = (self.kernel.written(self.world_size) * self.nbytes, self.kernel.read(self.world_size) * self.nbytes)
        if any(p == 0 and counted for p, counted in zip(promised, (self.written, self.read), strict=True)):
            return float("inf")
        return float((self.written + self.read) / self.formula)

    @property
    def optimum(self) -> Fraction:
        """The fewest bytes that the busiest rank must send without in-network reduction, over any links."""
        return units.least(self.collective, self.world_size) * self.nbytes


_WHOLE = 3 * 4 * 128  # elements of a shard of codes without padding: blocks in each plane


class Counter:
    """An observer that counts accesses to `peers`, (first address, bytes) of each arena, headers separately.

    `flags` are the places of headers, (offset, end) in an arena.
    """

    def __init__(self, peers: list[tuple[int, int]], *flags: tuple[int, int]) -> None:
        self._peers, self._flags = peers, flags
        self.written = self.read = self.headers = 0
        self.links = [0] * len(peers)

    def __call__(self, kind: str, addresses: np.ndarray[Any, Any], itemsize: int) -> None:
        for number, (base, nbytes) in enumerate(self._peers):
            inside = addresses[(addresses >= base) & (addresses < base + nbytes)].astype(np.int64) - base
            flags = sum(int(((inside >= a) & (inside < b)).sum()) for a, b in self._flags) * itemsize
            data = inside.size * itemsize - flags
            self.headers += flags
            self.links[number] += flags + data
            if kind == "load":
                self.read += data
            else:
                self.written += data


def count(
    world_size: int, nbytes: int, timeout: float = 120.0, quantized: tuple[str, ...] = ("", *QUANTIZATIONS)
) -> Iterator[Moved]:
    """Run every kernel once on `world_size` ranks with `nbytes` of input each and yield the bytes by rank.

    Eight ranks run the kernels for a cube mesh only. Rank 0 sends a message to rank 1, which is counted for rank 0.
    Fused calls have two rows of bfloat16, and are counted once for each of `quantized`.

    `nbytes` must be a multiple of 16 W for the formulas to be exact; quantised calls are rounded up to whole blocks.
    Raises `RankFailed`.
    """
    for rank, message in run_workers(
        "devtools.traffic:rank_main", world_size, {"nbytes": nbytes, "quantized": quantized}, timeout
    ):
        message.pop("event")
        message["links"] = tuple(message["links"])
        message.setdefault("nbytes", nbytes)
        yield Moved(world_size=world_size, rank=rank, **message)


def rank_main(emit: Callable[..., None], rank: int, world_size: int, url: str, data: Any) -> None:
    """Run one rank: emits a message per kernel. Rank 0 is the root, if there is one."""
    torch.set_num_threads(1)
    count = data["nbytes"] // 4
    with tricomm.init(url, rank=rank, world_size=world_size, device="cpu", timeout=60.0, options=_OPTIONS) as comm:
        arenas = comm._internal.group.peer_ranges
        ranges = [(first, 0 if r == rank else nbytes) for r, (first, nbytes) in enumerate(arenas)]
        x = torch.arange(count, dtype=torch.float32)
        for kernel in (*registry.KERNELS, *registry.MULTICAST, *registry.WIRE):
            if kernel.collective == "barrier" or kernel.needs_cube != (world_size == registry.CUBE_RANKS):
                continue
            row = count // kernel.kind.rows_in(world_size)
            if kernel.wire:
                row = -(-count // (_WHOLE * world_size)) * _WHOLE * world_size
            tensors = collective_calls.tensors(comm, kernel.collective, row, torch.float32, kernel)
            call = partial(collective_calls.call, comm, kernel.collective, 0, *tensors, kernel)
            _count(comm, ranges, partial(emit, nbytes=4 * row) if kernel.wire else emit, kernel, call)
        for quantize in data["quantized"] if world_size < registry.CUBE_RANKS else ():
            form = RowForm(data["nbytes"] // 4, quantize)
            for kernel in registry.of(FUSED, world_size):
                case = Case(FUSED, kernel.algorithm, kernel.protocol, "bfloat16", hidden=form.hidden, quantize=quantize)
                made = fused_bench.tensors(comm, case, 2 * form.hidden)
                _count(comm, ranges, emit, kernel, fused_bench.ours(comm, case, made), form.name)
        for kernel in registry.of("send", world_size) if world_size < registry.CUBE_RANKS else []:
            if rank == 0:
                _count(comm, ranges, emit, kernel, partial(comm.send, x, 1, protocol=kernel.protocol))
            elif rank == 1:
                comm.recv(torch.empty_like(x), 0, protocol=kernel.protocol)
        comm.barrier()


def _count(
    comm: tricomm.Communicator,
    ranges: list[tuple[int, int]],
    emit: Callable[..., None],
    kernel: registry.Kernel,
    call: Callable[[], object],
    form: str = "",
) -> None:
    arena = comm._internal.group.layout
    counter = Counter(ranges, (layout.HEADERS, arena.ll), (arena.queue_states, arena.slots))
    with interpreter.observe(counter):
        call()
    emit(
        "moved",
        collective=kernel.collective,
        algorithm=kernel.algorithm,
        protocol=kernel.protocol,
        form=form,
        written=counter.written,
        read=counter.read,
        headers=counter.headers,
        links=counter.links,
    )


@click.command()
@click.option("--nbytes", type=int, help="Input bytes per rank, a multiple of 16 W [default: 3072 W].")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def main(nbytes: int | None, as_json: bool) -> None:
    """Print the bytes of every kernel's busiest rank, for 2, 3 and 4 ranks (8 for a cube mesh), against the formula and
    the optimum."""
    moved = [one for w in (*WORLDS, registry.CUBE_RANKS) for one in count(w, nbytes or 3072 * w)]
    if as_json:
        records = [{**asdict(m), "ratio": m.ratio, "optimum": float(m.optimum)} for m in moved]
        click.echo(json.dumps(records, indent=1))
        return
    click.echo("# bytes to and from peers per rank and call, counted under Triton's interpreter (simulated: true)")
    header = ("kernel", "W", "input", "written", "read", "formula", "ratio", "optimum", "x opt.", "headers", "hops")
    rows = []
    for key in dict.fromkeys(_key(m) for m in moved):
        m = max((m for m in moved if _key(m) == key), key=lambda m: m.written + m.read)
        relative = f"{(m.written + m.read) / float(m.optimum):.2f}"
        rows.append(
            (
                f"{m.kernel.name} {m.form}".strip(),
                m.world_size,
                m.nbytes,
                m.written,
                m.read,
                f"{float(m.formula):.0f}",
                f"{m.ratio:.2f}",
                f"{float(m.optimum):.0f}",
                relative,
                m.headers,
                m.kernel.hops,
            )
        )
    click.echo("\n".join(text_table.lines(header, rows, right=header[1:])))


def _key(moved: Moved) -> tuple[str, str, int]:
    return moved.kernel.name, moved.form, moved.world_size


if __name__ == "__main__":
    main()
