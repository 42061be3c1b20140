"""Fused rows stay in registers, but for those that are known, in the kernel and the shape that a call of them launches:
lengths of rows of models, numbers of ranks, types, quantisations, architectures, both widths of words."""

from collections.abc import Iterator

import pytest
import torch

from tests.marks import compiles
from tricomm.core.fused.fused_call import FUSED, QUANTIZATIONS
from tricomm.kernels import layout
from tricomm.kernels.collectives import registry
from tricomm.kernels.dtypes import DTYPES
from tricomm.perf import row_calls
from tricomm.perf.machine_code import kernel_report
from tricomm.perf.machine_code.kernel_report import Variant
from tricomm.perf.row_calls import RowForm
from tricomm.policy import row_shapes
from tricomm.policy.selection_facts import SelectionFacts

ROWS = 32
# Length, ranks, type. Registers depend on the words that a thread has (16 at most; with 512 threads it has half the
# registers), the tiles that are polled at once, and masks, where a shard is not whole tiles.
WORST = ((16384, 8, "float32"), (8192, 2, "bfloat16"), (2880, 8, "bfloat16"))
FORMS = (*WORST, (16384, 8, "bfloat16"), (7168, 8, "float32"), (4096, 4, "float32"))
# Known spills of kernels for eight ranks, in words at most, by architecture, protocol, quantisation, length and type.
KNOWN = {
    ("sm_80", "ll", "", 16384, "float32"): 24,  # 512 threads of 128 registers
    ("sm_80", "ll", "fp8", 16384, "float32"): 24,
    ("sm_80", "ll128", "fp8", 16384, "float32"): 80,
    ("sm_90", "ll", "", 16384, "float32"): 2,  # of the call, not of a row: stored and loaded once a chunk
    ("sm_90", "ll", "fp8", 16384, "float32"): 2,
    ("sm_90", "ll", "fp8_per_token", 16384, "float32"): 2,
    ("sm_90", "ll", "nvfp4", 16384, "float32"): 6,
    ("sm_90", "ll128", "fp8", 16384, "float32"): 24,
    ("sm_90", "ll128", "nvfp4", 16384, "bfloat16"): 24,
}


def _variants(arch: str, protocol: str, quantize: str) -> Iterator[Variant]:
    """Each form with the algorithm that the rules choose: all of them on sm_90, elsewhere the worst ones."""
    for hidden, world_size, dtype in FORMS if arch == "sm_90" else WORST:
        site = SelectionFacts(arch, world_size, layout.plan(world_size, 64 << 20), layout.MAX_BLOCKS)
        asked = (site, FUSED, DTYPES[dtype].bits, hidden, ROWS, (None, protocol), quantize)
        choice = row_shapes.choose(*asked)
        if isinstance(choice, str):  # planes of ll128 that divide blocks of nvfp4
            continue
        kernel = registry.find(FUSED, choice.algorithm, protocol)
        form = RowForm(hidden, quantize)
        shape = row_calls.launched(site, kernel, form, getattr(torch, dtype), ROWS).choice
        yield Variant(kernel.name, arch, dtype, "sum", world_size, True, shape.block, shape.warps, form.name)


@pytest.mark.soak
@pytest.mark.timeout(14400)
@pytest.mark.parametrize("arch", kernel_report.ARCHITECTURES)
@pytest.mark.parametrize("quantize", ["", *QUANTIZATIONS])
@pytest.mark.parametrize("protocol", [k.protocol for k in registry.of(FUSED, 8)[:2] if compiles(k)])
def test_no_form_of_rows_spills(protocol: str, quantize: str, arch: str) -> None:
    spilled = {}
    for report in kernel_report.examine_all(list(_variants(arch, protocol, quantize))):
        used, variant = report.resources, report.variant
        assert report.failure is None, variant
        known = KNOWN.get((arch, protocol, quantize, row_calls.parse(variant.form).hidden, variant.dtype), 0)
        if max(used.spill_loads, used.spill_stores) > (known if variant.world_size == 8 else 0):
            spilled[str(variant)] = (used.spill_loads, used.spill_stores, used.stack)
    assert spilled == {}
