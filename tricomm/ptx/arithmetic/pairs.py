"""cvt from and to registers that hold two or four floats."""

from __future__ import annotations

from tricomm.ptx.arithmetic.form import Form
from tricomm.ptx.arithmetic.rule import Rule


def rule(form: Form) -> Rule | None:
    if form.opcode != "cvt" or len(form.types) != 2:
        return None
    if form.types in (("f16x2", "f32"), ("bf16x2", "f32")) and form.has(1, 2, "rn"):
        return form.rule(("f4", "f4"), ("u4",), f"to_{form.types[0]}({{0}}, {{1}})")
    return None
