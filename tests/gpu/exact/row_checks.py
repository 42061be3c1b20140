"""Fused calls with known results: rows whose all-reduce ends in a residual, RMSNorm and a quantisation.

Every fused kernel, every form and type, one row and several, and more than a mailbox holds. The results have the bits
of the unfused steps on the same device, and agree with exact results from the CPU.
"""

from collections.abc import Iterator

import torch

from tests.marks import compiles
from tricomm import Communicator
from tricomm.core.fused.fused_call import FUSED, QUANTIZATIONS, FusedCall
from tricomm.kernels.collectives import registry
from tricomm.kernels.collectives.registry import Kernel
from tricomm.kernels.wide_words import FIRST_ARCHITECTURE
from tricomm.perf.bench import fused_bench
from tricomm.perf.bench.request import Case
from tricomm.perf.row_calls import RowForm

RowCall = tuple[RowForm, str, int]  # form, type, rows
HIDDEN, FEW_HIDDEN = (8192, 4112), (160,)
ROWS, FEW_ROWS = (1, 3, 33), (1, 3)
_MANY = 600  # rows of 8192, which need several chunks of `checks.OPTIONS`
_TYPES = ("bfloat16", "float16", "float32")
_OUTPUTS = ("residual_out", "norm_out", "quant_out", "scale_out")


def kernels(world_size: int) -> list[Kernel]:
    """The fused kernels that this Triton compiles."""
    return [k for k in registry.of(FUSED, world_size) if compiles(k, FIRST_ARCHITECTURE)]


def calls(few: bool = False) -> Iterator[RowCall]:
    """Every form of bf16, the norm alone of the other types."""
    for hidden in FEW_HIDDEN if few else HIDDEN:
        for quantize in ("", *QUANTIZATIONS):
            form = RowForm(hidden, quantize)
            for dtype in _TYPES[:1] if quantize else _TYPES:
                yield from ((form, dtype, rows) for rows in (FEW_ROWS if few else ROWS))
    if not few:
        yield RowForm(HIDDEN[0]), _TYPES[0], _MANY


def sweep(comm: Communicator, kernel: Kernel, few: bool = False) -> list[str]:
    """Make the calls on `kernel`; return the errors as texts."""
    return [text for number, call in enumerate(calls(few)) for text in _errors(comm, kernel, call, number)]


def _errors(comm: Communicator, kernel: Kernel, call: RowCall, number: int) -> list[str]:
    form, dtype, rows = call
    case = Case(FUSED, kernel.algorithm, kernel.protocol, dtype, hidden=form.hidden, quantize=form.quantize)
    made = fused_bench.tensors(comm, case, rows * form.hidden)
    made.load(comm, number)
    fused_bench.ours(comm, case, made)()
    comm.synchronize()
    where = f"rank {comm.rank}, {kernel.name}, {rows} rows of {dtype} {form.name}"
    bad = made.wrong(comm, number)
    errors = [f"{where}: {bad} elements are wrong"] if bad else []
    names = _differing(made.call, made.exact(comm, number, comm.device))
    return errors + ([f"{where}: other bits than the unfused steps: {', '.join(names)}"] if names else [])


def _differing(call: FusedCall, exact: FusedCall) -> list[str]:
    pairs = ((name, getattr(call, name), getattr(exact, name)) for name in _OUTPUTS)
    return [n for n, a, b in pairs if a is not None and not torch.equal(a.view(torch.uint8), b.view(torch.uint8))]
