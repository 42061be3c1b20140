"""Litmus tests: a test chooses threads' accesses and their order, and the detector examines them."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field

import numpy as np

from tricomm.explorer.compiled.events import locate
from tricomm.explorer.compiled.race_checks import Maker
from tricomm.explorer.compiled.thread_clocks import SCOPES
from tricomm.explorer.compiled.thread_detector import ThreadDetector
from tricomm.explorer.memory_model.regions import Memory, Region
from tricomm.explorer.ptx.access import ThreadAccess
from tricomm.explorer.ptx.instructions import Address, Instruction, PtxKernel, Register, SourceLine

_lines = itertools.count(1)
_PLACES = {"d": 0, "f": 64, "g": 128, "e": 192}  # data, a flag, a second flag, other data


def kinds(program: str, ranks: str = "011", threads: int = 2) -> list[str]:
    """Kinds of the findings of a litmus test, as "A st d; A st.release f; B ld.acquire f; B ld d".

    A step has a block and its threads (A, A1, A0,1; A is thread 0), an operation, and a place with, where it matters,
    a value (f=1). 32 bits are meant, and the system's scope. Others are "A fence.sc", "A bar" (A0,1 bar: of these
    threads), "A0,1 warp" and "A end". The blocks are of `ranks`, and begin with their first step.
    """
    litmus = Litmus()
    blocks: dict[str, Block] = {}
    for value, step in enumerate(program.split(";"), 1):
        who, name, *place = step.split()
        if who[0] not in blocks:
            number = ord(who[0]) - ord("A")
            blocks[who[0]] = litmus.block(int(ranks[number]), threads, number)
        block, lanes = blocks[who[0]], [int(thread) for thread in (who[1:] or "0").split(",")]
        if name == "end":
            block.end()
        elif name == "bar":
            block.barrier(lanes if who[1:] else None)
        elif name == "warp":
            block.warp_barrier(lanes)
        elif name.startswith("fence"):
            _, sem, *scope = name.split(".")
            block.fence(lanes[0], sem, *scope or ["sys"])
        else:
            at, _, given = place[0].partition("=")
            write = value if name.partition(".")[0] in ("st", "red") or "exch" in name or "multimem" in name else 0
            block(lanes, _whole(name), [_PLACES[at]] * len(lanes), int(given) if given else write)
    return litmus.kinds


def _whole(name: str) -> str:
    words = name.split(".")
    if set(words) & {"relaxed", "acquire", "release", "acq_rel"} and not set(words) & set(SCOPES):
        name += ".sys"
    return name if words[-1][:1] == "b" else f"{name}.b32"


@dataclass(eq=False)
class Litmus:
    """A few bytes shared by all ranks, and blocks of threads."""

    detector: ThreadDetector = field(default_factory=ThreadDetector)

    def __post_init__(self) -> None:
        self.bytes = np.zeros(256, np.uint8)
        self.memory = Memory()
        self.region = Region("symmetric", 0, self.bytes.ctypes.data, 256, "memory")
        self.memory.add(self.region)
        for rank in range(2):
            self.detector.host(rank)
        host = self.detector.host(0)
        self.detector.host_access(0, True, self.region, np.arange(0, 256, 8), 8, _site())
        for rank in range(2):  # all launches are ordered after host code's initialisation
            team = self.detector.host(rank).team
            self.detector.clocks.learn(team, np.zeros(1, int), self.detector.clocks.row(host.team))

    def block(self, rank: int = 0, threads: int = 2, number: int = 0) -> Block:
        known = self.detector.clocks.row(self.detector.host(rank).team)
        return Block(self, Maker(self.detector.clocks.team(rank, threads, known), number, 1, _KERNEL))

    @property
    def kinds(self) -> list[str]:
        return [f.kind for f in self.detector.findings]


@dataclass(eq=False)
class Block:
    litmus: Litmus
    maker: Maker

    def __call__(
        self, lanes: int | list[int], name: str, at: int | list[int], value: int | list[int] | None = None
    ) -> list[int]:
        """`name` is a PTX name such as "st.release.sys.b32" or "atom.add.relaxed.gpu.b32"; returns what was read.

        "multimem.st..." and "multimem.ld_reduce..." are of the one rank whose memory this is.
        """
        opcode, *rest = name.removeprefix("multimem.").split(".")
        sems = ("volatile", "relaxed", "acquire", "release", "acq_rel")
        sem = next((m for m in rest if m in sems), None)
        scope = next((m for m in rest if m in SCOPES), "sys" if sem == "volatile" else None)
        size = int(rest[-1][1:]) // 8
        elements = next((int(m[1:]) for m in rest if m in ("v2", "v4")), 1)
        op = next((m for m in rest if m in ("add", "exch", "cas")), "")
        kind = {"ld": "load", "ld_reduce": "load", "st": "store", "atom": "rmw", "red": "red"}[opcode]
        threads = np.array([lanes] if isinstance(lanes, int) else lanes)
        offsets = np.broadcast_to(np.array(at), threads.shape)
        memory, results = self.litmus.bytes, []
        old = np.stack([memory[o : o + size * elements].copy() for o in offsets])

        def perform(chosen: object) -> np.ndarray:
            for lane, offset in enumerate(offsets.tolist()):
                mine = value[lane] if isinstance(value, list) else value or 0
                cell = memory[offset : offset + size * elements]
                number = int.from_bytes(cell.tobytes(), "little")
                if kind == "load":
                    continue
                new = number + mine if op == "add" else mine
                cell[:] = np.frombuffer(new.to_bytes(size * elements, "little"), np.uint8)
            return old

        def stored() -> np.ndarray:
            each = [value] * len(threads) if isinstance(value, int | None) else value
            return np.stack([np.frombuffer((v or 0).to_bytes(size * elements, "little"), np.uint8) for v in each])

        access = ThreadAccess(
            kind,
            op,
            "global",
            threads,
            (offsets + self.litmus.region.base).astype(np.uint64),
            size,
            elements,
            sem,
            scope if sem else None,
            _instruction(name),
            perform,
            None,
            stored,
        )
        places = locate(access, self.litmus.memory, [], self.maker.rank)
        perform(None)
        results = [int.from_bytes(row.tobytes(), "little") for row in old]
        changed = None
        if kind in ("rmw", "red"):
            now = np.stack([memory[o : o + size * elements] for o in offsets])
            changed = (now != old).any(axis=1) | (op == "exch")
        self.litmus.detector.access(self.maker, access, places, changed)
        return results

    def fence(self, lane: int, sem: str, scope: str) -> None:
        self.litmus.detector.fence(self.maker, np.array([lane]), sem, scope)

    def barrier(self, lanes: list[int] | None = None) -> None:
        slots = self.maker.team.slots if lanes is None else self.maker.team.slots[lanes]
        for slot in slots:
            self.litmus.detector.clocks.arrive(self.maker.team, 0, np.array([slot]))
        for slot in slots:
            self.litmus.detector.clocks.go_on(self.maker.team, 0, np.array([slot]))

    def warp_barrier(self, lanes: list[int]) -> None:
        self.litmus.detector.clocks.meet(self.maker.team, self.maker.team.slots[lanes])

    def end(self) -> None:
        """The launch ends, and its rank's host code waits for it."""
        clocks = self.litmus.detector.clocks
        host = self.litmus.detector.host(self.maker.rank)
        clocks.learn(host.team, np.zeros(1, int), clocks.end(self.maker.team))


_VALUE, _ADDRESS = Register("%r1", "b32"), Register("%rd1", "b64")


def _instruction(name: str) -> Instruction:
    line = next(_lines)
    opcode, *modifiers = name.split(".")
    operands = (
        (Address(_ADDRESS), _VALUE) if "st" in name.split(".") or opcode == "red" else (_VALUE, Address(_ADDRESS))
    )
    return Instruction(opcode, tuple(modifiers), operands, None, line, f"{name} ...;", (SourceLine("k.py", line),))


_USE = Instruction("bra", (), (_VALUE,), None, 0, "bra ...;")  # every loaded value is used
_KERNEL = PtxKernel("k", "sm_90a", (9, 0), (), (_USE,), {}, {})


def _site():
    from tricomm.explorer.memory_model.source_lines import Site

    return Site((("host.py", 1, "fn"),))
