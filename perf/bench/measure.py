"""The measuring loop of one rank, as in nccl-tests: warm-up, a barrier, calls back to back, then checks.

Checks are further calls, on fresh data, with poisoned outputs. In place, an all-gather's input is its rank's own
row of the output. Broadcast and reduce are always in place, an all-to-all never is. Another library's call is timed and
checked in the same way, either in place or out of place, as the library supports it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import product
from typing import Any

import torch

from tricomm import Choice, Communicator
from tricomm.core.fused.fused_call import FUSED
from tricomm.errors import InvalidArgument, ResourceError
from tricomm.kernels.collective_specs import COLLECTIVES
from tricomm.kernels.collectives import registry
from tricomm.perf import units
from tricomm.perf.bench import check_data, collective_calls, fused_bench, timing
from tricomm.perf.bench.baselines import Baselines, Make
from tricomm.perf.bench.collective_calls import TORCH_IN_PLACE, Unavailable
from tricomm.perf.bench.request import Case, Settings
from tricomm.perf.bench_row import OURS, PLACES, BenchRow, Measurement

Note = Callable[[str], None]
# the rows of one case, size and mode: one for in-place calls and one for out-of-place calls
Rows = tuple[BenchRow, ...]


@dataclass
class Bench:
    """The common state of the rows of this rank. `number` counts calls, so that no two have the same data."""

    comm: Communicator
    settings: Settings
    baselines: Baselines
    note: Note
    number: int = 0
    noted: set[str] = field(default_factory=set)

    def skip(self, reason: str) -> None:
        """Note, once, why something is not measured."""
        if reason not in self.noted:
            self.noted.add(reason)
            self.note(reason)

    def next_call(self) -> int:
        """The number of the first of two checks."""
        self.number += 2
        return self.number


def measure(comm: Communicator, settings: Settings, baselines: Baselines, note: Note) -> Iterator[Rows]:
    """The rows of each mode, size and case, with this rank's times and its number of wrong elements.

    The kernels and libraries of one size are measured one after another, so that a drift of the machine affects all of
    them.

    `note` is called with each reason why a kernel is not run, or a library not compared. Raises `ResourceError` for a
    mode that this device does not have.
    """
    for mode in settings.modes:
        timing.check_mode(mode, comm.simulated)
    bench = Bench(comm, settings, baselines, note)
    for collective, dtype in dict.fromkeys((case.collective, case.dtype) for case in settings.cases):
        for mode, size, case in product(settings.modes, settings.sizes, settings.cases_of(collective, dtype)):
            if collective == FUSED:
                yield from _fused(bench, case, size, mode)
            elif case.library == OURS:
                yield from _ours(bench, case, size, mode)
            else:
                yield from _theirs(bench, case, size, mode)


def with_times(row: BenchRow, ranks: list[dict[str, float]], wrong: int | None) -> BenchRow:
    """`row` with the times of all `ranks` (see `timing.summary`) and the bandwidths that follow from them."""
    times = timing.over_ranks(ranks)
    algbw = units.algorithm_bandwidth(row.measured.nbytes, times["time_us"])
    busbw = algbw * units.bus_factor(row.measured.collective, row.ranks)
    return row.changed(algbw_gbs=algbw, busbw_gbs=busbw, wrong=wrong, **times)


def _row(bench: Bench, case: Case, size: int, mode: str, algorithm: str, protocol: str) -> BenchRow:
    """A row that still lacks times and place."""
    item, world_size = getattr(torch, case.dtype).itemsize, bench.comm.world_size
    elements = units.row_elements(case.collective, size, item, world_size)
    op = bench.settings.op if COLLECTIVES[case.collective].reduces else "none"
    nbytes = units.total_bytes(case.collective, elements, item, world_size)
    # Another library runs natively on a CPU, so its times are real.
    simulated = bench.comm.simulated and case.library in (OURS, fused_bench.UNFUSED)
    measured = Measurement(
        case.library, case.collective, algorithm, protocol, case.dtype, op, mode, "", nbytes, 0, 0, 0, 0, simulated
    )
    return BenchRow(measured, elements, world_size, units.input_bytes(case.collective, elements, item, world_size))


def _ours(bench: Bench, case: Case, size: int, mode: str) -> Iterator[Rows]:
    row = _row(bench, case, size, mode, "", "")
    choice = _choice(bench, case, row, mode)
    if choice is not None:
        kernel = registry.find(case.collective, choice.algorithm, choice.protocol)
        row = _of_kernel(row, choice, kernel, case.collective)
        yield tuple(_in_place_or_not(bench, case, row.changed(place=place)) for place in PLACES)


def _choice(bench: Bench, case: Case, row: BenchRow, mode: str, **form: Any) -> Choice | None:
    """The kernel of the call; None, with a note, if the kernel that the case forces cannot run on these devices."""
    op = "sum" if case.collective == FUSED else bench.settings.op
    try:
        return bench.comm.explain(
            case.collective,
            row.input_bytes,
            getattr(torch, case.dtype),
            op,
            algorithm=case.algorithm,
            protocol=case.protocol,
            mode="eager" if mode == "eager" else "graph",
            **form,
        )
    except InvalidArgument as reason:
        if case.algorithm is None and case.protocol is None:
            raise
        bench.skip(f"{case.collective} {case.algorithm or 'any'}/{case.protocol or 'any'} is not run: {reason}")
        return None


def _of_kernel(row: BenchRow, choice: Choice, kernel: registry.Kernel, moves: str) -> BenchRow:
    """`row` with the facts of its kernel; `moves` is the collective whose least number of bytes counts."""
    real = min(4, getattr(torch, row.measured.dtype).itemsize)  # bytes of a number that is quantised; complex64 has two
    return row.changed(
        algorithm=choice.algorithm,
        protocol=choice.protocol,
        reason=choice.reason,
        blocks=choice.blocks,
        warps=choice.warps,
        tile=choice.block,
        moved_bytes=float(units.moved(kernel, row.ranks, real) * row.input_bytes),
        least_bytes=float(units.least(moves, row.ranks) * row.input_bytes),
        hops=kernel.hops,
        barriers=kernel.barriers,
    )


def _fused(bench: Bench, case: Case, size: int, mode: str) -> Iterator[Rows]:
    """The rows of an all_reduce_rms_norm: tricomm's, or another's all-reduce and torch's norm."""
    comm, form, item = bench.comm, fused_bench.form(case), getattr(torch, case.dtype).itemsize
    elements = form.rows(size, item) * form.hidden
    row = _row(bench, replace(case, collective="all_reduce"), elements * item, mode, "", "")
    row = row.changed(collective=FUSED, op=form.name, place="out_of_place", protocol="-")
    if case.library == OURS:
        rows = {"hidden": case.hidden, "quantize": case.quantize or None, "top_k": case.top_k or None}
        choice = _choice(bench, case, row, mode, **rows)
        if choice is None:
            return
        kernel = registry.find(FUSED if choice.fused else "all_reduce", choice.algorithm, choice.protocol)
        row = _of_kernel(row, replace(choice, algorithm=choice.counted_as), kernel, "all_reduce")
        made = fused_bench.tensors(comm, case, elements)
        yield (_timed_fused(bench, row, made, fused_bench.ours(comm, case, made)),)
        return
    for name, make in bench.baselines.offered_fused(case.library).items():
        made = fused_bench.tensors(comm, case, elements)
        try:
            run = make(comm, case, made, partial(bench.baselines.group_of, case.library))
            measured = _timed_fused(bench, row.changed(algorithm=name), made, run)
        except Unavailable as reason:
            bench.skip(str(reason))
        except (RuntimeError, TypeError, ValueError) as error:
            bench.skip(f"{name}: no {FUSED} of {case.dtype} here: {str(error).splitlines()[0]}")
        else:
            yield (measured,)


def _timed_fused(bench: Bench, row: BenchRow, made: fused_bench.FusedTensors, run: Callable[[], object]) -> BenchRow:
    times = _timed(bench, run, row.measured.mode)
    wrong = 0
    for _ in range(2 if bench.settings.check else 0):
        number = bench.next_call()
        made.load(bench.comm, number)
        bench.comm.barrier()
        run()
        bench.comm.synchronize()
        wrong += made.wrong(bench.comm, number)
    return with_times(row, [times], wrong if bench.settings.check else None)


def _in_place_or_not(bench: Bench, case: Case, row: BenchRow) -> BenchRow:
    comm, op = bench.comm, bench.settings.op
    x, y = _tensors(comm, case, row)

    def call(number: int) -> None:
        collective_calls.call(comm, case.collective, number, x, y, case, op)

    def check(number: int) -> int:
        check_data.poison(y)
        x.copy_(check_data.values(case.collective, op, comm.world_size, comm.rank, number, row.count, y.dtype))
        call(number)
        return _wrong(comm, case.collective, op, number, row.count, y, registry.wire_of(row.measured.algorithm))

    x.zero_()
    times = _timed(bench, lambda: call(0), row.measured.mode)
    number = bench.next_call()
    # Twice: the two calls use different mailboxes.
    return with_times(row, [times], check(number) + check(number + 1) if bench.settings.check else None)


def _tensors(comm: Communicator, case: Case, row: BenchRow) -> tuple[torch.Tensor, torch.Tensor]:
    """Input and output; in place, the tensor with fewer rows is this rank's row of the other."""
    spec, elements, dtype = COLLECTIVES[case.collective], row.count, getattr(torch, case.dtype)
    rows_in, rows_out = spec.rows_in(comm.world_size), spec.rows_out(comm.world_size)
    in_place = row.measured.place == "in_place"
    if check_data.in_place(case.collective) or (in_place and rows_in == rows_out == 1):
        x = torch.empty(elements, dtype=dtype, device=comm.device)
        return x, x
    whole = torch.empty(elements * max(rows_in, rows_out), dtype=dtype, device=comm.device)
    if rows_in == rows_out or not in_place:
        other = torch.empty(elements * min(rows_in, rows_out), dtype=dtype, device=comm.device)
    else:
        other = whole[comm.rank * elements :][:elements]
    return (whole, other) if rows_in > rows_out else (other, whole)


def _theirs(bench: Bench, case: Case, size: int, mode: str) -> Iterator[Rows]:
    if COLLECTIVES[case.collective].reduces and bench.settings.op != "sum":
        return bench.skip(f"{case.library}: sums alone are compared, not {bench.settings.op}")
    for name, make in bench.baselines.offered(case.library, case.collective).items():
        row = _row(bench, case, size, mode, name, "-")
        row = row.changed(place="in_place" if case.collective in TORCH_IN_PLACE else "out_of_place")
        try:
            measured = _baseline(bench, case, row, make)
        except Unavailable as reason:
            bench.skip(str(reason))
        except (RuntimeError, TypeError, ValueError) as error:  # raised by torch for a type that a library lacks
            bench.skip(f"{name}: no {case.collective} of {case.dtype} here: {str(error).splitlines()[0]}")
        else:
            yield (measured,)


def _baseline(bench: Bench, case: Case, row: BenchRow, make: Make) -> BenchRow:
    comm, dtype, elements = bench.comm, getattr(torch, case.dtype), row.count
    implementation = bench.baselines.make(make, case.collective, dtype, elements)
    implementation.load(torch.zeros(elements * COLLECTIVES[case.collective].rows_in(comm.world_size), dtype=dtype))
    times = _timed(bench, implementation.run, row.measured.mode)
    if not bench.settings.check:
        return with_times(row, [times], None)
    number = bench.next_call() * comm.world_size  # rank 0 is the root of this call
    data = check_data.values(case.collective, "sum", comm.world_size, comm.rank, number, elements, dtype)
    implementation.load(data.to(comm.device))
    result = implementation.run()
    return with_times(row, [times], _wrong(comm, case.collective, "sum", number, elements, result))


def _wrong(
    comm: Communicator, collective: str, op: str, number: int, count: int, result: torch.Tensor | None, wire: str = ""
) -> int:
    """Wrong elements of this rank's result of a call that has been made, quantised by `wire` unless that is empty."""
    comm.synchronize()
    if result is None or not check_data.gets(collective, comm.world_size, comm.rank, number):
        return 0
    exact = check_data.expected(collective, op, comm.world_size, number, count, comm.rank, result.dtype, wire)
    return check_data.wrong(result, exact)


def _timed(bench: Bench, call: timing.Call, mode: str) -> dict[str, float]:
    run, calls = timing.prepare(bench.comm, call, mode, bench.settings.warmup)
    return timing.summary(timing.timed(bench.comm, run, calls, bench.settings.iters))


def pick_device(name: str, rank: int) -> torch.device:
    """The GPU of a rank, which ranks share if there are too few, or the CPU. Raises `ResourceError`."""
    gpus = torch.cuda.device_count() if name != "cpu" and torch.cuda.is_available() else 0
    if gpus:
        return torch.device("cuda", rank % gpus)
    if name == "cuda":
        raise ResourceError("device 'cuda': this process sees no CUDA device; use --device cpu")
    return torch.device("cpu")
