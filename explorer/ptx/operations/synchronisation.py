"""Barriers of a block and of a warp, fences, and instructions without effect on memory or registers."""

from __future__ import annotations

from typing import Any

from tricomm.explorer.ptx.access import Array
from tricomm.explorer.ptx.instructions import Instruction, Operand, Register
from tricomm.explorer.ptx.operations.memory_forms import SCOPES, unknown_form
from tricomm.explorer.ptx.operations.operation import KnownOperands, Operation
from tricomm.explorer.ptx.unit_view import UnitView

_LEVELS = {"cta": "cta", "gl": "gpu", "sys": "sys"}


def fence(instruction: Instruction, operands: KnownOperands, partial: bool) -> Operation:
    if instruction.opcode == "membar":
        scope = _LEVELS.get(instruction.modifiers[0])
        if scope is None and instruction.modifiers[0] != "proxy":
            raise unknown_form(instruction, "this level is not known")
        rest = ["sc"] if scope is not None else list(instruction.modifiers)
    else:
        rest = [m for m in instruction.modifiers if m not in SCOPES] or ["acq_rel"]
        scope = next((m for m in instruction.modifiers if m in SCOPES), None)
    ordered = [m for m in rest if m in ("sc", "acq_rel", "acquire", "release")]
    special = rest[:1] in (["proxy"], ["mbarrier_init"])
    if len(ordered) > 1 or not (ordered or special) or (rest != ordered and not special):
        raise unknown_form(instruction, "this fence is not known")
    if rest == ["proxy", "alias"]:
        return Operation(lambda unit, mask: unit.fence("alias", "sys", mask, instruction))
    if special and not (ordered and rest[0] == "proxy"):
        return nothing(instruction, operands, partial)  # the other proxies do not differ in this simulation
    name, reach = "sc" if ordered == ["sc"] else "acq_rel", scope or "sys"

    def call(unit: UnitView, mask: Array | None) -> None:
        unit.fence(name, reach, mask, instruction)

    return Operation(call)


def barrier(instruction: Instruction, operands: KnownOperands, partial: bool) -> Operation:
    """A barrier of a block. `call` arrives and waits; it returns the result of a reduction, if there is one."""
    modifiers = [m for m in instruction.modifiers if m not in ("cta", "aligned")]
    if modifiers[:1] == ["warp"]:
        members = instruction.operands[0]
        return Operation(lambda unit, mask: unit.warp_barrier(mask, instruction), waits=True, members=members)
    if not modifiers or modifiers[0] not in ("sync", "arrive", "red") or "cluster" in modifiers:
        raise unknown_form(instruction, "this barrier is not known")
    given = list(instruction.operands)
    results: tuple[Operand | None, ...] = ()
    predicate: Operand | None = None
    if modifiers[0] == "red":
        if modifiers[1:] not in (["popc", "u32"], ["and", "pred"], ["or", "pred"]):
            raise unknown_form(instruction, "this reduction is not known")
        results, predicate, given = (given[0],), given[-1], given[1:-1]
    if not 1 <= len(given) <= 2 or (modifiers[0] == "arrive" and len(given) != 2):
        raise unknown_form(instruction, "this barrier is not known")
    arguments: list[tuple[Operand, str]] = [(operand, "u4") for operand in given]
    if predicate is not None:
        arguments.append((predicate, "?"))
    has_count, kind, reduction = len(given) == 2, modifiers[0], "".join(modifiers[1:2])

    def call(unit: UnitView, mask: Array | None, number: Array, *rest: Array) -> Any:
        lane = 0 if mask is None else mask.tobytes().find(1)
        count = rest[0].item(lane) if has_count else None
        request = unit.barrier_request(kind, number.item(lane), count, mask, instruction)
        if predicate is not None:
            request.contribute(reduction, rest[-1], mask)
        return unit.pass_barrier(request)

    if not results:
        return Operation(call, arguments=tuple(arguments))
    target = results[0]
    kind_of_result = "u4" if isinstance(target, Register) and target.kind != "pred" else "?"
    return Operation(call, results, (kind_of_result,), arguments=tuple(arguments))


def dependency(instruction: Instruction, operands: KnownOperands, partial: bool) -> Operation:
    """`griddepcontrol`. The surroundings know which launches may overlap."""
    if instruction.modifiers == ("wait",):
        return Operation(lambda unit, mask: unit.wait_for_launches(mask, instruction))
    if instruction.modifiers == ("launch_dependents",):
        return Operation(lambda unit, mask: unit.launch_dependents())
    raise unknown_form(instruction, "griddepcontrol.wait and .launch_dependents are known")


def nothing(instruction: Instruction, operands: KnownOperands, partial: bool) -> Operation:
    """Hints, and instructions without effect here."""
    return Operation(lambda unit, mask: None)


def policy(instruction: Instruction, operands: KnownOperands, partial: bool) -> Operation:
    """`createpolicy`, which makes a cache hint. No cache is modelled."""
    return Operation(lambda unit, mask, *rest: 0, (instruction.operands[0],), ("number",))
