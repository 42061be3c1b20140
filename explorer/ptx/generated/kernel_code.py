"""The code of a whole kernel: one Python function for units whose lanes do not diverge, and pieces for diverged lanes.

The function holds registers in local variables. If lanes diverge, it returns all registers, and pieces continue. Each
piece works on a list of arrays, for some of the lanes. A piece is generated when it is first needed.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

from tricomm.explorer.ptx.access import Array
from tricomm.explorer.ptx.analysis.control_flow import ENDS, Flow, target
from tricomm.explorer.ptx.analysis.liveness import Liveness, read, written
from tricomm.explorer.ptx.generated.inference import choose_homes, infer_shapes
from tricomm.explorer.ptx.generated.instruction_code import InstructionCode, guard_code, indented
from tricomm.explorer.ptx.generated.lane_shapes import LaneShape
from tricomm.explorer.ptx.generated.operand_code import Operands
from tricomm.explorer.ptx.instructions import Instruction, PtxKernel, Register
from tricomm.explorer.ptx.operations.operation import Operation
from tricomm.explorer.ptx.operations.table import CONTROL
from tricomm.explorer.ptx.unit_view import UnitShape

_BLOCKING = ("bar", "barrier")


@dataclass(frozen=True, slots=True)
class Piece:
    """The code of instructions up to `end`, for some lanes: `run(unit, mask, registers)` changes the list of registers.

    `stop` says why the piece ends:
    "" for no special reason; "guard": `run` returns the lanes that pass the guard at `end`; "jump", "leave" (ret,
    exit), "trap"; "barrier", "meet" (lanes of a warp wait for each other): the piece is this one instruction; "strong":
    after a strong access, which may poll a word that other lanes write.
    """

    run: Callable[[Any, Array, list[Any]], Any]
    end: int
    stop: str


class KernelCode:
    """The code for units of one shape. Raises `InvalidArgument` for an instruction of an unknown form."""

    def __init__(self, kernel: PtxKernel, unit: UnitShape, addresses: dict[str, int], timed: bool = False) -> None:
        self.kernel, self.unit, self.timed = kernel, unit, timed
        self.flow = Flow(kernel)
        self.live = Liveness(self.flow)
        self.operands = Operands(kernel, unit, {}, addresses)
        self._code = InstructionCode(self.operands, masked=False)
        infer_shapes(self.operands, self._code)
        choose_homes(self.operands, self._code)
        self.registers: list[Register] = list(
            dict.fromkeys(_register(kernel, n) for i in kernel.instructions for n in (*read(i), *written(i)))
        )
        self._index = {register.name: n for n, register in enumerate(self.registers)}
        self._masked = Operands(kernel, unit, {}, addresses)
        self._masked.homes = self.operands.homes
        for register in self.registers:
            self.operands.variable(register)
            self._masked.variable(register)
        self._masked_code = InstructionCode(self._masked, masked=True)
        self._pieces: dict[tuple[int, bool], Piece] = {}
        self._lock = threading.Lock()
        self.text = "\n".join(self._function())
        self.run = self._compiled(self.text, self.operands.names, "run")

    def _compiled(self, text: str, names: dict[str, Any], name: str) -> Any:
        exec(compile(text, f"<{self.kernel.name}>", "exec"), names)
        return names[name]

    def shape(self, register: Register) -> LaneShape:
        return self.operands.shape(register, 0)

    def place(self, register: Register) -> int:
        """The index of a register in the list of registers."""
        return self._index[register.name]

    def masked_operation(self, index: int) -> Operation:
        operation = self._masked_code.operation(self.kernel.instructions[index])
        assert operation is not None
        return operation

    def initial(self) -> list[Any]:
        """The initial values of all registers."""
        return list(self._zeros)

    @cached_property
    def _zeros(self) -> list[Any]:
        zeros = {kind: self.operands.values.constant(0, kind) for kind in ("u1", "u2", "u4", "u8", "V16")}
        values: list[Any] = []
        for register in self.registers:
            shape = self.shape(register)
            if register.kind == "pred" or shape.flag:
                values.append(False)
            elif shape.stride is not None:
                values.append(0)
            else:
                home = self.operands.home(register)
                values.append(zeros[home if home == "V16" else f"u{home[1:]}"].view(home))
        return values

    def _function(self) -> list[str]:
        variables = ",".join(self.operands.variable(r) for r in self.registers)
        body = self._tree(0, len(self.flow.blocks), 2)
        return [
            "def run(u,pc,registers):",
            f" {variables},=registers" if variables else " pass",
            " steps=u.steps",
            " g=None",
            " while True:",
            *body,
            " u.steps=steps",
            f" return at,g,[{variables}]",
        ]

    def _tree(self, low: int, high: int, depth: int) -> list[str]:
        pad = " " * depth
        if high - low == 1:
            return [pad + line for line in self._block(low)]
        middle = (low + high) // 2
        return [
            f"{pad}if pc<{middle}:",
            *self._tree(low, middle, depth + 1),
            f"{pad}else:",
            *self._tree(middle, high, depth + 1),
        ]

    def _block(self, number: int) -> list[str]:
        block, lines = self.flow.blocks[number], [f"u.surroundings.passes({number})"] if self.timed else []
        for index in range(block.start, block.end):
            instruction = self.kernel.instructions[index]
            if instruction.opcode in CONTROL:
                lines += self._control(index, instruction, number)
            else:
                lines += self._straight(index, instruction)
        last = self.kernel.instructions[block.end - 1]
        if last.opcode not in CONTROL or last.opcode == "brkpt":
            lines += self._go(number, number + 1)
        return lines

    def _straight(self, index: int, instruction: Instruction) -> list[str]:
        operation = self._code.operation(instruction)
        guard = instruction.guard
        if operation is None or guard is None or self.operands.shape(guard[0], 1).uniform:
            return self._code.code(instruction)
        if not operation.waits and instruction.opcode not in _BLOCKING:
            return self._code.code(instruction)
        lines = self._code.code(instruction)  # g=...; if g is not False: ...
        return [lines[0], "if g is True:", *lines[2:], "elif g is not False:", f" at={index}", " break"]

    def _go(self, number: int, to: int) -> list[str]:
        """The code that continues at block `to`. Counts a step if this jumps back."""
        if to >= self.flow.exit:
            return ["u.steps=steps", "return None"]
        lines = [f"pc={to}"]
        if to <= number:
            index = self.flow.blocks[number].end - 1
            lines = ["steps-=1", f"if steps<0: u.out_of_steps({index})", *lines]
        return lines

    def _is_control(self, index: int) -> bool:
        return self.kernel.instructions[index].opcode in CONTROL

    def _control(self, index: int, instruction: Instruction, number: int) -> list[str]:
        if instruction.opcode == "bra":
            taken = self._go(number, self.flow.block_of(target(self.kernel, instruction)))
        elif instruction.opcode in ("ret", "exit"):
            taken = ["u.steps=steps", "return None"]
        elif instruction.opcode == "trap":
            taken = [f"u.trap({index})"]
        else:
            taken = ["pass"]
        if instruction.guard is None:
            return taken
        other = self._go(number, number + 1)
        register, negated = instruction.guard
        variable = self.operands.variable(register)
        if self.operands.shape(register, 1).uniform:
            lines = [f"if {'not ' if negated else ''}{variable}:", *indented(taken)]
            return lines if instruction.opcode == "brkpt" else [*lines, "else:", *indented(other)]
        return [
            guard_code(variable, negated),
            "if g is True:",
            *indented(taken),
            "elif g is False:",
            *indented(other),
            "else:",
            f" at={index}",
            " break",
        ]

    def piece(self, index: int, passed: bool) -> Piece:
        """The piece that begins with instruction `index`. `passed`: its lanes have passed the guard of this
        instruction."""
        with self._lock:
            key = (index, passed)
            if key not in self._pieces:
                self._pieces[key] = self._make_piece(index, passed)
            return self._pieces[key]

    def _make_piece(self, index: int, passed: bool) -> Piece:
        code = self.kernel.instructions
        if passed or (code[index].guard is None and self._stop(index)):
            return self._single(index)
        if self._stop(index):
            return self._guard(index)
        end = index
        block_end = self.flow.blocks[self.flow.block_of(index)].end
        while end < block_end and not self._stop(end) and not (end > index and self._strong(end)):
            end += 1
            if self._strong(end - 1):
                break
        stop = "strong" if self._strong(end - 1) else ""
        return Piece(self._piece_function(index, end, guarded=True), end, stop)

    def _stop(self, index: int) -> str:
        """The `Piece.stop` of a piece that ends at the instruction, or "" """
        instruction = self.kernel.instructions[index]
        if instruction.opcode == "bra":
            return "jump"
        if instruction.opcode in ENDS:
            return "trap" if instruction.opcode == "trap" else "leave"
        if instruction.opcode in CONTROL:
            return ""
        operation = self._masked_code.operation(instruction)
        if operation is not None and operation.waits:
            return "meet"
        return "barrier" if instruction.opcode in _BLOCKING else ""

    def _strong(self, index: int) -> bool:
        if self._is_control(index):
            return False
        operation = self._masked_code.operation(self.kernel.instructions[index])
        return operation is not None and operation.strong

    def _single(self, index: int) -> Piece:
        stop = self._stop(index)
        if stop in ("jump", "leave", "trap"):
            return Piece(lambda unit, mask, registers: None, index, stop)
        return Piece(self._piece_function(index, index + 1, guarded=False), index + 1, stop)

    def _guard(self, index: int) -> Piece:
        guard = self.kernel.instructions[index].guard
        assert guard is not None
        place, negated, values = self._index[guard[0].name], guard[1], self.operands.values
        decide = values.both_not if negated else values.both
        return Piece(lambda unit, mask, registers: decide(mask, registers[place]), index, "guard")

    def _piece_function(self, start: int, end: int, guarded: bool) -> Any:
        code, lines = self._masked_code, []
        loaded: list[str] = []
        stored: list[str] = []
        for index in range(start, end):
            instruction = self.kernel.instructions[index]
            if instruction.opcode in CONTROL:
                continue
            if not guarded and instruction.guard is not None:
                instruction = _without_guard(instruction)
            loaded += [n for n in (*read(instruction), *written(instruction)) if n not in loaded]
            stored += [n for n in written(instruction) if n not in stored]
            lines += code.code(instruction)
        names = [(self._masked.variable(_register(self.kernel, n)), self._index[n]) for n in loaded]
        live = self.live.before(end) if end < len(self.kernel.instructions) else frozenset()
        if end < len(self.kernel.instructions) and self._is_control(end):
            live |= frozenset(read(self.kernel.instructions[end]))
        body = [f"{variable}=registers[{place}]" for variable, place in names]
        body += lines
        for name in stored:
            if name in live or name.startswith("%cc."):
                register = _register(self.kernel, name)
                variable, place = self._masked.variable(register), self._index[name]
                merge = "_p_merge" if register.kind == "pred" else "_merge"
                body.append(f"registers[{place}]={variable} if whole else {merge}(m,{variable},registers[{place}])")
        text = "\n".join(["def piece(u,m,registers):", " whole=u.is_whole(m)", *indented(body)])
        return self._compiled(text, self._masked.names, "piece")

    def to_arrays(self, registers: list[Any]) -> list[Any]:
        """Convert registers of the function to registers of pieces."""
        names, values = self.operands.names, self.operands.values
        arrays: list[Any] = []
        for register, value in zip(self.registers, registers, strict=True):
            shape, home = self.shape(register), self.operands.home(register)
            if register.kind == "pred" or (shape.stride is None and not shape.flag):
                arrays.append(value)
                continue
            word = f"u{home[1:]}"
            if shape.flag:
                array = names[f"_flag_{word}"](value)
            else:
                array = values.constant(value, word) + values.steps(shape.stride or 0, word)
            arrays.append(array.view(home))
        return arrays

    def from_arrays(self, registers: list[Any], index: int) -> list[Any] | None:
        """Convert registers of pieces to registers of the function, at instruction `index`. None if a live value there
        does not have its inferred shape."""
        scalars, values = self.initial(), self.operands.values
        live = self.live.before(index)
        for place, register in enumerate(self.registers):
            if register.name not in live and not register.name.startswith("%cc."):
                continue
            shape, value = self.shape(register), registers[place]
            if register.kind == "pred":
                scalars[place] = values.agreed(value) if shape.uniform else value
                if shape.uniform and not isinstance(scalars[place], bool):
                    return None
            elif shape.flag:
                if (value.view(f"u{value.itemsize}") > 1).any():
                    return None
                scalars[place] = value != 0
            elif shape.stride is not None:
                word = value.view(f"u{value.itemsize}")
                expected = word[:1] + values.steps(shape.stride, word.dtype.str[1:])
                if not np.array_equal(word, expected):
                    return None
                scalars[place] = int(word[0])
            else:
                scalars[place] = value
        return scalars


def _register(kernel: PtxKernel, name: str) -> Register:
    return kernel.registers.get(name) or Register(name, "pred")


def _without_guard(instruction: Instruction) -> Instruction:
    return replace(instruction, guard=None)
