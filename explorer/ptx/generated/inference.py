"""Infers the shape of each register of a kernel from all writes of it, as a least fixed point."""

from __future__ import annotations

from collections import Counter, defaultdict

from tricomm.explorer.ptx.analysis.liveness import definitions, read, written
from tricomm.explorer.ptx.generated.instruction_code import InstructionCode
from tricomm.explorer.ptx.generated.lane_shapes import join
from tricomm.explorer.ptx.generated.operand_code import Operands, numpy_word
from tricomm.explorer.ptx.operations.table import CONTROL


def infer_shapes(operands: Operands, code: InstructionCode) -> None:
    """Fill `operands.shapes`. A register that is never written counts as unknown."""
    instructions = [i for i in operands.kernel.instructions if i.opcode not in CONTROL]
    visits: Counter[str] = Counter()
    shapes = operands.shapes
    defined = definitions(operands.kernel)
    readers: dict[str, list[int]] = defaultdict(list)
    wanted = [[name for name in read(instruction) if name in defined] for instruction in instructions]
    for n, names in enumerate(wanted):
        for name in names:
            readers[name].append(n)
    pending = dict.fromkeys(range(len(instructions)))
    known: set[int] = set()
    while pending:
        n = next(iter(pending))
        del pending[n]
        instruction = instructions[n]
        if n not in known and not all(name in shapes for name in wanted[n]):
            continue  # it is visited again when all that it reads is known
        known.add(n)
        for result in code.results(instruction):
            name = result.register.name
            joined = join(shapes.get(name), result.shape, visits[name])
            if joined != shapes.get(name):
                shapes[name] = joined
                visits[name] += 1
                pending.update(dict.fromkeys(readers[name]))


def choose_homes(operands: Operands, code: InstructionCode) -> None:
    """Choose the numpy type of each array register: the one that most of its uses need."""
    known = {name for name, shape in operands.shapes.items() if shape.stride is not None}
    arrays = set(operands.kernel.registers) - known
    votes: dict[str, Counter[str]] = defaultdict(Counter)
    for instruction in operands.kernel.instructions:
        if instruction.opcode in CONTROL or not arrays.intersection((*read(instruction), *written(instruction))):
            continue
        for register, kind in code.votes(instruction):
            if kind[1:] == numpy_word(register.kind)[1:]:
                votes[register.name][kind] += 1
    operands.homes = {name: counted.most_common(1)[0][0] for name, counted in votes.items()}
