"""Random structured programs, with branches, loops and exits that differ by lane, against each thread on its own."""

import random

import numpy as np
import pytest

from tests.explorer.ptx.execution.handwritten import kernel, run

_MASK = (1 << 32) - 1
THREADS, BLOCKS, REGISTERS = 48, 2, 6


class Flow:
    """A program as nested lists, its PTX, and its result for a thread."""

    def __init__(self, seed):
        self.random = random.Random(seed)
        self.labels = self.loops = 0
        self.body = self.block(3)

    def block(self, depth):
        return [self.statement(depth) for _ in range(self.random.randint(1, 4))]

    def statement(self, depth):
        kind = self.random.random()
        a, b, c = (self.random.randrange(REGISTERS) for _ in range(3))
        if depth == 0 or kind < 0.4:
            return ("set", a, b, c, self.random.choice(["add", "xor", "mul", "const", "guarded"]))
        if kind < 0.65:
            return ("if", a, self.random.choice([1, 2, 4, 6, 16]), self.block(depth - 1), self.block(depth - 1))
        if kind < 0.9:
            return ("loop", a, self.random.choice([1, 3]), self.block(depth - 1))
        if kind < 0.93:
            return ("exit", a, 31)
        return ("barrier",) if depth == 3 else ("set", a, b, c, "add")

    def text(self, body, lines):
        for statement in body:
            getattr(self, f"_{statement[0]}")(lines, *statement[1:])
        return lines

    def _set(self, lines, a, b, c, op):
        d, x, y = f"%r{10 + a}", f"%r{10 + b}", f"%r{10 + c}"
        lines.append(
            {
                "add": f"add.u32 {d}, {x}, {y};",
                "xor": f"xor.b32 {d}, {x}, {y};",
                "mul": f"mul.lo.u32 {d}, {x}, 5;",
                "const": f"mov.u32 {d}, {7 * b + c};",
                "guarded": f"and.b32 %r30, {x}, 2; setp.ne.u32 %p1, %r30, 0; @%p1 add.u32 {d}, {y}, 3;",
            }[op]
        )

    def _if(self, lines, a, bits, yes, no):
        self.labels += 1
        n = self.labels
        lines.append(f"and.b32 %r31, %r{10 + a}, {bits}; setp.eq.u32 %p2, %r31, 0; @%p2 bra no{n};")
        self.text(yes, lines)
        lines.append(f"bra end{n}; no{n}:")
        self.text(no, lines)
        lines.append(f"end{n}:")

    def _loop(self, lines, a, bits, body):
        self.labels += 1
        self.loops += 1
        n, counter = self.labels, f"%r{32 + self.loops}"
        lines.append(f"and.b32 {counter}, %r{10 + a}, {bits}; more{n}: setp.eq.u32 %p3, {counter}, 0; @%p3 bra out{n};")
        lines.append(f"sub.u32 {counter}, {counter}, 1;")
        self.text(body, lines)
        lines.append(f"bra more{n}; out{n}:")

    def _exit(self, lines, a, bits):
        lines.append(f"and.b32 %r31, %r{10 + a}, {bits}; setp.eq.u32 %p4, %r31, 9; @%p4 ret;")

    def _barrier(self, lines):
        lines.append("bar.sync 0;")

    def follow(self, body, registers):
        """False if the thread has ended."""
        for kind, *rest in body:
            if kind == "set":
                a, b, c, op = rest
                x, y = registers[b], registers[c]
                if op == "guarded":
                    registers[a] = y + 3 & _MASK if x & 2 else registers[a]
                else:
                    registers[a] = {"add": x + y, "xor": x ^ y, "mul": x * 5, "const": 7 * b + c}[op] & _MASK
            elif kind == "if":
                a, bits, yes, no = rest
                if not self.follow(yes if registers[a] & bits else no, registers):
                    return False
            elif kind == "loop":
                a, bits, inner = rest
                if not all(self.follow(inner, registers) for _ in range(registers[a] & bits)):
                    return False
            elif kind == "exit" and registers[rest[0]] & rest[1] == 9:
                return False
        return True


SEEDS = [0, *(pytest.param(n, marks=pytest.mark.exhaustive) for n in range(10, 400, 10))]


@pytest.mark.parametrize("unit", ["warp", "block"])
@pytest.mark.parametrize("first", SEEDS)
def test_random_flow(first, unit):
    for seed in range(first, first + 10):
        flow = Flow(seed)
        lines = flow.text(flow.body, [])
        start = "".join(f"add.u32 %r{10 + n}, %r{(0, 1, 3)[n % 3]}, {n};" for n in range(REGISTERS))
        mixed = "".join(f"mad.lo.u32 %r5, %r5, 31, %r{10 + n};" for n in range(REGISTERS))
        text = f"""mov.u32 %r0, %tid.x; mov.u32 %r1, %ctaid.x; mov.u32 %r3, 0; {start} {" ".join(lines)}
            mov.u32 %r5, 1; {mixed} mov.u32 %r6, %tid.x; mov.u32 %r7, %ctaid.x; mad.lo.u32 %r6, %r7, {THREADS}, %r6;
            mul.wide.u32 %rd9, %r6, 4; add.s64 %rd10, %rd0, %rd9; st.global.u32 [%rd10], %r5;"""
        expected = []
        for block in range(BLOCKS):
            for thread in range(THREADS):
                registers = [(thread, block, 0)[n % 3] + n for n in range(REGISTERS)]
                total = 1
                if not flow.follow(flow.body, registers):
                    total = 0xDEAD
                else:
                    for value in registers:
                        total = total * 31 + value & _MASK
                expected.append(total)
        out = np.full(THREADS * BLOCKS, 0xDEAD, "u4")
        run(kernel(text), [out], THREADS, blocks=BLOCKS, unit=unit)
        assert out.tolist() == expected, f"seed {seed}"
