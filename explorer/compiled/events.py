"""The explorer's records of accesses by compiled code: their threads, bytes and Python lines."""

from __future__ import annotations

import ast
import functools
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tricomm.explorer.compiled.thread_clocks import Array
from tricomm.explorer.memory_model import allowed
from tricomm.explorer.memory_model.regions import Memory, Region
from tricomm.explorer.memory_model.source_lines import NOWHERE, Site
from tricomm.explorer.ptx.access import ThreadAccess
from tricomm.explorer.ptx.instructions import Instruction
from tricomm.explorer.report.findings import Record


@dataclass(slots=True)
class Elements:
    """The elements of an access that are in one region: their `offsets` in bytes (int64); for each element the number
    of its lane among the access's threads, and its number within that lane's vector."""

    region: Region
    offsets: Array
    lanes: Array
    numbers: Array

    def some(self, chosen: Array) -> Elements:
        return Elements(self.region, self.offsets[chosen], self.lanes[chosen], self.numbers[chosen])

    def bytes(self, itemsize: int) -> Array:
        """Their present values, uint8 [elements, itemsize]."""
        content: Array = self.region.bytes[self.offsets[:, None] + np.arange(itemsize)]
        return content

    def put(self, itemsize: int, values: Array) -> None:
        self.region.bytes[self.offsets[:, None] + np.arange(itemsize)] = values


def values_at(access: ThreadAccess, places: list[Elements]) -> Array:
    """The present values, uint8 [lanes, width]."""
    octets = np.zeros((len(access.threads), access.elements, access.itemsize), np.uint8)
    for place in places:
        octets[place.lanes, place.numbers] = place.bytes(access.itemsize)
    return octets.reshape(len(access.threads), -1)


@dataclass(slots=True)
class Event:
    """One memory instruction that some threads of a block (or a rank's host code, block -1) have executed."""

    step: int
    rank: int
    block: int
    team: int
    launch: int
    kind: str
    sem: str | None
    scope: str | None
    site: Site
    region: Region | None
    offset: int
    count: int
    itemsize: int
    instruction: Instruction | None = None
    kernel: Any = None
    dependent: bool = False  # the launch may begin before the previous launch on its stream has ended
    stream: int | None = None  # of a launch

    @classmethod
    def nobodys(cls) -> Event:
        return cls(0, -1, -1, 0, 0, "none", None, None, NOWHERE, None, 0, 0, 0)

    @property
    def shared(self) -> bool:
        return self.region is not None and self.region.shared

    def record(self) -> Record:
        label, owner = "?", -1
        if self.region is not None:
            label, owner = self.region.label(self.offset), self.region.rank
        kind = "rmw" if self.kind in ("red", "rmw") else self.kind
        memory = label, self.count, self.itemsize, owner
        return Record(self.step, self.rank, self.block, self.launch, kind, self.sem, self.scope, self.site, *memory)


def locate(access: ThreadAccess, memory: Memory, private: list[Region], rank: int) -> list[Elements] | int:
    """The places of the elements, one per region; or the first address that is in no region, or in a region that `rank`
    has closed."""
    found = memory.split(access.addresses, access.width, private, rank)
    if isinstance(found, int):
        return found
    result = []
    for region, numbers in found:
        lanes = np.arange(len(access.addresses)) if numbers is None else numbers
        result.append(_elements(region, region.offsets(access.addresses[lanes]), lanes, access))
    return result


def in_shared_memory(access: ThreadAccess, region: Region) -> list[Elements]:
    return [_elements(region, access.addresses.astype(np.int64), np.arange(len(access.addresses)), access)]


def _elements(region: Region, offsets: Array, lanes: Array, access: ThreadAccess) -> Elements:
    if access.elements == 1:
        return Elements(region, offsets, lanes, np.zeros(len(lanes), np.int64))
    number = np.arange(access.elements)
    spread = (offsets[:, None] + number * access.itemsize).reshape(-1)
    return Elements(region, spread, np.repeat(lanes, access.elements), np.tile(number, len(lanes)))


_sites: dict[int, tuple[Instruction, Site]] = {}  # holds the instructions, so that their ids stay unique
_MOST_SITES = 1 << 15


def site_of(instruction: Instruction, kernel: str) -> Site:
    """The instruction, and the Python lines that it was compiled from."""
    entry = _sites.get(id(instruction))
    if entry is None:
        if len(_sites) >= _MOST_SITES:
            _sites.clear()
        lines = [(allowed.present(line.file), line.line, line.function) for line in instruction.source]
        chain = tuple((file, line, name or function_at(file, line) or kernel) for file, line, name in lines)
        said = f"PTX line {instruction.line}: {' '.join(instruction.text.split())}"
        entry = _sites[id(instruction)] = instruction, Site(chain, said)
    return entry[1]


def function_at(file: str, line: int) -> str | None:
    """The name of the innermost function that contains `line` of a Python file. PTX has only the kernel's name."""
    return next((name for first, last, name in _functions(file) if first <= line <= last), None)


@functools.cache
def _functions(file: str) -> list[tuple[int, int, str]]:
    """(first line, last line, name), inner functions first."""
    try:
        tree = ast.parse(Path(file).read_text())
    except (OSError, SyntaxError, ValueError):
        return []
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef)
    spans = [(n.lineno, n.end_lineno or n.lineno, n.name) for n in ast.walk(tree) if isinstance(n, kinds)]
    return sorted(spans, key=lambda entry: entry[1] - entry[0])
