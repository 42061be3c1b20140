"""Reads one kernel from the PTX text of a module."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field

from tricomm.errors import InvalidArgument
from tricomm.explorer.ptx.instructions import (
    Instruction,
    Operand,
    PtxKernel,
    Register,
    SourceLine,
    Variable,
    registers_of,
)
from tricomm.explorer.ptx.text import declarations
from tricomm.explorer.ptx.text.operands import divided, operand
from tricomm.explorer.ptx.text.scopes import Scope
from tricomm.explorer.ptx.text.source_map import SourceMap
from tricomm.explorer.ptx.text.statements import Statement, statements

_INSTRUCTION = re.compile(r"(?:@(!?)\s*([%\w$]+)\s+)?([a-z][a-z0-9_]*)((?:\.\w+(?:::\w+)*)*)(?:\s+(.*)|(?=[{\[(]).*)?")
_ENTRY = re.compile(r"\.entry\s+([\w$]+)\s*(?:\((.*?)\))?\s*((?:\.\w+[^()]*)?)$")
_FUNCTION = re.compile(r"\.func\s*(?:\([^)]*\)\s*)?([\w$]+)")
_DIMENSIONS = re.compile(r"\.(reqntid|maxntid)\s+(\d+)(?:\s*,\s*(\d+))?(?:\s*,\s*(\d+))?")
_IGNORED = ("pragma", "file", "section", "branchtargets", "calltargets", "callprototype", "noreturn", "alias")
_VARIABLE = re.compile(r"\.(?:extern|visible|weak|common|shared|const|global|local|param)\b")


@dataclass
class _Row:
    """An instruction with unresolved operands, because labels and variables may be declared later."""

    text: str
    line: int
    scope: Scope
    source: tuple[SourceLine, ...]
    inline: bool


@dataclass
class _Body:
    """The body of one entry, between its braces."""

    name: str
    header: Statement
    rows: list[_Row] = field(default_factory=list)
    labels: dict[str, int] = field(default_factory=dict)
    variables: dict[str, Variable] = field(default_factory=dict)
    scopes: int = 0


def parse(text: str, entry: str | None = None) -> PtxKernel:
    """The kernel `entry` of a module's PTX `text`; without a name, the module's only one.

    Raises `InvalidArgument` with the PTX line if the text is incomplete, has no such kernel, or uses an undeclared
    name. Unknown instructions are accepted here. `units.grid` refuses them before the kernel runs.
    """
    module = _Module(SourceMap(text))
    for statement in statements(text):
        try:
            module.read(statement)
        except InvalidArgument as error:
            if str(error).startswith("PTX line"):
                raise
            raise InvalidArgument(f"PTX line {statement.line}: {error}") from None
    return module.kernel(entry)


class _Module:
    def __init__(self, source: SourceMap) -> None:
        self._source = source
        self._version, self._target = (0, 0), ""
        self._globals = Scope(0)
        self._variables: dict[str, Variable] = {}
        self._bodies: dict[str, _Body] = {}
        self._body: _Body | None = None
        self._scope: Scope | None = None
        self._header: Statement | None = None
        self._foreign = 0  # depth of braces within a function that is not a kernel

    def read(self, statement: Statement) -> None:
        """Take the next statement of the module."""
        kind = statement.kind
        if kind == "inline":
            self._source.begin_inline()
        elif kind == "plain":
            self._source.end_inline()
        elif self._foreign or (kind == "open" and self._header is not None and ".entry" not in self._header.text):
            self._foreign += (kind == "open") - (kind == "close")
            self._header = self._header if self._foreign else None
        elif kind == "header":
            self._header = statement
            self._declare_function(statement.text)
        elif kind == "open":
            self._open(statement)
        elif kind == "close":
            assert self._scope is not None  # because `statements` counts the braces
            self._scope = self._scope.outer if self._scope.outer is not self._globals else None
            self._body = self._body if self._scope is not None else None
        elif kind == "label":
            self._label(statement)
        elif statement.text[0] == ".":
            self._directive(statement)
        elif self._body is None or self._scope is None:
            raise InvalidArgument(f"{statement.text!r} is outside of a kernel")
        else:
            row = _Row(statement.text, statement.line, self._scope, self._source.present, self._source.inline)
            self._body.rows.append(row)

    def _declare_function(self, text: str) -> None:
        if match := _FUNCTION.search(text):
            self._globals.variables[match[1]] = match[1]

    def _open(self, statement: Statement) -> None:
        if self._scope is None or self._body is None:
            match = _ENTRY.search(self._header.text) if self._header else None
            if match is None or self._header is None:
                raise InvalidArgument("a scope that belongs to no kernel")
            self._source.kernel = match[1]
            self._body = self._bodies[match[1]] = _Body(match[1], self._header)
            self._scope = Scope(0, self._globals)
            for parameter in declarations.parameters(match[2] or ""):
                self._scope.variables[parameter.name] = parameter.name
            self._header = None
            return
        self._body.scopes += 1
        self._scope = Scope(self._body.scopes, self._scope)

    def _label(self, statement: Statement) -> None:
        if self._body is None or self._scope is None:
            raise InvalidArgument(f"the label {statement.text} is outside of a kernel")
        if statement.text in self._scope.labels:
            raise InvalidArgument(f"the label {statement.text} is defined twice")
        unique = self._scope.labels[statement.text] = self._scope.unique(statement.text)
        self._body.labels[unique] = len(self._body.rows)

    def _directive(self, statement: Statement) -> None:
        text = statement.text
        word = re.match(r"\.(\w+)", text)
        name = word[1] if word else ""
        if name == "loc":
            self._source.location(text)
        elif name == "version" and (match := re.match(r"\.version (\d+)\.(\d+)", text)):
            self._version = int(match[1]), int(match[2])
        elif name == "target":
            self._target = text.removeprefix(".target").split(",")[0].strip()
        elif name == "address_size":
            if text.split()[-1] != "64":
                raise InvalidArgument(f"{text!r}: this machine has addresses of 64 bits")
        elif name == "reg" and self._scope is not None:
            declarations.registers(text, self._scope)
        elif ".func" in text:
            self._declare_function(text)
        elif name in _IGNORED:
            pass
        elif _VARIABLE.match(text):
            scope, table = self._globals, self._variables
            if self._scope is not None and self._body is not None:
                scope, table = self._scope, self._body.variables
            table.update((v.name, v) for v in declarations.variables(text, scope))
        else:
            raise InvalidArgument(f"the directive {text!r} is not known")

    def kernel(self, entry: str | None) -> PtxKernel:
        if not self._target or self._version == (0, 0):
            raise InvalidArgument("this is no PTX: .version and .target are missing")
        names = ", ".join(self._bodies) or "none"
        if entry is None and len(self._bodies) != 1:
            raise InvalidArgument(f"the PTX has {len(self._bodies)} kernels ({names}): name one of them")
        body = self._bodies.get(entry) if entry is not None else next(iter(self._bodies.values()))
        if body is None:
            raise InvalidArgument(f"the PTX has no kernel {entry}; it has {names}")
        header = _ENTRY.search(body.header.text)
        assert header is not None  # it was a match when the body began
        registers: dict[str, Register] = {}
        instructions = tuple(_instruction(row, registers) for row in body.rows)
        dimensions = {m[0]: m[1:] for m in _DIMENSIONS.findall(header[3])}
        limit = re.search(r"\.maxnreg\s+(\d+)", header[3])
        return PtxKernel(
            name=body.name,
            target=self._target,
            version=self._version,
            parameters=declarations.parameters(header[2] or ""),
            instructions=instructions,
            labels=body.labels,
            registers=registers,
            variables={**self._variables, **body.variables},
            threads=_three(dimensions["reqntid"]) if "reqntid" in dimensions else None,
            max_registers=int(limit[1]) if limit else None,
            most=math.prod(_three(dimensions["maxntid"])) if "maxntid" in dimensions else None,
        )


def _three(numbers: tuple[str, ...]) -> tuple[int, int, int]:
    x, y, z = (int(n or 1) for n in numbers)
    return x, y, z


def _instruction(row: _Row, registers: dict[str, Register]) -> Instruction:
    match = _INSTRUCTION.fullmatch(row.text)
    try:
        if match is None:
            raise InvalidArgument("this is no instruction")
        guard = None
        if match[2]:
            predicate = row.scope.register(match[2])
            if predicate is None:
                raise InvalidArgument(f"{match[2]} is not declared")
            guard = (predicate, match[1] == "!")
            registers[predicate.name] = predicate
        rest = row.text[match.end(4) :].strip()
        if match[3] == "bra" and row.scope.label(rest) is None:
            raise InvalidArgument(f"the label {rest or 'that it jumps to'} is missing")
        operands = tuple(operand(part, row.scope) for part in divided(rest))
    except InvalidArgument as error:
        raise InvalidArgument(f"PTX line {row.line}: {row.text!r}: {error}{_place(row.source)}") from None
    _collect(operands, registers)
    modifiers = tuple(match[4].split(".")[1:])
    return Instruction(match[3], modifiers, operands, guard, row.line, row.text + ";", row.source, row.inline)


def _place(source: tuple[SourceLine, ...]) -> str:
    return f" (made of {source[0].file}:{source[0].line})" if source else ""


def _collect(operands: tuple[Operand | None, ...], registers: dict[str, Register]) -> None:
    for each in operands:
        for register in registers_of(each):
            registers[register.name] = register
