"""Random integer programs: one number for all lanes, steps from lane to lane, and arrays give the same.

The model runs each thread on its own, over Python's integers.
"""

import operator
import random
from functools import partial

import numpy as np
import pytest

from tests.explorer.ptx.execution.handwritten import kernel, run

together = partial(zip, strict=True)
_32, _64 = (1 << 32) - 1, (1 << 64) - 1
COMPARE = {name: getattr(operator, name) for name in ("eq", "ne", "lt", "le", "gt", "ge")}


def signed(value, width):
    return value - (1 << width) if value >> (width - 1) else value


class Program:
    """The text of a random program, and the expected values of each register by thread."""

    def __init__(self, seed, threads, blocks):
        self.random = random.Random(seed)
        self.cases = [(t, b) for b in range(blocks) for t in range(threads)]
        self.text = ["mov.u32 %r0, %tid.x;", "mov.u32 %r1, %ctaid.x;", "ld.param.u32 %r2, [p1];"]
        self.words = {
            "%r0": [t for t, b in self.cases],
            "%r1": [b for t, b in self.cases],
            "%r2": [0xFFFFFFF0] * len(self.cases),
        }
        self.longs, self.predicates = {"%rd0": None}, {}
        del self.longs["%rd0"]

    def constant(self):
        numbers = [0, 1, 2, 3, 4, 5, 7, 8, 15, 16, 31, 32, 63, 64, 255, 256, 224, 4080, -1, -4, -32, -256, 1000]
        return self.random.choice(numbers)

    def pick(self, registers, width):
        """(operand, values)"""
        if registers and self.random.random() < 0.6:
            name = self.random.choice(list(registers)[-8:])
            return name, registers[name]
        value = self.constant()
        return str(value), [value & (1 << width) - 1] * len(self.cases)

    def step(self, n):
        wide = self.random.random() < 0.4 and self.longs
        width, kinds, registers = (64, "rd", self.longs) if wide else (32, "r", self.words)
        mask = (1 << width) - 1
        name = f"%{kinds}{n}"
        (a, x), (b, y), (c, z) = (self.pick(registers, width) for _ in range(3))
        what = self.random.choice(
            ["add", "sub", "mul", "mad", "and", "or", "xor", "shl", "shr", "cvt", "cvt", "wide", "madwide", "setp",
             "selp", "min", "max", "neg", "not", "narrow"]
        )  # fmt: skip
        s = self.random.choice("us")
        if what in ("add", "sub"):
            sign = 1 if what == "add" else -1
            values = [(p + sign * q) & mask for p, q in together(x, y)]
            self.keep(registers, name, f"{what}.{s}{width} {name}, {a}, {b};", values)
        elif what == "mul":
            values = [p * q & mask for p, q in together(x, y)]
            self.keep(registers, name, f"mul.lo.{s}{width} {name}, {a}, {b};", values)
        elif what == "mad":
            values = [(p * q + r) & mask for p, q, r in together(x, y, z)]
            self.keep(registers, name, f"mad.lo.{s}{width} {name}, {a}, {b}, {c};", values)
        elif what in ("and", "or", "xor"):
            f = {"and": int.__and__, "or": int.__or__, "xor": int.__xor__}[what]
            self.keep(registers, name, f"{what}.b{width} {name}, {a}, {b};", [f(p, q) for p, q in together(x, y)])
        elif what in ("shl", "shr"):
            k = self.random.choice([0, 1, 2, 3, 4, 5, 8, 31, 32, 40, 64])
            if what == "shl":
                values = [p << k & mask if k < width else 0 for p in x]
                self.keep(registers, name, f"shl.b{width} {name}, {a}, {k};", values)
            else:
                values = [(signed(p, width) if s == "s" else p) >> min(k, width) & mask for p in x]
                self.keep(registers, name, f"shr.{s}{width} {name}, {a}, {k};", values)
        elif what == "cvt":
            a, x = self.pick(self.words, 32)
            if a.startswith("%"):
                values = [(signed(p, 32) if s == "s" else p) & _64 for p in x]
                self.keep(self.longs, f"%rd{n}", f"cvt.{s}64.{s}32 %rd{n}, {a};", values)
        elif what == "narrow":
            a, x = self.pick(self.longs, 64)
            if a.startswith("%"):
                self.keep(self.words, f"%r{n}", f"cvt.u32.u64 %r{n}, {a};", [p & _32 for p in x])
        elif what in ("wide", "madwide"):
            (a, x), (b, y), (c, z) = self.pick(self.words, 32), self.pick(self.words, 32), self.pick(self.longs, 64)
            f = (lambda v: signed(v, 32)) if s == "s" else (lambda v: v)
            values = [f(p) * f(q) for p, q in together(x, y)]
            if what == "wide":
                self.keep(self.longs, f"%rd{n}", f"mul.wide.{s}32 %rd{n}, {a}, {b};", [v & _64 for v in values])
            else:
                values = [(v + r) & _64 for v, r in together(values, z)]
                self.keep(self.longs, f"%rd{n}", f"mad.wide.{s}32 %rd{n}, {a}, {b}, {c};", values)
        elif what == "setp":
            compare = self.random.choice(list(COMPARE))
            f = (lambda v: signed(v, width)) if s == "s" else (lambda v: v)
            self.predicates[f"%p{n}"] = [COMPARE[compare](f(p), f(q)) for p, q in together(x, y)]
            self.text.append(f"setp.{compare}.{s}{width} %p{n}, {a}, {b};")
            if self.random.random() < 0.4 and len(self.predicates) > 1:
                p, q = self.random.sample(list(self.predicates), 2)
                f = self.random.choice(["and", "or", "xor"])
                g = {"and": lambda i, j: i and j, "or": lambda i, j: i or j, "xor": lambda i, j: i != j}[f]
                self.text.append(f"{f}.pred %p{n}, {p}, {q};")
                self.predicates[f"%p{n}"] = [g(i, j) for i, j in together(self.predicates[p], self.predicates[q])]
        elif what == "selp" and self.predicates:
            p = self.random.choice(list(self.predicates))
            if self.random.random() < 0.3:
                a, b, x, y = "1", "0", [1] * len(x), [0] * len(y)
            values = [i if t else j for i, j, t in together(x, y, self.predicates[p])]
            self.keep(registers, name, f"selp.b{width} {name}, {a}, {b}, {p};", values)
        elif what in ("min", "max"):
            f = (lambda v: signed(v, width)) if s == "s" else (lambda v: v)
            g = min if what == "min" else max
            values = [g(f(p), f(q)) & mask for p, q in together(x, y)]
            self.keep(registers, name, f"{what}.{s}{width} {name}, {a}, {b};", values)
        elif what == "neg":
            self.keep(registers, name, f"neg.s{width} {name}, {a};", [-p & mask for p in x])
        elif what == "not":
            self.keep(registers, name, f"not.b{width} {name}, {a};", [~p & mask for p in x])

    def keep(self, registers, name, text, values):
        """Add an instruction, sometimes with a guard: threads whose guard is false keep the old value."""
        if self.predicates and self.random.random() < 0.15:
            p, negated = self.random.choice(list(self.predicates)), self.random.random() < 0.5
            old = registers.get(name)
            if old is None:
                old = [5] * len(values)
                self.text.append(f"mov.b{64 if registers is self.longs else 32} {name}, 5;")
            text = f"@{'!' if negated else ''}{p} {text}"
            values = [v if t != negated else o for v, o, t in together(values, old, self.predicates[p])]
        self.text.append(text)
        registers[name] = values

    def total(self):
        """All registers, mixed into one word a thread."""
        lines, result = ["mov.b64 %rd60, 0;"], [0] * len(self.cases)
        for name, values in [*self.words.items(), *self.longs.items()]:
            source = name
            if not name.startswith("%rd"):
                lines.append(f"cvt.u64.u32 %rd61, {name};")
                source = "%rd61"
            lines.append(f"mad.lo.s64 %rd60, %rd60, 1000003, {source};")
            result = [(r * 1000003 + v) & _64 for r, v in together(result, values)]
        return lines, result


@pytest.mark.parametrize("kind, bits", [("s8", 0xFFFFFFF2), ("u8", 0xF2), ("s16", 0xFFFF80F2), ("u16", 0x80F2)])
def test_a_narrow_result_is_extended_to_its_register(kind, bits):
    out = np.zeros(2, "u4")
    body = f"""ld.param.u32 %r4, [p1]; cvt.{kind}.u32 %r1, %r4; mov.u32 %r2, %tid.x; add.u32 %r2, %r2, 0x780F2;
        cvt.{kind}.u32 %r3, %r2;"""
    guard = "setp.eq.u32 %p0, %r2, 0x780F2; st.global.u32 [%rd0], %r1; @%p0 st.global.u32 [%rd0+4], %r3;"
    run(kernel(body + guard, 2), [out, 0x780F2])
    assert out.tolist() == [bits, bits]


@pytest.mark.parametrize("unit", ["warp", "block"])
@pytest.mark.parametrize("apart", [False, True], ids=["together", "apart"])
@pytest.mark.parametrize("first", [0, *(pytest.param(n, marks=pytest.mark.exhaustive) for n in range(6, 120, 6))])
def test_random_programs(first, apart, unit):
    for seed in range(first, first + 6):
        program = Program(seed, threads=80, blocks=2)
        for n in range(3, 31):
            program.step(n)
        lines, expected = program.total()
        body = [*program.text, *lines]
        if apart:  # lanes 0, 3, 6, ... first, then the others
            body = [
                "mov.u32 %r60, %tid.x; rem.u32 %r61, %r60, 3; setp.eq.u32 %p31, %r61, 0; @%p31 bra go;",
                *body,
                "bra behind; go:",
                *body,
                "behind:",
            ]
        store = """mov.u32 %r60, %tid.x; mov.u32 %r61, %ctaid.x; mad.lo.u32 %r60, %r61, 80, %r60;
            mad.wide.u32 %rd62, %r60, 8, %rd0; st.global.b64 [%rd62], %rd60;"""
        out = np.zeros(160, "u8")
        try:
            run(kernel("\n".join([*body, store]), 2), [out, 0xFFFFFFF0], 80, blocks=2, unit=unit)
        except Exception as error:
            raise AssertionError(f"seed {seed}") from error
        assert out.tolist() == expected, f"seed {seed}"
