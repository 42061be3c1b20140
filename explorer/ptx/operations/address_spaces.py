"""`cvta`: generic addresses have the space in their highest bits; global ones are unchanged."""

from __future__ import annotations

import numpy as np

from tricomm.explorer.ptx.access import Array
from tricomm.explorer.ptx.generated.operand_code import Operands
from tricomm.explorer.ptx.instructions import Instruction
from tricomm.explorer.ptx.operations.lane_memory import LOCAL_WINDOW, SHARED_WINDOW
from tricomm.explorer.ptx.operations.memory_forms import unknown_form
from tricomm.explorer.ptx.operations.operation import Operation
from tricomm.explorer.ptx.unit_view import UnitView

WINDOWS = {"global": 0, "const": 0, "param": 0, "shared": SHARED_WINDOW, "local": LOCAL_WINDOW}


def window_of(instruction: Instruction) -> int:
    """The offset that makes an address generic; negative for the reverse."""
    modifiers = [m.split("::")[0] for m in instruction.modifiers]
    space = next((m for m in modifiers if m in WINDOWS), None)
    if space is None or modifiers[-1] not in ("u64", "b64") or space == "param":
        raise unknown_form(instruction, "this conversion of addresses is not known")
    return -WINDOWS[space] if "to" in modifiers else WINDOWS[space]


def cvta(instruction: Instruction, operands: Operands, partial: bool) -> Operation | None:
    """None if the address is a number: then `generated.number_code` handles it."""
    target, source = instruction.operands
    window = window_of(instruction)
    if operands.shape(source, 64).stride is not None:
        return None
    step = np.uint64(window & (1 << 64) - 1)
    arguments = ((source, "u8"),)

    def call(unit: UnitView, mask: Array | None, address: Array) -> Array:
        return address + step

    return Operation(call, (target,), ("u8",), arguments=arguments)
