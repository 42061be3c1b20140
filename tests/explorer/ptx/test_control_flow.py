"""Reconvergence points, loops and liveness compared with their definitions, on random kernels."""

import random

import pytest

from tests.explorer.ptx.texts import module
from tricomm.errors import InvalidArgument
from tricomm.explorer.ptx.analysis.control_flow import Flow, reachable, target
from tricomm.explorer.ptx.analysis.liveness import Liveness, read, written
from tricomm.explorer.ptx.instructions import PtxKernel
from tricomm.explorer.ptx.text.parser import parse

SEEDS = range(60)


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
            choices = [
                f"mov.u32 {a}, {pick.randint(0, 3)};",
                f"add.s32 {a}, {c}, {pick.choice([b, '1', '2'])};",
                f"selp.b32 {a}, {c}, {b}, {q};",
                f"setp.lt.s32 {p}, {c}, {b};",
            ]
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
    """A register is live if on some path it is read before an unconditional write."""
    kernel = random_kernel(seed)
    flow = Flow(kernel)
    live, code = Liveness(flow), kernel.instructions

    def ways(index: int) -> list[int]:
        instruction = code[index]
        on = [] if instruction.opcode in ("bra", "ret") and instruction.guard is None else [index + 1]
        return [*on, target(kernel, instruction)] if instruction.opcode == "bra" else on

    for name in kernel.registers:
        for start in range(len(code)):
            seen, pending, result = {start}, [start], False
            while pending and not result:
                index = pending.pop()
                if index < len(code):
                    result = name in read(code[index])
                    ends = name in written(code[index]) and code[index].guard is None
                    new = [] if ends else [n for n in ways(index) if n not in seen]
                    seen.update(new)
                    pending += new
            assert (name in live.before(start)) == result


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
