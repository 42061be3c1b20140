"""Counts a kernel's instructions per 16 bytes of payload in its steady loop, from the disassembly.

A loop that moves payload has a fast path, one for a ragged end and one for misaligned memory. The shortest path round
through the wide accesses counts, because it runs for all tiles but the last.
"""

from __future__ import annotations

import heapq
import re
from collections.abc import Callable
from dataclasses import dataclass, field

from tricomm.perf.machine_code.accesses import Line, MemoryInstruction, sass_access, sass_lines

_LABEL = re.compile(r"^(\.L_x_\d+):")
_INSTRUCTION = re.compile(r"^\s*/\*[0-9a-f]{4,}\*/\s+(@!?U?P\w+\s+)?([A-Z][A-Z0-9]*)")
_TARGET = re.compile(r"`\((\.L_x_\d+)\)")
_NO_FALL_THROUGH = ("EXIT", "RET", "BRX", "KILL")


@dataclass
class _Block:
    """A basic block, and the numbers of its successors."""

    size: int = 0
    wide: bool = False
    lines: set[Line] = field(default_factory=set)
    after: list[int] = field(default_factory=list)
    targets: list[str] = field(default_factory=list)


Payload = Callable[[MemoryInstruction], bool]


def instructions(sass: str, is_payload: Payload, aside: Callable[[Line], bool] = lambda line: False) -> int:
    """Instructions of all `loops`; with tiles of 16 bytes a thread, the cost of 16 bytes. 0 if no loop moves payload.

    A separate loop that sends payload to several ranks also counts once.
    """
    return sum(loops(sass, is_payload, aside))


def loops(sass: str, is_payload: Payload, aside: Callable[[Line], bool] = lambda line: False) -> list[int]:
    """Instructions of each innermost loop through accesses of 16 bytes that are payload, each loop once.

    `sass` is a disassembly with line information. A loop with a source line that is `aside` is left out.
    """
    blocks = _blocks(sass, is_payload)
    wanted = {n for n, block in enumerate(blocks) if block.wide}
    sizes = []
    while wanted:
        path = _shortest_cycle(blocks, min(wanted))
        if path and not any(aside(line) for n in path for line in blocks[n].lines):
            sizes.append(sum(blocks[n].size for n in path))
        wanted -= set(path) or {min(wanted)}
    return sizes


def _blocks(sass: str, is_payload: Payload) -> list[_Block]:
    blocks, names = [_Block()], {}
    for text, line in sass_lines(sass):
        label, instruction = _LABEL.match(text), _INSTRUCTION.match(text)
        if label:
            blocks[-1].after.append(len(blocks))
            blocks.append(_Block())
            names[label[1]] = len(blocks) - 1
        elif instruction:
            block = blocks[-1]
            block.size += 1
            access = sass_access(text, line)
            block.wide |= access is not None and access.bits >= 128 and is_payload(access)
            block.lines.add(line)
            target = _TARGET.search(text)
            jumps = instruction[2] == "BRA" and target is not None
            if jumps and target is not None:
                block.targets.append(target[1])
            if jumps or instruction[2] in _NO_FALL_THROUGH:
                if instruction[1]:
                    block.after.append(len(blocks))
                blocks.append(_Block())
    for block in blocks:
        block.after += [names[t] for t in block.targets if t in names]
    blocks[-1].after = [n for n in blocks[-1].after if n < len(blocks)]
    return blocks


def _shortest_cycle(blocks: list[_Block], start: int) -> list[int]:
    """The blocks of the shortest path from `start` back to itself; empty if there is none."""
    queue: list[tuple[int, int, tuple[int, ...]]] = [(blocks[n].size, n, (start, n)) for n in blocks[start].after]
    heapq.heapify(queue)
    seen: set[int] = set()
    while queue:
        cost, here, path = heapq.heappop(queue)
        if here == start:
            return list(path[:-1])
        if here not in seen:
            seen.add(here)
            for n in blocks[here].after:
                heapq.heappush(queue, (cost + blocks[n].size, n, (*path, n)))
    return []
