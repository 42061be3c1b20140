"""Launches a kernel: makes the units of a grid, which are callables."""

from __future__ import annotations

import itertools
import math

import numpy as np

from tricomm.errors import InvalidArgument
from tricomm.explorer.ptx import arithmetic
from tricomm.explorer.ptx.analysis.limits import check_launch
from tricomm.explorer.ptx.analysis.unsupported import unsupported
from tricomm.explorer.ptx.blocks import BlockState
from tricomm.explorer.ptx.generated.operand_code import Operands
from tricomm.explorer.ptx.instructions import PtxKernel
from tricomm.explorer.ptx.operations.memory_forms import unknown_form
from tricomm.explorer.ptx.operations.table import CONTROL, MAKERS, make_operation
from tricomm.explorer.ptx.unit_view import WARP, UnitShape
from tricomm.explorer.ptx.units.loaded_kernel import STEPS, LoadedKernel
from tricomm.explorer.ptx.units.unit import Unit

__all__ = ["STEPS", "LoadedKernel", "launch", "refuse_unknown"]

Size = tuple[int, int, int]


def refuse_unknown(kernel: PtxKernel) -> None:
    """Raises `InvalidArgument` if an instruction cannot be executed, with the text, place and kernel of the first
    one."""
    operands = Operands(kernel, UnitShape(WARP, True, (WARP, 1, 1)), {}, _Zeros())
    for instruction in kernel.instructions:
        try:
            if instruction.opcode in MAKERS:
                make_operation(instruction, operands, partial=True)
            elif instruction.opcode not in CONTROL and arithmetic.rule(instruction) is None:
                raise unknown_form(instruction, "this instruction is not known")
        except InvalidArgument as error:
            feature = unsupported(instruction)
            refused = error if feature is None else unknown_form(instruction, feature)
            raise InvalidArgument(f"kernel {kernel.name}: {refused}") from None
        except (AttributeError, IndexError, KeyError, StopIteration, TypeError, ValueError) as error:
            raise InvalidArgument(
                f"kernel {kernel.name}: {unknown_form(instruction, f'its operands are not understood ({error})')}"
            ) from error


class _Zeros(dict[str, int]):
    def __missing__(self, name: str) -> int:
        return 0


def launch(
    loaded: LoadedKernel, grid: Size, threads: Size, shared_bytes: int, parameters: bytes, unit: str = "warp"
) -> list[BlockState]:
    """The blocks of a launch, with their units. `shared_bytes` is the dynamic shared memory, `unit` is "warp" or
    "block".

    Raises `InvalidArgument` for sizes that no GPU of the kernel's architecture has.
    """
    kernel = loaded.kernel
    check_launch(kernel, grid, threads, shared_bytes)
    count = math.prod(threads)
    wanted = max((p.offset + p.size for p in kernel.parameters), default=0)
    if len(parameters) < wanted:
        raise InvalidArgument(f"{kernel.name} takes {wanted} bytes of parameters, not {len(parameters)}")
    blocks = []
    for z, y, x in itertools.product(range(grid[2]), range(grid[1]), range(grid[0])):
        block = BlockState((x, y, z), grid, count, (loaded.static_shared, shared_bytes), parameters)
        width = WARP if unit == "warp" else count
        for first in range(0, count, width):
            lanes = min(width, count - first)
            shape = UnitShape(lanes, unit == "warp", threads)
            block.units.append(Unit(loaded, block, np.arange(first, first + lanes, dtype="i8"), shape))
        blocks.append(block)
    return blocks
