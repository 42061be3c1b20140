"""Random instructions whose operands are literals, the same in all threads, steps from thread to thread, or loaded.

The machine computes with one number if it can, otherwise by the rule. The rule over arrays is the model, because
test_arithmetic_*.py compare it with Python's integers.
"""

import itertools
import random

import numpy as np
import pytest

from tests.explorer.ptx.arithmetic.arithmetic_cases import instruction, run
from tests.explorer.ptx.execution import handwritten

THREADS = 32
WIDTHS = (16, 32, 64)
COMPARISONS = ("eq", "ne", "lt", "le", "gt", "ge")
NAMES = {"pred": "%p", "b16": "%rs", "b32": "%r", "b64": "%rd"}
STRIDES = (1, 2, 4, 8, -1, -4, 3, 16, 256, -256)


def forms():
    """(name, destination, sources)"""
    for bits, letter in itertools.product(WIDTHS, "us"):
        kind, word = f"{letter}{bits}", f"b{bits}"
        yield from ((f"{name}.{kind}", word, (word, word)) for name in ("add", "sub", "mul.lo", "mul.hi", "min", "max"))
        yield from ((f"{name}.{kind}", word, (word, word)) for name in ("div", "rem"))
        yield f"mad.lo.{kind}", word, (word, word, word)
        yield f"shr.{kind}", word, (word, "b32")
        for name in COMPARISONS + (("lo", "ls", "hi", "hs") if letter == "u" else ()):
            yield f"setp.{name}.{kind}", "pred", (word, word)
        if letter == "s":
            yield f"neg.{kind}", word, (word,)
            yield f"abs.{kind}", word, (word,)
        if bits < 64:
            yield f"mul.wide.{kind}", f"b{2 * bits}", (word, word)
            yield f"mad.wide.{kind}", f"b{2 * bits}", (word, word, f"b{2 * bits}")
    for bits in WIDTHS:
        word = f"b{bits}"
        yield from ((f"{name}.{word}", word, (word, word)) for name in ("and", "or", "xor"))
        yield from ((f"{name}.{word}", word, (word,)) for name in ("not", "mov"))
        yield f"shl.{word}", word, (word, "b32")
        yield f"selp.{word}", word, (word, word, "pred")
    for name in ("and", "or", "xor"):
        yield f"{name}.pred", "pred", ("pred", "pred")
    yield "not.pred", "pred", ("pred",)
    yield "prmt.b32", "b32", ("b32", "b32", "b32")
    yield "bfe.s64", "b64", ("b64", "b32", "b32")
    for to, of in itertools.product(("u8", "s8", "u16", "s16", "u32", "s32", "u64", "s64"), repeat=2):
        for target, source in itertools.product(WIDTHS, WIDTHS):
            if target >= int(to[1:]) and source >= int(of[1:]):
                yield f"cvt.{to}.{of}", f"b{target}", (f"b{source}",)


FORMS = list(forms())


def float_forms():
    """Of halves alone and in pairs, floats and doubles (of which a NaN has the host's bits: no sums)."""
    for kind, bits in (("f16", 16), ("bf16", 16), ("f16x2", 32), ("bf16x2", 32), ("f32", 32), ("f64", 64)):
        word, flags = f"b{bits}", ("", ".ftz") if kind in ("f16", "f16x2", "f32") else ("",)
        for name, flag in itertools.product(("neg", "abs"), flags):
            yield f"{name}{flag}.{kind}", word, (word,)
        if bits < 64:
            for name in ("add", "sub", "mul", "min", "max", "min.NaN", "max.NaN"):
                yield f"{name}.{kind}", word, (word, word)
            yield f"fma.rn.{kind}", word, (word, word, word)


class Trial:
    """PTX that makes the operands, and the value of each by thread."""

    def __init__(self, chance, form, origins=("same", "steps", "loaded", "literal")):
        self.random, (self.name, self.target, self.kinds), self.origins = chance, form, origins
        self.lines = ["mov.u32 %r0, %tid.x;", "cvt.u64.u32 %rd20, %r0;", "cvt.u16.u32 %rs0, %r0;"]
        self.lines.append("shl.b64 %rd21, %rd20, 3;")
        self.arguments, self.values, self.operands = [], [], []
        for n, kind in enumerate(self.kinds):
            self.add_operand(n, kind)

    def number(self, bits):
        special = (0, 1, 2, 31, 32, 64, (1 << bits) - 1, 1 << bits - 1, (1 << bits - 1) - 1)
        random_ones = (self.random.getrandbits(bits), self.random.getrandbits(8), self.random.getrandbits(5) << 8)
        return self.random.choice((*special, *random_ones, -self.random.getrandbits(5))) & (1 << bits) - 1

    def add_operand(self, n, kind):
        origin = self.random.choice(self.origins)
        if kind == "pred":
            limit = self.random.choice((0, 7, THREADS))
            self.lines.append(f"setp.lt.u32 %p{n}, %r0, {limit};")
            self.keep(f"%p{n}", [t < limit for t in range(THREADS)], 0)
            return
        bits = int(kind[1:])
        register = f"{NAMES[kind]}{(30 if bits > 16 else 18) + n}"
        narrow = f"mov.b64 {register}" if bits == 64 else f"cvt.u{bits}.u64 {register}"
        if origin == "literal" and len(self.kinds) > 1:
            value = self.number(bits)
            self.keep(str(value - (1 << bits) if value >> bits - 1 else value), [value] * THREADS, 0)
        elif origin == "loaded":
            values = [self.number(bits) for _ in range(THREADS)]
            self.lines += [f"add.s64 %rd22, %rd{n}, %rd21;", "ld.global.b64 %rd23, [%rd22];", f"{narrow}, %rd23;"]
            self.keep(register, values, np.array(values, np.uint64))
        else:
            first, stride = self.number(bits), self.random.choice(STRIDES) if origin == "steps" else 0
            self.lines.append(f"{narrow}, %rd{n};")
            if stride:
                thread = {16: "%rs0", 32: "%r0", 64: "%rd20"}[bits]
                self.lines.append(f"mad.lo.s{bits} {register}, {thread}, {stride}, {register};")
            self.keep(register, [first + stride * t & (1 << bits) - 1 for t in range(THREADS)], first)

    def keep(self, operand, values, argument):
        self.operands.append(operand)
        self.values.append([int(value) for value in values])
        self.arguments.append(argument)

    def results(self, unit):
        """By the machine, and by the rule."""
        target = "%p20" if self.target == "pred" else f"{NAMES[self.target]}{26 if self.target == 'b16' else 40}"
        text = f"{self.name} {target}, {', '.join(self.operands)}"
        word = {"pred": "selp.b64 %rd25, 1, 0, ", "b64": "mov.b64 %rd25, "}.get(self.target)
        word = word or f"cvt.u64.u{self.target[1:]} %rd25, "
        out, last = np.zeros(THREADS, np.uint64), len(self.kinds)
        self.lines += [
            f"{text};",
            f"{word}{target};",
            f"add.s64 %rd26, %rd{last}, %rd21;",
            "st.global.b64 [%rd26], %rd25;",
        ]
        code = handwritten.kernel("\n".join(self.lines), last + 1)
        handwritten.run(code, [*self.arguments, out], threads=THREADS, unit=unit)
        registers = {o: k for o, k in zip(self.operands, self.kinds, strict=True) if o.startswith("%")}
        columns = [v for o, v in zip(self.operands, self.values, strict=True) if o.startswith("%")]
        rows = list(zip(*columns, strict=True)) if columns else [()] * THREADS
        return (
            text,
            out.tolist(),
            [row[0] for row in run(instruction(text, **registers, **{target: self.target}), rows)],
        )


@pytest.mark.parametrize("unit", ("warp", "block"))
@pytest.mark.parametrize("count", (150, pytest.param(3000, marks=pytest.mark.exhaustive)))
def test_the_result_of_an_instruction_does_not_depend_on_the_origin_of_its_operands(unit, count):
    chance = random.Random(count)
    for _ in range(count):
        text, result, expected = Trial(chance, chance.choice(FORMS)).results(unit)
        assert result == expected, text


@pytest.mark.parametrize("unit", ("warp", "block"))
def test_the_result_of_a_float_instruction_does_not_depend_on_the_origin_of_its_operands(unit):
    """A separate test, because the rule alone cannot combine a constant with halves, which have two values a lane."""
    chance = random.Random(5)
    for form, origins in itertools.product(float_forms(), (("same",), ("loaded",), ("same", "steps", "loaded"))):
        text, result, expected = Trial(chance, form, origins).results(unit)
        assert result == expected, text
