"""Meeting points, loops and liveness against their definitions, on random kernels; scalars against single threads."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest

from tests.ptx.corpus import parsed
from tests.ptx.texts import module
from tricomm.errors import InvalidArgument
from tricomm.perf.machine_code.kernel_report import Variant
from tricomm.ptx.analysis.control_flow import Flow, reachable, target
from tricomm.ptx.analysis.liveness import Liveness, read, written
from tricomm.ptx.analysis.uniformity import Uniform, _Analysis, uniformity
from tricomm.ptx.instructions import Instruction, Integer, Operand, PtxKernel, Register, Special
from tricomm.ptx.text.parser import parse

SEEDS = range(60)
LANES = 4
FUEL = 150


def random_kernel(seed: int) -> PtxKernel:
    """Blocks of moves, additions and comparisons over few registers, with branches to anywhere, mostly forward."""
    pick = random.Random(seed)
    blocks, registers = pick.randint(2, 9), pick.randint(3, 12)
    rows = ["mov.u32 %r0, %tid.x;"]
    for block in range(blocks):
        rows.append(f"L{block}:")
        for _ in range(pick.randint(0, 4)):
            a, b, c = (f"%r{pick.randint(n, registers)}" for n in (1, 0, 1))
            p, q = (f"%p{pick.randint(0, 2)}" for _ in range(2))
            guard = pick.choice(["", "", "", "", f"@{p} ", f"@!{p} "])
            choices = [f"mov.u32 {a}, {pick.randint(0, 3)};", f"add.s32 {a}, {c}, {pick.choice([b, '1', '2'])};",
                       f"selp.b32 {a}, {c}, {b}, {q};", f"setp.lt.s32 {p}, {c}, {b};"]  # fmt: skip
            rows.append(guard + pick.choice(choices))
        p, to = f"%p{pick.randint(0, 2)}", pick.randint(pick.choice([0, block + 1, block + 1]), blocks)
        rows.append(f"setp.lt.s32 {p}, {pick.choice(['%r0', '%r0', '%r1', '%r2'])}, {pick.randint(1, 4)};")
        rows.append(pick.choice([f"@{p} bra L{to};"] * 4 + [f"@!{p} bra L{to};", f"bra.uni L{to};", f"@{p} ret;"]))
    rows += [f"L{blocks}:", *(f"add.s32 %r1, %r{n}, 0;" for n in range(registers + 1))]
    return parse(module("\n".join(rows)))


@pytest.mark.parametrize("seed", SEEDS)
def test_dominators_and_meeting_points(seed):
    flow = Flow(random_kernel(seed))
    seen = reachable(flow.edges, [0])
    everything = range(flow.exit + 1)
    after = {n: {m for m in everything if m == n or flow.exit not in reachable(flow.edges, [n], m)} for n in everything}
    for n in range(flow.exit):
        nearest = [m for m in after[n] - {n} if after[n] - {n} <= after[m]]
        assert [flow.reconvergence[n]] == nearest
    for n in seen:
        dominators = {m for m in seen if m == n or n not in reachable(flow.edges, [0], m)}
        assert {m for m in seen if flow.dominates(m, n)} == dominators
    for loop in flow.loops:
        for n in loop.blocks & seen:
            assert flow.dominates(loop.header, n)
            inside = [[m for m in flow.edges[k] if m in loop.blocks] if k in loop.blocks else [] for k in everything]
            assert loop.header in reachable(inside, inside[n])


@pytest.mark.parametrize("seed", SEEDS)
def test_liveness(seed):
    """A register is live if some way from here comes to a read of it before it is written for certain."""
    kernel = random_kernel(seed)
    flow = Flow(kernel)
    live, code = Liveness(flow), kernel.instructions

    def ways(index: int) -> list[int]:
        instruction = code[index]
        on = [] if instruction.opcode in ("bra", "ret") and instruction.guard is None else [index + 1]
        return [*on, target(kernel, instruction)] if instruction.opcode == "bra" else on

    for name in kernel.registers:
        for start in range(len(code)):
            seen, pending, found = {start}, [start], False
            while pending and not found:
                index = pending.pop()
                if index < len(code):
                    found = name in read(code[index])
                    ends = name in written(code[index]) and code[index].guard is None
                    new = [] if ends else [n for n in ways(index) if n not in seen]
                    seen.update(new)
                    pending += new
            assert (name in live.before(start)) == found
    for number, block in enumerate(flow.blocks):
        starts = [flow.blocks[n].start for n in block.successors if n != flow.exit]
        assert live.at_end(number) == frozenset().union(*(live.before(start) for start in starts))


def _computed(opcode: str, a: int, b: int = 0, c: int = 0) -> int:
    return {"mov": a, "add": (a + b) & 7, "setp": int(a < b), "selp": a if c else b}[opcode]


@dataclass
class Threads:
    """Executes a kernel; registers that `uniform` names have one value for all threads."""

    kernel: PtxKernel
    uniform: Uniform
    lanes: range
    own: dict[tuple[int, str], int] = field(default_factory=dict)
    shared: dict[str, int] = field(default_factory=dict)
    seen: dict[int, list[tuple[int, ...]]] = field(default_factory=dict)

    def get(self, lane: int, operand: Operand) -> int:
        match operand:
            case Integer(value):
                return value
            case Special(name):
                return lane if name == "%tid.x" else 7
            case Register(name):
                return self.shared.get(name, 0) if name in self.uniform.registers else self.own.get((lane, name), 0)
        raise AssertionError(operand)

    def holds(self, lane: int, instruction: Instruction) -> bool:
        guard = instruction.guard
        return guard is None or bool(self.get(lane, guard[0])) != guard[1]

    def execute(self, index: int, mask: set[int]) -> set[int]:
        """One instruction for the threads of `mask`; returns those that jump, or end."""
        instruction = self.kernel.instructions[index]
        going = {lane for lane in mask if self.holds(lane, instruction)}
        if instruction.guard is not None and index in self.uniform.branches:
            assert going in (set(), mask)
        results = {}
        for lane in mask:
            self.seen.setdefault(lane, []).append((index, lane in going))
        if instruction.opcode in ("bra", "ret"):
            return going
        destination, *sources = instruction.operands
        assert isinstance(destination, Register)
        for lane in going:
            a, *rest = (self.get(lane, source) for source in sources)
            results[lane] = _computed(instruction.opcode, a, *rest)
            self.seen[lane].append((a, *rest))
        for lane, value in results.items():
            self.own[lane, destination.name] = self.shared[destination.name] = value
        return set()

    def run(self, flow: Flow) -> bool:
        """By a stack: threads that part meet again at the immediate post-dominator. False: too many steps."""
        stack = [(0, len(self.kernel.instructions), set(self.lanes))]
        steps, ended = 0, set()
        while stack:
            index, meeting, mask = stack.pop()
            mask = mask - ended
            if index == meeting or not mask or index == len(self.kernel.instructions):
                continue
            if (steps := steps + 1) > FUEL:
                return False
            instruction, gone = self.kernel.instructions[index], self.execute(index, mask)
            if instruction.opcode == "ret":
                ended |= gone
                stack.append((index + 1, meeting, mask - gone))
            elif instruction.opcode == "bra" and gone and gone != mask:
                number = flow.reconvergence[flow.block_of(index)]
                end = len(self.kernel.instructions)
                point = flow.blocks[number].start if number != flow.exit else end
                stack.append((point, meeting, mask))
                stack.append((index + 1, point, mask - gone))
                stack.append((target(self.kernel, instruction), point, gone))
            else:
                stack.append((target(self.kernel, instruction) if gone else index + 1, meeting, mask))
        return True


def compare(seed: int) -> tuple[int, bool] | None:
    """How many registers are scalars, and whether threads went different ways; None for a kernel that does not end."""
    kernel = random_kernel(seed)
    flow = Flow(kernel)
    found = uniformity(flow)
    together = Threads(kernel, found, range(LANES))
    single = [Threads(kernel, Uniform(frozenset(), frozenset()), range(n, n + 1)) for n in range(LANES)]
    if not all(each.run(flow) for each in single) or not together.run(flow):
        return None
    for lane, each in enumerate(single):
        assert together.seen[lane] == each.seen[lane], seed
    ways = {tuple(step for step in each.seen[n] if len(step) == 2) for n, each in enumerate(single)}
    return len(found.registers), len(ways) > 1


def test_scalars_give_what_single_threads_compute():
    """A register that is called uniform may be one scalar, and a uniform branch sends all threads the same way."""
    compared = [found for seed in range(600) if (found := compare(seed)) is not None]
    assert len(compared) > 400 and sum(scalars for scalars, _ in compared) > len(compared)
    assert sum(apart for _, apart in compared) > 300


@pytest.mark.parametrize(
    ("name", "replaced"),
    [
        ("_going_on", lambda self, number: []),  # no region in which threads are apart
        ("_defined_once", lambda self, name: True),
        ("_defined_once", lambda self, name: len(self._definitions[name]) == 1),
        ("_divides", lambda self, instruction: False),
    ],
)
def test_without_one_of_the_rules_scalars_are_wrong(monkeypatch, name, replaced):
    monkeypatch.setattr(_Analysis, name, replaced)
    with pytest.raises(AssertionError):
        for seed in range(600):
            compare(seed)


UNIFORM = {  # the last register, for a block and a warp, with and without uniform loads
    "ld.param.b32 %r9, [a];": "bB wW",
    "mov.u32 %r9, %tid.x;": "",
    "mov.u32 %r1, %tid.x; shr.u32 %r9, %r1, 5;": "wW",
    "mov.u32 %r1, %tid.x; and.b32 %r9, %r1, 224;": "wW",
    "mov.u32 %r1, %tid.x; and.b32 %r9, %r1, 240;": "",
    "ld.param.b64 %rd1, [b]; ld.global.b32 %r9, [%rd1];": "BW",
    "mov.u32 %r1, %tid.x; ld.shared.b32 %r9, [%r1];": "",
    "mov.u32 %r1, %tid.x; mov.b32 %r2, -1; redux.sync.max.s32 %r9, %r1, %r2;": "wW",
    "mov.u32 %r1, %tid.x; redux.sync.max.s32 %r9, %r1, 15;": "",
    "mov.u32 %r1, %tid.x; shfl.sync.idx.b32 %r9, %r1, 0, 31, -1;": "wW",
    "mov.u32 %r1, %tid.x; shfl.sync.bfly.b32 %r9, %r1, 1, 31, -1;": "",
    "mov.u32 %r9, %clock;": "",
    "mov.u32 %r1, %tid.x; setp.eq.b32 %p1, %r1, 0; @%p1 mov.b32 %r9, 1;": "",
    "mov.u32 %r1, %tid.x; setp.eq.b32 %p1, %r1, 0; @%p1 bra L; mov.b32 %r9, 1; mov.b32 %r2, %r9; L:": "bBwW",
    "mov.u32 %r1, %tid.x; setp.eq.b32 %p1, %r1, 0; @%p1 bra L; mov.b32 %r9, 1; L: mov.b32 %r2, %r9;": "",
    "mov.u32 %r1, %tid.x; setp.eq.b32 %p1, %r1, 0; @%p1 bra L; ld.shared.b32 %r9, [0]; L:": "",
    "mov.u32 %r1, %tid.x; L: mov.u32 %r9, 0; setp.eq.b32 %p1, %r1, 0; @%p1 bra L; mov.b32 %r2, %r9;": "bBwW",
    "mov.u32 %r1, %tid.x; setp.eq.b32 %p1, %r1, 0; mov.b32 %r9, 2; @%p1 bra L; mov.b32 %r9, 1; L:": "",
    "mov.u32 %r1, %tid.x; setp.eq.b32 %p1, %r1, 0; @%p1 ret; mov.b32 %r2, 1; add.s32 %r9, %r2, 1;": "bBwW",
}


@pytest.mark.parametrize("body", UNIFORM)
def test_uniform_registers(body):
    flow = Flow(parse(module(f"{body} bar.sync 0; ret;", ".param .b32 a, .param .b64 b", ".reqntid 64")))
    kinds = {"b": ("block", False), "B": ("block", True), "w": ("warp", False), "W": ("warp", True)}
    found = {letter for letter, kind in kinds.items() if "%r9" in uniformity(flow, *kind).registers}
    assert found == set(UNIFORM[body]) - {" "}


def test_all_branches_of_a_shipped_kernel_are_uniform_in_a_warp():
    kernel = parsed(Variant("send_ll", "sm_90", "float32", world_size=2))
    flow = Flow(kernel)
    branches = {n for n, i in enumerate(kernel.instructions) if i.opcode in ("bra", "ret", "exit")}
    assert uniformity(flow, "warp", loads=True).branches == branches > uniformity(flow, "warp").branches


def test_the_lines_of_a_loop():
    files = '.file 1 "/a/k.py"\n'
    body = (
        ".loc 1 1 1\nmov.b32 %r1, 0;\nA:\n.loc 1 5 1\nmov.b32 %r1, 1;\nB: .loc 1 3 1\nbar.sync 0;\n@%p1 bra B; bra A;"
    )
    flow = Flow(parse(files + module(body)))
    inner, outer = flow.loops
    assert [s.line for s in flow.lines(inner)] == [3] and [s.line for s in flow.lines(outer)] == [3, 5]
    assert flow.loop_at(0) is None and flow.loop_at(1) == outer and flow.loop_at(2) == inner
    assert flow.loop_at(len(flow.kernel.instructions)) is None


def test_a_branch_through_a_table_is_refused():
    with pytest.raises(InvalidArgument, match="k, PTX line 7: 'brx.idx %r1, L;': branches through a table"):
        Flow(parse(module("brx.idx %r1, L; L: ret;")))
