"""Compile the shipped kernels for NVIDIA GPUs, without a GPU, and report properties of the machine code."""

from __future__ import annotations

import itertools
import multiprocessing
import os
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from typing import Any

import torch

from tricomm import env
from tricomm.core.fused.fused_call import FUSED, QUANTIZATIONS
from tricomm.errors import InvalidArgument, ResourceError
from tricomm.kernels import layout
from tricomm.kernels.collectives import registry
from tricomm.kernels.dtypes import DTYPES, reduction
from tricomm.kernels.launch.compiler import COMPILE_OPTIONS, compile_kernel, ptx_text, ttgir_text
from tricomm.kernels.left_out import left_out_lines
from tricomm.perf import row_calls, text_table
from tricomm.perf.machine_code import accesses as code
from tricomm.perf.machine_code import steady_loop
from tricomm.perf.machine_code.access_kinds import aside, classify, function_of, place
from tricomm.perf.row_calls import RowForm
from tricomm.policy.selection_facts import SelectionFacts

ARCHITECTURES = ("sm_80", "sm_90", "sm_100")  # whose requirements ("bars") are tested
COMPILED = ("sm_70", "sm_75", "sm_80", "sm_86", "sm_87", "sm_89", "sm_90", "sm_100", "sm_103", "sm_120", "sm_121")
WIDTHS = ("float8_e4m3fn", "bfloat16", "float32", "float64")  # one type for each element width
WORLDS = (2, 4, 8)
KERNELS = (*registry.ALL, *registry.of(FUSED, 8))
_ROWS = 32  # of a fused call
_FORMS = (*(RowForm(quantize=quantize) for quantize in ("", *QUANTIZATIONS)), RowForm(top_k=8))
_NARROWEST = {"fp8": 32, "fp8_per_token": 32, "nvfp4": 8}  # bits that a thread stores of four elements, or of a scale
_OWN_ARRIVALS = "message_queues.end_message"  # counts a rank's own blocks
_NAMES = ("kernel", "arch", "dtype", "op", "W", "aligned")
_NUMBERS = ("regs", "spill", "stack", "shared", "128-bit", "narrow", "tail", "scalar", "control", "acq.sys", "rel.sys",
            "rlx.sys", "per 16 B")  # fmt: skip

LEGEND = """\
spill: local loads + stores in SASS.  128-bit, narrow: bulk accesses of the payload in SASS, of at least and of less
than 128 bits (of ll128 and of rows 64, of their codes 32 or 8).  tail: element by element, past the last full tile or
misaligned.  scalar, control: one word; headers, polls, clearing.  acq, rel, rlx: acquire, release and relaxed accesses
at `.sys` scope in PTX.  per 16 B: instructions in SASS of the innermost loops that move payload, for each 16 bytes of a
row (of ll128 24)."""


@dataclass(frozen=True)
class Variant:
    """One specialisation of a kernel, as it would be launched: `block` is the 64-bit words of a tile, `form` names the
    rows of a fused call."""

    kernel: str
    arch: str
    dtype: str = "bfloat16"
    op: str = "sum"
    world_size: int = 8
    aligned: bool = True
    block: int = 512
    warps: int = 8
    form: str = ""

    @property
    def operation(self) -> str:
        """The operation, or the form of the rows."""
        return self.form or self.op


@dataclass(frozen=True)
class Counts:
    """Numbers of global memory instructions by purpose (`access_kinds`). Wide ones have 128 bits or more; in `ll128`,
    64."""

    body_wide_loads: int
    body_wide_stores: int
    body_narrow: int
    tail: int
    scalar: int
    control: int
    narrow_lines: tuple[str, ...]


@dataclass(frozen=True)
class KernelReport:
    """The machine code of one variant. Flags are counted in PTX; `weak_flags` names those that are not `.sys`.

    `steady` is the cost of the loops that move payload, in instructions for 16 bytes (`steady_loop`). `failure` is
    Triton's error if it could not compile the variant; then the other fields are undefined.
    """

    variant: Variant
    resources: code.Resources
    ptx: Counts
    sass: Counts
    sys_acquires: int
    sys_releases: int
    sys_relaxed: int
    weak_flags: tuple[str, ...]
    payload: bool
    steady: int = 0
    failure: str | None = None
    disassembled: bool = True


def variants(archs: tuple[str, ...], name: str | None = None, everything: bool = False) -> list[Variant]:
    """The variants to report: one per kernel, element width and architecture, or all dtypes, ops, worlds, alignments.

    Variants that this Triton does not compile are left out (`left_out`). Raises `InvalidArgument` for a kernel or an
    architecture that does not exist, or if nothing is left.
    """
    for arch in archs:
        if arch not in COMPILED:
            raise InvalidArgument(f"architecture {arch!r} is unknown; there is {', '.join(COMPILED)}")
    kernels = [k for k in KERNELS if name in (None, k.name)]
    if not kernels:
        raise InvalidArgument(f"kernel {name!r} is unknown; there is {', '.join(k.name for k in KERNELS)}")
    chosen = [
        v
        for arch in archs
        for k in kernels
        if k.why_not_compiled(int(arch.removeprefix("sm_"))) is None
        for v in _of(k, arch, everything)
        if k.why_not_reduced(*reduction(DTYPES[v.dtype], v.op)) is None
    ]
    if not chosen:
        raise InvalidArgument(f"nothing can be compiled: {'; '.join(left_out(archs, name))}")
    return chosen


def left_out(archs: tuple[str, ...], name: str | None = None) -> list[str]:
    """A line for each reason for which this Triton does not compile kernels for an architecture, or a fused kernel does
    not take some rows, with the kernels' names."""
    asked = [k for k in KERNELS if name in (None, k.name)]
    reasons = [(k.name, arch, k.why_not_compiled(int(arch.removeprefix("sm_")))) for arch in archs for k in asked]
    refused = {(named, arch) for named, arch, reason in reasons if reason}
    for k, form in itertools.product(asked, _FORMS):
        fitting = [arch for arch in archs if k in registry.FUSED and (k.name, arch) not in refused]
        calls = [(k.name, arch, row_calls.fitting(_site(arch, 8), k, form, torch.bfloat16, _ROWS)) for arch in fitting]
        reasons += [(named, arch, why) for named, arch, why in calls if isinstance(why, str)]
    return left_out_lines((named, f"{arch}: {reason}") for named, arch, reason in reasons if reason)


def _of(kernel: registry.Kernel, arch: str, everything: bool) -> Iterator[Variant]:
    if kernel in registry.FUSED:
        yield from _of_rows(kernel, arch, everything)
    elif kernel.collective == "barrier":
        yield from (Variant(kernel.name, arch, world_size=w) for w in (WORLDS if everything else (8,)))
    elif not everything:
        # For a copy all widths are the same code, except the tail.
        yield from (Variant(kernel.name, arch, dtype) for dtype in (WIDTHS if kernel.reduces else WIDTHS[1:3]))
    else:
        worlds = (registry.CUBE_RANKS,) if kernel.needs_cube else WORLDS
        for dtype in DTYPES.values() if kernel.reduces else [DTYPES[name] for name in WIDTHS]:
            for op in dtype.ops if kernel.reduces else ("sum",):
                for world_size in worlds:
                    for aligned in (True, False):
                        yield Variant(kernel.name, arch, dtype.name, op, world_size, aligned)


def _of_rows(kernel: registry.Kernel, arch: str, everything: bool) -> Iterator[Variant]:
    """Rows of 8192 with each quantisation, and sums of experts' rows, in the shape that a communicator launches for 32
    of them."""
    facts = itertools.product(WORLDS, ("bfloat16", "float16", "float32"), (True, False))
    for world_size, dtype, aligned in facts if everything else ((8, "bfloat16", True),):
        for form in _FORMS:
            choice = row_calls.fitting(_site(arch, world_size), kernel, form, getattr(torch, dtype), _ROWS)
            if not isinstance(choice, str):
                shape = choice.block, choice.warps
                yield Variant(kernel.name, arch, dtype, "sum", world_size, aligned, *shape, form.name)


def _site(arch: str, world_size: int) -> SelectionFacts:
    return SelectionFacts(arch, world_size, layout.plan(world_size, 64 << 20), layout.MAX_BLOCKS)


def examine(variant: Variant, function: Any = None) -> KernelReport:
    """Compile `variant` (of a shipped kernel, or of the jitted `function`) and read the result.

    A variant that Triton cannot compile gives a report with `failure`. Raises `ResourceError` if Triton's own
    disassembler is missing or fails.
    """
    fixed: dict[str, Any] = {}
    if function is None:
        kernel = next(k for k in KERNELS if k.name == variant.kernel)
        function, fixed = kernel.function, kernel.fixed
    try:
        compiled = compile_variant(function, variant, fixed)
    except Exception as error:  # whatever a compiler may raise
        return _failed(variant, _error_text(error))
    ptx, cubin = code.plain_lines(ptx_text(compiled)), compiled.asm["cubin"]
    sass = code.disassemble(with_plain_lines(ptx, cubin, variant))
    tiles = code.tile_lines(ttgir_text(compiled))
    in_ptx, in_sass = code.ptx_accesses(ptx), code.sass_accesses(sass)
    flags = [a for a in in_ptx if a.order and function_of(a.line) != _OWN_ARRIVALS]
    # Where PTX asks for `.sys`, the machine code must also have it.
    lines = {a.line for a in flags if a.system}
    weak = [f"{a.mnemonic} at {place(a.line)}" for a in flags if not a.system]
    weak += [f"{a.mnemonic} at {place(a.line)} (SASS)" for a in in_sass if a.line in lines and not a.system]
    ordered = [a.order for a in flags if a.system]
    return KernelReport(
        variant,
        code.resources(cubin, sass, int(compiled.metadata.shared)),
        _count(in_ptx, tiles, _least_bits(variant)),
        _count(in_sass, tiles, _least_bits(variant)),
        sum(o in ("acquire", "acq_rel") for o in ordered),
        sum(o in ("release", "acq_rel") for o in ordered),
        sum(o == "relaxed" for o in ordered),
        tuple(dict.fromkeys(weak)),
        any(p.name == "x_ptr" for p in function.params),
        steady_loop.instructions(sass, lambda access: classify(access.line, tiles) == "body", aside),
        disassembled=bool(sass),
    )


def compile_variant(function: Any, variant: Variant, fixed: dict[str, Any]) -> Any:
    """Triton's compiled kernel of `variant`, with its constexprs `fixed`: `.asm` has ttgir, ptx and cubin."""
    values = fixed | (_rows(variant) if variant.form else _plain(variant)) | {"ALIGNED": variant.aligned}
    return compile_kernel(function, values, DTYPES[variant.dtype].bits, variant.aligned, _capability(variant))


def _plain(variant: Variant) -> dict[str, Any]:
    element, op = reduction(DTYPES[variant.dtype], variant.op)
    return {
        "ELEMENT": element,
        "OP": op,
        "WORLD_SIZE": variant.world_size,
        "BLOCK": variant.block,
        "LANES": variant.warps * 32,
        "PTX": True,
        **_options(variant),
    }


def _rows(variant: Variant) -> dict[str, Any]:
    kernel = next(k for k in registry.FUSED if k.name == variant.kernel)
    form, dtype = row_calls.parse(variant.form), getattr(torch, variant.dtype)
    shape = (layout.MAX_BLOCKS, variant.warps, variant.block)
    site = _site(variant.arch, variant.world_size)
    return row_calls.launched(site, kernel, form, dtype, _ROWS, shape, variant.aligned).constexprs


def _capability(variant: Variant) -> int:
    return int(variant.arch.removeprefix("sm_"))


def _options(variant: Variant) -> dict[str, Any]:
    if variant.form:
        return {name: value for name, value in _rows(variant).items() if name in ("num_warps", *COMPILE_OPTIONS)}
    return {**COMPILE_OPTIONS, "num_warps": variant.warps}


def with_plain_lines(ptx: str, cubin: bytes, variant: Variant) -> bytes:
    """`cubin` with a correct line table; raises `ResourceError` if the machine code changes with it."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler.compiler import make_backend

    backend = make_backend(GPUTarget("cuda", _capability(variant), 32))
    again = backend.make_cubin(ptx, {}, backend.parse_options(_options(variant)), _capability(variant))
    if code.text_of(again) != code.text_of(cubin):
        raise ResourceError(f"{variant.kernel}: ptxas made other code from the same PTX with other line numbers")
    return bytes(again)


def _error_text(error: BaseException) -> str:
    """Triton's error with its root cause, because it chains an error per function called."""
    root = error
    while root.__cause__ is not None:
        root = root.__cause__
    behind = "" if root is error else f"; {type(root).__name__}: {str(root).strip()[-500:]}"
    return f"{type(error).__name__}: {str(error).strip()[:500]}{behind}"


def _failed(variant: Variant, reason: str) -> KernelReport:
    none = Counts(0, 0, 0, 0, 0, 0, ())
    return KernelReport(variant, code.Resources(0, 0, 0, 0, 0), none, none, 0, 0, 0, (), False, failure=reason)


def examine_all(chosen: list[Variant]) -> Iterator[KernelReport]:
    """`examine` each of the shipped kernels' variants, in order; compiles several at a time.

    In processes, because Triton parses Python while it compiles, and CPython 3.11's parser fails now and then if two
    threads use it at once (SystemError: AST constructor recursion depth mismatch).
    """
    workers = min(4, len(os.sched_getaffinity(0)))
    with ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context("spawn")) as pool:
        try:
            with env.without("TRITON_INTERPRET"):  # all processes start here; with it, Triton would not compile
                reports = [pool.submit(examine, variant) for variant in chosen]
            for report in reports:
                yield report.result()
        finally:
            pool.shutdown(cancel_futures=True)


def check(report: KernelReport) -> list[str]:
    """The requirements ("bars") that the report does not meet, in words."""
    if report.failure is not None:
        return [f"does not compile: {report.failure}"]
    broken = []
    used = report.resources
    if used.spill_loads or used.spill_stores:  # an unused stack costs nothing
        broken.append(
            f"spills: {used.spill_stores} local stores, {used.spill_loads} local loads, {used.stack} bytes of stack"
        )
    if report.payload and report.variant.aligned:
        for what, counts in (("PTX", report.ptx), ("SASS", report.sass))[: 1 + report.disassembled]:
            if counts.body_narrow:
                broken.append(
                    f"{what}: {counts.body_narrow} bulk accesses are narrower than {_least_bits(report.variant)} bits: "
                    + "; ".join(counts.narrow_lines)
                )
            if not counts.body_wide_loads or not counts.body_wide_stores:
                broken.append(
                    f"{what}: no {_least_bits(report.variant)}-bit bulk access among "
                    f"{counts.body_wide_loads} wide loads and {counts.body_wide_stores} wide stores"
                )
    if report.weak_flags:
        broken.append("flags that are not `.sys`: " + "; ".join(report.weak_flags))
    if not report.sys_acquires or not report.sys_releases + report.sys_relaxed:
        broken.append("no `.sys` flag is written, or none is read with acquire")
    return broken


def _least_bits(variant: Variant) -> int:
    """The least bits of a bulk access, usually 128. A thread has one 64-bit word of a tensor in planes of wide
    words, and in row tiles with a word for each thread. The switch reduces integers one by one. Quantised codes of a
    word's elements, and scales, are narrower than the word."""
    if variant.form:
        return _NARROWEST.get(row_calls.parse(variant.form).quantize, 64)
    kernel = next((k for k in registry.ALL if k.name == variant.kernel), None)
    if kernel is not None and kernel.multicast and kernel.reduces:
        element, _ = reduction(DTYPES[variant.dtype], variant.op)
        return DTYPES[element].bits if "int" in element else 128
    return 64 if variant.kernel.endswith("_ll128") else 128


def _count(accesses: list[code.MemoryInstruction], tiles: set[code.Line], least: int) -> Counts:
    body: list[code.MemoryInstruction] = []
    other = {"tail": 0, "scalar": 0, "control": 0}
    for access in accesses:
        kind = classify(access.line, tiles)
        if kind == "body":
            body.append(access)
        else:
            other[kind] += 1
    wide = [a for a in body if a.bits >= least]
    narrow = [a for a in body if a.bits < least]
    return Counts(
        sum(not a.store for a in wide),
        sum(a.store for a in wide),
        len(narrow),
        **other,
        narrow_lines=tuple(dict.fromkeys(f"{a.mnemonic} at {place(a.line)}" for a in narrow)),
    )


def lines(reports: Iterable[KernelReport]) -> list[str]:
    """A heading, a line per variant, and a line per requirement that is not met."""
    reports = list(reports)
    table = text_table.lines((*_NAMES, *_NUMBERS), map(_cells, reports), right=("W", *_NUMBERS))
    return table + [f"! {_name(report)}: {broken}" for report in reports for broken in check(report)]


def _cells(report: KernelReport) -> tuple[object, ...]:
    v, r, s = report.variant, report.resources, report.sass
    dtype, op, aligned = (v.dtype, v.operation, "yes" if v.aligned else "no") if report.payload else ("-", "-", "-")
    spills, wide = r.spill_loads + r.spill_stores, s.body_wide_loads + s.body_wide_stores
    in_sass: tuple[object, ...] = (spills, wide, s.body_narrow, s.tail, s.scalar, s.control)
    spill, *accesses = in_sass if report.disassembled else ("-",) * len(in_sass)
    return (
        v.kernel, v.arch, dtype, op, v.world_size, aligned, r.registers, spill, r.stack, r.shared, *accesses,
        report.sys_acquires, report.sys_releases, report.sys_relaxed, report.steady or "-",
    )  # fmt: skip


def _name(report: KernelReport) -> str:
    v = report.variant
    return f"{v.kernel} {v.arch} {v.dtype} {v.operation} of {v.world_size} ranks{'' if v.aligned else ', misaligned'}"


def record(report: KernelReport) -> dict[str, Any]:
    """Everything about one variant as plain JSON values, with the bars that it breaks."""
    return {**asdict(report), "violations": check(report)}
