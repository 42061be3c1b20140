"""Basic blocks of a kernel, the points at which diverged lanes meet again, and loops."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

from tricomm.errors import InvalidArgument
from tricomm.explorer.ptx.instructions import Instruction, Label, PtxKernel, SourceLine

ENDS = ("ret", "exit", "trap")
JUMPS = ("bra", *ENDS)


@dataclass(frozen=True, slots=True)
class Block:
    """A basic block: the instructions from `start` to before `end`. Control leaves it only at the last one.

    successors  numbers of the next blocks, with the target of a branch first; `Flow.exit` is the kernel's end
    """

    start: int
    end: int
    successors: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Loop:
    """A natural loop: its header and all of its blocks, by number."""

    header: int
    blocks: frozenset[int]


class Flow:
    """The control flow of a kernel. Raises `InvalidArgument` for a branch to no label.

    If blocks cannot reach the end (`while True`), the last of them counts as if it could, so that lanes that diverge in
    them have a point of reconvergence.
    """

    def __init__(self, kernel: PtxKernel) -> None:
        self.kernel = kernel
        self.blocks = _blocks(kernel)
        self.exit = len(self.blocks)
        self._number = [n for n, block in enumerate(self.blocks) for _ in range(block.start, block.end)]

    def block_of(self, index: int) -> int:
        """The number of the block of instruction `index`; `exit` after the last one."""
        return self._number[index] if index < len(self._number) else self.exit

    @cached_property
    def edges(self) -> list[list[int]]:
        """Successors by block, with an edge to `exit` from each endless loop; `exit` itself has none."""
        edges = [list(block.successors) for block in self.blocks] + [[]]
        while True:
            backward = reversed_edges(edges)
            stuck = set(range(len(edges))) - reachable(backward, [self.exit])
            if not stuck:
                return edges
            edges[max(stuck)].append(self.exit)

    @cached_property
    def predecessors(self) -> list[list[int]]:
        return reversed_edges(self.edges)

    @cached_property
    def dominators(self) -> list[int | None]:
        """The immediate dominator of each block; None for the first one and for unreachable ones."""
        return immediate_dominators(self.edges, 0) if self.blocks else [None]

    @cached_property
    def reconvergence(self) -> list[int]:
        """By block, its immediate post-dominator: the first block that all lanes reach on every path."""
        dominators = immediate_dominators(self.predecessors, self.exit)
        return [self.exit if n is None else n for n in dominators[: self.exit]]

    def dominates(self, first: int, second: int) -> bool:
        """True if every path to block `second` contains block `first`, which may be the same block."""
        seen: int | None = second
        while seen is not None and seen != first:
            seen = self.dominators[seen]
        return seen == first

    @cached_property
    def loops(self) -> tuple[Loop, ...]:
        """The loops of the kernel, inner loops first."""
        bodies: dict[int, set[int]] = {}
        for source, targets in enumerate(self.edges):
            for target in targets:
                if target != self.exit and self.dominates(target, source):
                    inside = bodies.setdefault(target, {target})
                    inside |= reachable(self.predecessors, [source], without=target)
        natural = [Loop(header, frozenset(body)) for header, body in bodies.items()]
        return tuple(sorted(natural, key=lambda loop: (len(loop.blocks), loop.header)))

    def loop_at(self, index: int) -> Loop | None:
        """The innermost loop that instruction `index` is part of."""
        number = self.block_of(index)
        return next((loop for loop in self.loops if number in loop.blocks), None)

    def lines(self, loop: Loop) -> list[SourceLine]:
        """The Python lines of a loop's instructions, by file and line. Of inlined calls, only lines of the innermost
        function."""
        inside = (
            self.kernel.instructions[index].source[0]
            for number in loop.blocks
            for index in range(self.blocks[number].start, self.blocks[number].end)
            if self.kernel.instructions[index].source
        )
        return sorted(set(inside), key=lambda line: (line.file, line.line, line.function or ""))


def target(kernel: PtxKernel, instruction: Instruction) -> int:
    """The index of the instruction that a `bra` jumps to."""
    label = instruction.operands[0] if instruction.operands else None
    if not isinstance(label, Label) or label.name not in kernel.labels:
        raise InvalidArgument(f"{kernel.name}, PTX line {instruction.line}: {instruction.text!r} jumps to no label")
    return kernel.labels[label.name]


def _blocks(kernel: PtxKernel) -> tuple[Block, ...]:
    code = kernel.instructions
    starts = {0, len(code)}
    for index, instruction in enumerate(code):
        if instruction.opcode == "brx":
            place = f"{kernel.name}, PTX line {instruction.line}"
            raise InvalidArgument(f"{place}: {instruction.text!r}: branches through a table are not known")
        if instruction.opcode in JUMPS:
            starts.add(index + 1)
        if instruction.opcode == "bra":
            starts.add(target(kernel, instruction))
    order = sorted(starts)
    number = {start: n for n, start in enumerate(order)}  # the last one is the kernel's end
    blocks = []
    for start, end in zip(order, order[1:], strict=False):
        last = code[end - 1]
        going = [number[target(kernel, last)]] if last.opcode == "bra" else []
        if last.opcode in ENDS:
            going = [len(order) - 1]
        if last.opcode not in JUMPS or last.guard is not None:
            going.append(number[end])
        blocks.append(Block(start, end, tuple(dict.fromkeys(going))))
    return tuple(blocks)


def reversed_edges(edges: Sequence[Iterable[int]]) -> list[list[int]]:
    """The graph with all edges reversed."""
    backward: list[list[int]] = [[] for _ in edges]
    for source, targets in enumerate(edges):
        for each in targets:
            backward[each].append(source)
    return backward


def reachable(edges: Sequence[Iterable[int]], starts: Iterable[int], without: int | None = None) -> set[int]:
    """All nodes on paths from `starts` that avoid `without`. Includes `starts`."""
    pending = [start for start in starts if start != without]
    seen = set(pending)
    while pending:
        for each in edges[pending.pop()]:
            if each not in seen and each != without:
                seen.add(each)
                pending.append(each)
    return seen


def immediate_dominators(edges: Sequence[Sequence[int]], root: int) -> list[int | None]:
    """The immediate dominator of each node, for paths from `root`; None for the root and for unreachable nodes (Cooper,
    Harvey and Kennedy)."""
    order = _postorder(edges, root)
    rank = {node: n for n, node in enumerate(order)}
    backward = reversed_edges(edges)
    dominator: dict[int, int] = {root: root}
    changed = True
    while changed:
        changed = False
        for node in reversed(order[:-1]):
            known = [each for each in backward[node] if each in dominator]
            meet = known[0]
            for other in known[1:]:
                while meet != other:
                    if rank[meet] < rank[other]:
                        meet = dominator[meet]
                    else:
                        other = dominator[other]
            if dominator.get(node) != meet:
                dominator[node] = meet
                changed = True
    return [None if node == root else dominator.get(node) for node in range(len(edges))]


def _postorder(edges: Sequence[Sequence[int]], root: int) -> list[int]:
    order: list[int] = []
    seen = {root}
    pending = [(root, iter(edges[root]))]
    while pending:
        node, rest = pending[-1]
        for each in rest:
            if each not in seen:
                seen.add(each)
                pending.append((each, iter(edges[each])))
                break
        else:
            order.append(node)
            pending.pop()
    return order
