"""The kernel of a call, and the reason: a pure function, so that equal inputs give equal choices on all ranks.

Facts of one rank alone (alignment, contiguity, its rank) are not inputs. The first row of a table that fits the
collective, the world size and the bytes decides: first of the user's table for this kind of machine, then of the
shipped one (`tables/default.json`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache

from tricomm import notebook
from tricomm.errors import InvalidArgument
from tricomm.kernels import collective_specs, multimem, wide_words
from tricomm.kernels.collectives import registry
from tricomm.kernels.dtypes import Dtype, reduction
from tricomm.policy.launch_shapes import (
    COMPACT_REGISTERS,
    LEAST_WIRE_TILE,
    MOST_REGISTERS,
    has_compact_form,
    registers_of,
    shape_of,
)
from tricomm.policy.selection_facts import SelectionFacts
from tricomm.policy.tuning_tables import ShippedTable, TableRow, read_table, shipped

_IN_ORDER = "batch-invariant: in rank order, rounded once, whatever the size, kernel, chunk and grid"
_SEVERAL = "the ranks' GPUs are of several architectures, or some have a Triton before 3.9"
_NO_SUM = "batch-invariant: nothing is reduced"
_OPTION = "wire"  # used as a table's name, with row -1
# Bytes from which a quantised all-reduce is faster than any other: modelled, for bf16 on 4 and 8 ranks.
_WIRE_FROM = {"sm_90": 2 << 20, "sm_100": 4 << 20}
_WIRE_FROM_ELSEWHERE = 1 << 20
# With flags in the data, which take no barrier, it does so from 1 MiB on, and takes less time than plain codes up to
# these bytes. Over slow links, which others may have, the bytes of the flags soon take longer than a barrier.
_FLAGGED_FROM = 1 << 20
_FLAGGED_UNTIL = {"sm_90": 4 << 20, "sm_100": 4 << 20}
_FLAGGED_UNTIL_ELSEWHERE = 256 << 10
_SAME_LINKS = {"sm_103": "sm_100"}  # B300 has the links of B200


@dataclass(frozen=True)
class Choice:
    """A call's kernel, its launch shape, and the reason in words.

    `blocks` and `warps` are the grid and the warps of a block, `block` the 64-bit words of a tile. `table` and `row`
    name the row that decided (`row` is None if the caller forced the kernel), `runner_up` the kernel of the next row
    that fits. `zero_copy`: peers read the input in place. `route` is the backend: kernels, or nccl. For NCCL, which
    makes its own choice, algorithm and protocol are "nccl". `fused`: an all_reduce_rms_norm in one kernel; if it is not
    fused, the choice is that for its all-reduce.
    """

    collective: str
    algorithm: str
    protocol: str
    blocks: int
    warps: int
    block: int
    reason: str
    table: str
    row: int | None
    runner_up: str = ""
    zero_copy: bool = False
    route: str = "kernels"
    fused: bool = False
    registers: int = MOST_REGISTERS

    @property
    def counted_as(self) -> str:
        """The algorithm in the statistics; for an all_reduce_rms_norm it also shows that the call was not fused."""
        plain = self.fused or self.collective != "all_reduce_rms_norm" or self.route != "kernels"
        return self.algorithm if plain else f"unfused_{self.algorithm}"

    @property
    def kernel(self) -> str:
        """The kernel and its launch shape in words."""
        if self.route != "kernels":
            return self.route
        blocks = f"{self.blocks} block{'s' * (self.blocks != 1)} of {self.warps} warps"
        return f"{self.algorithm}/{self.protocol}, {blocks}, tiles of {8 * self.block} bytes"

    def __str__(self) -> str:
        return f"{self.collective} by {self.kernel}: {self.reason}"

    _repr_html_ = notebook.preformatted


def choose(
    facts: SelectionFacts,
    collective: str,
    nbytes: int,
    algorithm: str | None = None,
    protocol: str | None = None,
    mode: str = "eager",
    zero_copy: Sequence[str] = (),
    bits: int = 32,
) -> Choice:
    """The kernel for `nbytes` bytes of input per rank (or of the root), elements of `bits`, in `mode` eager or graph.

    `algorithm` and `protocol` force one. `zero_copy` names the algorithms that support the symmetric handles of the
    call, first the one that needs no switch; one of them is chosen. Raises `InvalidArgument` for a collective,
    algorithm or protocol that does not exist (the message lists the existing ones), that the links between these
    devices do not support, or that does not reduce in rank order if the group is batch-invariant.
    """
    kind = collective_specs.find(collective)
    for name, value in (("algorithm", algorithm), ("protocol", protocol)):
        if value is not None and not isinstance(value, str):
            raise InvalidArgument(f"{name}={value!r}: a name or None is needed")
    if zero_copy:
        known = [registry.find(collective, name, "simple", zero_copy=True) for name in zero_copy]
    else:
        has_wide_words(facts, collective, forced=protocol == "ll128")
        known = [
            k
            for k in registry.of(collective, registry.CUBE_RANKS, multicast=True, wire=True)
            if not k.wire or k.wire == facts.wire or k.algorithm == algorithm
        ]
    fits = _usable(facts, f"{collective}{' over symmetric memory' if zero_copy else ''}", known, algorithm, protocol)
    flagged = nbytes <= _FLAGGED_UNTIL.get(_links(facts), _FLAGGED_UNTIL_ELSEWHERE)
    fits.sort(key=lambda k: bool(k.wire) and k.wide != flagged)  # the faster one of two that quantise comes first
    candidates = [
        (name, number, row, k)
        for name, number, row in table_rows(facts, collective, nbytes, mode, bits, zero_copy=bool(zero_copy))
        for k in fits
        if (k.algorithm, k.protocol) == (row.algorithm, row.protocol)
        if registers_of(facts, row) == MOST_REGISTERS or has_compact_form(k, facts.device, facts.world_size)
    ]
    if facts.wire:
        candidates = _wired(facts, fits, nbytes, candidates)
    table, number, row, kernel = candidates[0] if candidates else ("none", -1, None, fits[0])
    second = next((k for _, _, _, k in candidates[1:] if k != kernel), None)
    # with `wire` in words of codes, whose number does not depend on the type
    words = -(-nbytes // (bits if kernel.wire else 8))
    registers = registers_of(facts, row)
    shape = shape_of(facts, kernel, -(-words // kind.rows_in(facts.world_size)), row)
    forced = [f"{n}={v}" for n, v in (("algorithm", algorithm), ("protocol", protocol)) if v is not None]
    if forced:
        reason = f"{' and '.join(forced)} forced by the caller"
    elif table == _OPTION:
        reason = f"Options(wire={facts.wire!r}) or TRICOMM_WIRE: quantised on the links, {row.sizes if row else ''}"
    elif row is None:
        reason = f"no table has a row for {collective} on these devices, so the first kernel is taken"
    else:
        reason = f"table {table!r} row {number}: {collective}, up to {row.world_size} ranks, {row.sizes}"
    if facts.wire and collective == "all_reduce" and not (kernel.wire or forced or zero_copy):
        reason += f"; not quantised: {_why_not_quantised(facts, nbytes)}"
    if zero_copy:
        reason = f"a symmetric handle is read in place; {reason}"
    if registers < MOST_REGISTERS:
        beside = "beside other kernels, " if facts.beside else ""
        reason += f"; {beside}at most {registers} registers a thread and {facts.max_blocks} blocks"
    reason += _promise(facts, kernel)
    place, then = None if forced else number, f"{second.algorithm}/{second.protocol}" if second is not None else ""
    names = (collective, kernel.algorithm, kernel.protocol)
    return Choice(*names, *shape, reason, table, place, then, bool(zero_copy), registers=registers)


_Candidate = tuple[str, int, TableRow, registry.Kernel]


def _wired(
    facts: SelectionFacts, fits: list[registry.Kernel], nbytes: int, candidates: list[_Candidate]
) -> list[_Candidate]:
    """The candidates of a group with `wire`: first its rows of the user's table, then the rule of `wire_from`."""
    rows, least = [each for each in candidates if each[2].wire], wire_from(facts)
    for kernel in fits if least is not None and nbytes >= least else ():
        if kernel.wire:
            names = (kernel.algorithm, kernel.protocol)
            rule = TableRow(kernel.collective, facts.world_size, None, *names, min_bytes=least or 0, wire=kernel.wire)
            rows.append((_OPTION, -1, rule, kernel))
    return rows + [each for each in candidates if not each[2].wire]


def wire_from(facts: SelectionFacts) -> int | None:
    """Bytes of input from which the calls of a group with `facts.wire` are quantised; None: never.

    With only one leg quantised, calls gain only from twice that size on, and NVLS is faster.
    """
    if not facts.wire or _why_not(facts, _kernel_of(facts.wire)):
        return None
    least = _WIRE_FROM.get(_links(facts), _WIRE_FROM_ELSEWHERE)
    if facts.wire.endswith("_gather"):
        return 2 * least if facts.no_multicast else None
    return _FLAGGED_FROM if has_wide_words(facts, "all_reduce", forced=False) else least


def _links(facts: SelectionFacts) -> str:
    """The device with the same links that modelled sizes are given for; empty for any over PCIe."""
    return "" if facts.topology == "pcie" else _SAME_LINKS.get(facts.device, facts.device)


def _why_not_quantised(facts: SelectionFacts, nbytes: int) -> str:
    """Why an all-reduce of a group with `facts.wire` is not quantised."""
    kernel, least = _kernel_of(facts.wire), wire_from(facts)
    if why := _why_not(facts, kernel):
        return f"{kernel.algorithm} {why}"
    if least is None:
        return f"{kernel.algorithm} is slower than NVLS"
    return f"wire={facts.wire!r} gains from {least} bytes on" if nbytes < least else "the tuned table chooses so"


def why_not_multicast(device: str, reason: str) -> str:
    """Why calls on `device` ("cpu", "sm_90", "cuda") cannot use NVLS (multimem); empty if they can. `reason` is why
    the memory has no multicast address; empty if it has one."""
    if reason or device == "cpu":
        return reason
    if device == "cuda":
        return _SEVERAL
    return multimem.why_not(int(device.removeprefix("sm_"))) or ""


def for_reduction(facts: SelectionFacts, collective: str, dtype: Dtype, op: str) -> SelectionFacts:
    """`facts` for a call of `collective` on `dtype` by `op`: without the switch or `wire` if these do not support that
    type and operation."""
    if facts.wire and not quantises(dtype, op):
        facts = replace(facts, wire="")
    if facts.no_multicast or not collective_specs.find(collective).reduces or op not in dtype.ops:
        return facts
    return replace(facts, no_multicast=multimem.why_not_reduced(*reduction(dtype, op)) or "")


def nccl(collective: str, reason: str) -> Choice:
    """The choice for a call that NCCL runs, because of `reason`."""
    return Choice(collective, "nccl", "nccl", 0, 0, 0, reason, "nccl_threshold", None, route="nccl")


def unfused(collective: str, choice: Choice, why: str) -> Choice:
    """The choice for a fused `collective` that is not fused, because of `why`: an all-reduce by `choice`, then
    torch."""
    reason = f"not fused, an all_reduce and torch: {why}"
    if choice.route == "kernels":
        reason += f"; its all_reduce: {choice.reason}"
    return replace(choice, collective=collective, reason=reason)


def _usable(
    facts: SelectionFacts, what: str, known: list[registry.Kernel], algorithm: str | None, protocol: str | None
) -> list[registry.Kernel]:
    """The kernels among `known` that match the forced names and run here. If there is none, raises `InvalidArgument`
    with the reason why the first match does not run, and with the kernels that do."""
    named = [k for k in known if algorithm in (None, k.algorithm) and protocol in (None, k.protocol)]
    fits = [k for k in named if not _why_not(facts, k)]
    if fits:
        return fits
    usable = [k for k in known if not _why_not(facts, k)]
    asked = registry.name_of(algorithm, protocol)
    reason = f"{asked} {_why_not(facts, named[0])}" if named else f"there is no {asked} kernel"
    others = f"there is {', '.join(f'{k.algorithm}/{k.protocol}' for k in usable)}" if usable else "no kernel runs here"
    local = "; other kernels take handle.local" if known[0].zero_copy else ""
    raise InvalidArgument(f"{what}: {reason}; {others}{local}")


def _why_not(facts: SelectionFacts, kernel: registry.Kernel) -> str:
    """The reason why `kernel` does not run here, as the end of a sentence; empty if it does."""
    if kernel.needs_cube and facts.world_size != registry.CUBE_RANKS:
        here = f"{facts.world_size} ranks, topology {facts.topology or 'unknown'}"
        return f"needs {registry.CUBE_RANKS} ranks on a hybrid cube mesh; here are {here}"
    if not (facts.reachable or kernel.needs_cube or kernel.pairwise):
        return "needs memory that not every rank reaches on these links; NCCL does not (torch.distributed)"
    if kernel.multicast and facts.no_multicast:
        return f"needs NVLS (multimem), and here {facts.no_multicast}"
    if kernel.wide and not has_wide_words(facts, kernel.collective, forced=False):
        return "needs 16-byte words with a flag"
    if kernel.wire and (reason := why_not_wire(facts, kernel)):
        return f"cannot quantise: {reason}"
    if facts.beside and not has_compact_form(kernel, facts.device, facts.world_size):
        ranks = f"{facts.world_size} ranks on {facts.device}"
        return f"takes more than {COMPACT_REGISTERS} registers a thread with {ranks} (Options.beside_compute)"
    if facts.batch_invariant and not kernel.rank_order:
        if kernel.wire:
            return "makes elements of a block depend on each other, and the group is batch-invariant"
        how = "in the switch's order" if kernel.multicast else "the sums of two quads"
        return f"adds {how}, and a batch-invariant group (TRICOMM_BATCH_INVARIANT) reduces in rank order"
    return ""


def check_wire(facts: SelectionFacts) -> None:
    """Raises `InvalidArgument` if these devices do not support `facts.wire`."""
    _refuse_wire(facts.wire, why_not_wire(facts, _kernel_of(facts.wire)))


def check_architecture(wire: str, architecture: int) -> None:
    """`check_wire` of GPUs of this architecture (90 for sm_90), before their memory is known."""
    _refuse_wire(wire, _kernel_of(wire).why_not_compiled(architecture))


def _kernel_of(wire: str) -> registry.Kernel:
    return registry.find("all_reduce", registry.algorithm_of(wire), "simple")


def _refuse_wire(wire: str, reason: str | None) -> None:
    if reason is not None:
        raise InvalidArgument(f"Options.wire={wire!r} (TRICOMM_WIRE): {reason}")


def quantises(dtype: Dtype, op: str) -> bool:
    """Whether an all-reduce of `dtype` by `op` can be quantised on the links."""
    return op in dtype.ops and registry.why_not_wire(*reduction(dtype, op)) is None


def why_not_wire(facts: SelectionFacts, kernel: registry.Kernel) -> str | None:
    """Why these devices and this memory do not run a `kernel` that quantises; None if they do."""
    if facts.layout.largest_tile(kernel.algorithm, kernel.protocol) < LEAST_WIRE_TILE:
        return f"Options.arena_bytes={facts.layout.nbytes} leaves tiles without room for a block of 128 elements"
    if facts.device == "cpu":
        return None
    if facts.device == "cuda":
        return _SEVERAL if kernel.codes == "fp8" else None
    return kernel.why_not_compiled(int(facts.device.removeprefix("sm_")))


def has_wide_words(facts: SelectionFacts, collective: str, forced: bool) -> bool:
    """True if this compiler and these devices support wide words. If not, and `forced`, raises `InvalidArgument` with a
    protocol of `collective` that they support."""
    reason = None
    if facts.device == "cuda":
        reason = _SEVERAL
    elif facts.device != "cpu":
        reason = wide_words.why_not(int(facts.device.removeprefix("sm_")))
    if forced and reason is not None:
        raise InvalidArgument(
            f"{collective}: protocol=ll128, 16-byte words with a flag: {reason}; protocol=ll works everywhere"
        )
    return reason is None


def _promise(facts: SelectionFacts, kernel: registry.Kernel) -> str:
    """The promise of a batch-invariant group for a call by `kernel`."""
    if not facts.batch_invariant:
        return ""
    return f"; {_IN_ORDER if kernel.reduces else _NO_SUM}"


def limits(facts: SelectionFacts, collective: str) -> list[int]:
    """The sizes in bytes at which a row for `collective` ends, or one byte before a row begins. Between two of them the
    kernel is the same."""
    rows = [row for _, _, row in table_rows(facts, collective, None, "eager", 32)]
    ends = {row.max_bytes for row in rows} | {row.min_bytes - 1 for row in rows if row.min_bytes > 1}
    return sorted(end for end in ends if end is not None)


def table_rows(
    facts: SelectionFacts,
    collective: str,
    nbytes: int | None,
    mode: str,
    bits: int,
    epilogue: str | None = None,
    zero_copy: bool = False,
) -> list[tuple[str, int, TableRow]]:
    """The rows that fit, each with its table's name and its number in the table: first rows of the user's table, then
    of the first shipped table for these devices. The first row decides. `nbytes` None: rows for all sizes.
    """
    collective = "send" if collective == "recv" else collective  # both halves of a message have one row
    tables, kind = [(facts.tuned_name, facts.tuned)], _SAME_LINKS.get(facts.device, facts.device)
    for table in shipped_tables():
        device = table.device == kind or (table.device == "cuda" and facts.device != "cpu")
        if device and table.topology in (None, facts.topology):
            tables.append((table.name, table.rows))
            break
    return [
        (name, number, row)
        for name, rows in tables
        for number, row in enumerate(rows)
        if row.collective == collective and facts.world_size <= row.world_size
        if nbytes is None or row.min_bytes <= nbytes and (row.max_bytes is None or nbytes <= row.max_bytes)
        if row.mode in (None, mode) and row.bits in (None, bits) and row.beside in (None, facts.beside)
        if row.epilogue in (None, epilogue) and row.zero_copy == zero_copy and row.wire in (None, facts.wire)
    ]


@cache
def shipped_tables() -> tuple[ShippedTable, ...]:
    """The tables that tricomm ships. Raises `ResourceError` if they cannot be read."""
    return shipped(read_table("default"))
