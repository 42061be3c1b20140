"""Python code for one instruction: what is known about its results, and the statements that compute them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tricomm.explorer.ptx.arithmetic import form, refuse, rule
from tricomm.explorer.ptx.arithmetic.form import Rule
from tricomm.explorer.ptx.arithmetic.functions import FUNCTIONS
from tricomm.explorer.ptx.generated.lane_shapes import LaneShape, anything, as_vector, uniform
from tricomm.explorer.ptx.generated.number_code import NumberCode, number_code
from tricomm.explorer.ptx.generated.operand_code import Operands, scalar_functions
from tricomm.explorer.ptx.instructions import WIDTHS, Address, Instruction, Operand, Register, Vector
from tricomm.explorer.ptx.operations.operation import Operation
from tricomm.explorer.ptx.operations.table import MAKERS, make_operation

_SWAPPED = {"u": "i", "i": "u"}


@dataclass(frozen=True, slots=True)
class Result:
    """The `shape` of the value that the instruction writes to `register`, without regard to its guard."""

    register: Register
    shape: LaneShape


class InstructionCode:
    """Generates the code of instructions.

    `masked`: only the lanes of the mask `m` are active, and every register is an array. Otherwise all lanes are active,
    and the code relies on `operands.shapes`.
    """

    def __init__(self, operands: Operands, masked: bool) -> None:
        self.operands, self.masked = operands, masked
        self.operands.names |= FUNCTIONS  # names of generated functions begin with _
        self.operands.names |= scalar_functions()
        self._operations: dict[tuple[Any, ...], Operation | None] = {}
        self._rules: dict[Instruction, Rule] = {}
        self._kept_sources: dict[Instruction, list[tuple[Operand | None, int]]] = {}

    def results(self, instruction: Instruction) -> list[Result]:
        """The results of an instruction and their shapes, given the present `operands.shapes`."""
        unguarded = self._unguarded(instruction)
        if instruction.guard is None or self.operands.shape(instruction.guard[0], 1).uniform:
            return unguarded
        return [Result(r.register, as_vector(r.shape)) for r in unguarded]

    def _unguarded(self, instruction: Instruction) -> list[Result]:
        operation = self.operation(instruction)
        if operation is not None:
            pairs = zip(operation.results, operation.kinds, strict=True)
            return [
                Result(register, (uniform if kind == "number" else anything)(WIDTHS[register.kind]))
                for register, kind in pairs
                if isinstance(register, Register)
            ]
        targets = form.destinations(instruction)
        number = self._number_code(instruction)
        if number is not None:
            return [Result(target, number.shape) for target in targets if isinstance(target, Register)]
        all_uniform = self._all_uniform(instruction)
        return [
            Result(target, (uniform if all_uniform else anything)(WIDTHS[target.kind]))
            for target in targets
            if isinstance(target, Register)
        ]

    def operation(self, instruction: Instruction) -> Operation | None:
        """The call that this instruction becomes, if it becomes one. Cached, because the called function keeps
        state."""
        if instruction.opcode not in MAKERS:
            return None
        guard = instruction.guard
        partial = self.masked or (guard is not None and not self.operands.shape(guard[0], 1).uniform)
        known = tuple(self.operands.shape(o, 64).stride for o in _flat(instruction))
        key = (instruction, partial, known)
        if key not in self._operations:
            self._operations[key] = make_operation(instruction, self.operands, partial)
        return self._operations[key]

    def _rule(self, instruction: Instruction) -> Rule:
        if instruction not in self._rules:
            its_rule = rule(instruction)
            if its_rule is None:
                raise refuse(instruction, self.operands.kernel.name)
            self._rules[instruction] = its_rule
        return self._rules[instruction]

    def _sources(self, instruction: Instruction) -> list[tuple[Operand | None, int]]:
        """The sources, each with the width that a literal has in its place."""
        if instruction in self._kept_sources:
            return self._kept_sources[instruction]
        sources = form.sources(instruction)
        types = [WIDTHS[m] for m in instruction.modifiers if m in WIDTHS]
        width = types[-1] if types else 32
        widths = [width] * len(sources)
        if instruction.opcode in ("mad",) and "wide" in instruction.modifiers:
            widths[2] = 2 * width
        elif instruction.opcode == "selp":
            widths[2] = 1
        elif instruction.opcode in ("shl", "shr"):
            widths[1] = 32
        self._kept_sources[instruction] = list(zip(sources, widths, strict=True))
        return self._kept_sources[instruction]

    def _number_code(self, instruction: Instruction) -> NumberCode | None:
        targets = form.destinations(instruction)
        if len(targets) != 1 or (isinstance(targets[0], Register) and targets[0].kind == "b128"):
            return None
        sources = self._sources(instruction)
        shapes = tuple(self.operands.shape(source, width) for source, width in sources)
        return number_code(instruction, shapes, self.operands.unit.lanes)

    def _all_uniform(self, instruction: Instruction) -> bool:
        if self.masked or not all(self.operands.shape(source, 64).uniform for source, _ in self._sources(instruction)):
            return False
        its_rule = self._rule(instruction)
        return "V16" not in its_rule.inputs and "V16" not in its_rule.outputs

    def code(self, instruction: Instruction) -> list[str]:
        """The statements of an instruction, without indentation. Blocks within them are indented by one space per
        level."""
        guard = instruction.guard
        if guard is None:
            return self._plain(instruction, "m" if self.masked else "None")
        predicate = self.operands.variable(guard[0])
        if self.operands.shape(guard[0], 1).uniform and not self.masked:
            word = "not " if guard[1] else ""
            return [f"if {word}{predicate}:", *indented(self._plain(instruction, "None"))]
        if self.masked:
            head = [f"g={'_both_not' if guard[1] else '_both'}(m,{predicate})"]
            mask = "g"
        else:
            head = [guard_code(predicate, guard[1])]
            mask = "(None if g is True else g)"
        return [*head, "if g is not False:", *indented(self._plain(instruction, mask, guarded=True))]

    def _plain(self, instruction: Instruction, mask: str, guarded: bool = False) -> list[str]:
        operation = self.operation(instruction)
        if operation is not None:
            return self._call(operation, instruction, mask, guarded)
        number = self._number_code(instruction)
        targets = form.destinations(instruction)
        if number is not None:
            sources = self._sources(instruction)
            code = number.code.format(*(self.operands.number(source, width) for source, width in sources))
            return self._assign(targets[0], code, number.shape, guarded)
        return self._by_rule(instruction, targets, guarded)

    def _assign(self, target: Operand | None, code: str, shape: LaneShape, guarded: bool) -> list[str]:
        """Statements that write the number, flag or predicate `code` to a register."""
        if not isinstance(target, Register):
            return []
        variable, wanted = self.operands.variable(target), self.operands.shape(target, 0)
        if wanted.width == 1:
            return [f"{variable}={_merged(code, variable) if guarded else code}"]
        if wanted.flag or wanted.stride is not None:
            return [f"{variable}={code}"]
        home = self.operands.home(target)
        word = f"u{home[1:]}" if home[0] != "V" else home
        array = self.operands.cast(self.operands.spread(code, shape, word), word, home)
        return self._keep(target, array, home, guarded)

    def _keep(self, target: Operand | None, code: str, kind: str, guarded: bool) -> list[str]:
        """Statements that write the array (or predicate) `code`, of numpy type `kind`, to a register."""
        if not isinstance(target, Register):
            return []
        variable = self.operands.variable(target)
        if kind == "?":
            return [f"{variable}={_merged(code, variable) if guarded else code}"]
        home = self.operands.home(target)
        if home != kind:
            code = f"{code}.view({self.operands.dtype(home)})"
        if guarded:
            code = f"{code} if g is True else _merge(g,{code},{variable})"
        return [f"{variable}={code}"]

    def _by_rule(self, instruction: Instruction, targets: tuple[Operand | None, ...], guarded: bool) -> list[str]:
        its_rule, sources = self._rule(instruction), form.sources(instruction)
        wanted = [self.operands.shape(t, 64) for t in targets if isinstance(t, Register)]
        if self._all_uniform(instruction) and any(shape.stride is not None for shape in wanted):
            return self._scalar(its_rule, instruction, targets)
        kinds = self._kinds(its_rule, sources, targets)
        inputs = [
            self.operands.array(source, kinds.get(kind, kind))
            for source, kind in zip(sources, its_rule.inputs, strict=True)
        ]
        fixed = [
            self.operands.constant(int.from_bytes(c.tobytes(), "little"), kinds.get(c.dtype.str[1:], c.dtype.str[1:]))
            for c in its_rule.constants
        ]
        code = its_rule.template.format(*inputs, *fixed)
        outputs = [kinds.get(kind, kind) for kind in its_rule.outputs]
        if len(targets) == 1:
            return self._keep(targets[0], f"({code})", outputs[0], guarded)
        lines = [f"t={code}"]
        for n, (target, kind) in enumerate(zip(targets, outputs, strict=True)):
            lines += self._keep(target, f"t[{n}]", kind, guarded)
        return lines

    def _kinds(
        self, its_rule: Rule, sources: tuple[Operand | None, ...], targets: tuple[Operand | None, ...]
    ) -> dict[str, str]:
        """Numpy types to replace by the signed or unsigned counterpart, where the result is the same and a view is
        saved."""
        kind = its_rule.either
        if kind is None:
            return {}
        other = _SWAPPED[kind[0]] + kind[1:]
        homes = [
            self.operands.home(operand)
            for operand in (*sources, *targets)
            if isinstance(operand, Register) and self.operands.shape(operand, 0).stride is None
        ]
        return {kind: other} if homes.count(other) > homes.count(kind) else {}

    def _scalar(self, its_rule: Rule, instruction: Instruction, targets: tuple[Operand | None, ...]) -> list[str]:
        """Code for numbers by the general rule, on numpy scalars."""
        inputs = []
        for source, kind in zip(form.sources(instruction), its_rule.inputs, strict=True):
            width = 1 if kind == "?" else 8 * int(kind[1:])
            inputs.append(f"_scalar_{_name(kind)}({self.operands.number(source, width)})")
        fixed = [self.operands.named(c, "scalar", c.dtype.str, c.tobytes()) for c in its_rule.constants]
        lines = [f"t={its_rule.template.format(*inputs, *fixed)}"]
        for n, (target, kind) in enumerate(zip(targets, its_rule.outputs, strict=True)):
            if isinstance(target, Register):
                value = f"_bits_{_name(kind)}({'t' if len(targets) == 1 else f't[{n}]'})"
                shape = uniform(1 if kind == "?" else 8 * int(kind[1:]))
                lines += self._assign(target, value, shape, guarded=False)
        return lines

    def _call(self, operation: Operation, instruction: Instruction, mask: str, guarded: bool) -> list[str]:
        arguments = ["u", mask]
        if operation.address is not None:
            arguments.append(self.operands.address(operation.address)[0])
        for operand, kind in operation.arguments:
            if kind == "number":
                arguments.append(self.operands.number(operand, 64))
            elif isinstance(operand, Address):
                arguments.append(self.operands.address_array(operand))
            else:
                arguments.append(self.operands.array(operand, kind))
        name = self.operands.named(operation.call, "call", id(operation))
        call = f"{name}({','.join(arguments)})"
        targets = [(t, k) for t, k in zip(operation.results, operation.kinds, strict=True)]
        if not any(isinstance(t, Register) for t, _ in targets):
            return [call]
        lines = [f"t={call}"]
        for n, (target, kind) in enumerate(targets):
            value = "t" if len(targets) == 1 else f"t[{n}]"
            if kind == "number":
                width = WIDTHS[target.kind] if isinstance(target, Register) else 64
                lines += self._assign(target, value, uniform(width), guarded)
            else:
                lines += self._keep(target, value, kind, guarded)
        return lines

    def votes(self, instruction: Instruction) -> list[tuple[Register, str]]:
        """The numpy types in which this instruction uses its registers."""
        operation = self.operation(instruction)
        if operation is not None:
            given = [(o, k) for o, k in operation.arguments if k not in ("number", "address")]
            given += [(o, k) for o, k in zip(operation.results, operation.kinds, strict=True) if o is not None]
        else:
            its_rule = self._rule(instruction)
            if its_rule.either is not None:
                return []
            given = list(zip(form.sources(instruction), its_rule.inputs, strict=True))  # type: ignore[arg-type]
            given += list(zip(form.destinations(instruction), its_rule.outputs, strict=True))  # type: ignore[arg-type]
        return [(o, k) for o, k in given if isinstance(o, Register) and k not in ("?", "number", "address")]


def _merged(code: str, variable: str) -> str:
    """Code that merges a predicate into `variable` under the guard `g`."""
    return f"{code} if g is True else _p_merge(g,{code},{variable})"


def guard_code(variable: str, negated: bool) -> str:
    """Code that sets `g`: to True or False if all lanes agree, else to an array."""
    if negated:
        return f"g=(not {variable}) if {variable} is True or {variable} is False else _INVERSE_AGREED({variable})"
    return f"g={variable} if {variable} is True or {variable} is False else _agreed({variable})"


def _name(kind: str) -> str:
    return "b" if kind == "?" else kind


def indented(lines: list[str]) -> list[str]:
    return [" " + line for line in lines]


def _flat(instruction: Instruction) -> list[Operand | None]:
    """All operands of an instruction, and the bases of its addresses."""
    flat: list[Operand | None] = []
    for operand in instruction.operands:
        if isinstance(operand, Vector):
            flat += operand.elements
        else:
            flat.append(operand.base if isinstance(operand, Address) else operand)
    return flat
