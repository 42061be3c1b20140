"""The division of a plain-data call into chunks, on the device and by the host, which chooses the grid."""

import torch
import triton
import triton.language as tl
from hypothesis import given, settings
from hypothesis import strategies as st

from tricomm.kernels import layout
from tricomm.kernels.device import chunks
from tricomm.kernels.launch import interpreter


@triton.jit
def _divide(out_ptr, count: tl.int64, room: tl.int64, UNIT: tl.constexpr):
    number, words = chunks.alike(count.to(tl.int64), room.to(tl.int64), UNIT)  # the interpreter narrows them
    tl.store(out_ptr, number)
    tl.store(out_ptr + 1, words)


def on_the_device(count: int, room: int, unit: int) -> tuple[int, int]:
    out = torch.full((2,), -77)
    interpreter.interpret(interpreter.programs(_divide, (1,), (out, count, room), {"UNIT": unit}))
    return tuple(out.tolist())


@settings(deadline=None)
@given(st.integers(0, 1 << 40), st.integers(1, 300), st.sampled_from([16, 24, 128, 4096, 3 * 8192]))
def test_chunks_are_as_few_as_fit_and_equally_long(count, units, unit):
    room = units * unit
    number, words = layout.alike(count, room, unit)
    assert on_the_device(count, room, unit) == (number, words)
    assert number == -(-count // room) and words <= room and words % unit == 0
    if number > 1:
        assert (number - 1) * words < count <= number * words, "the last chunk is not empty and not too long"
        assert (words - unit) * number < count, "no chunk could be shorter"
    else:
        assert words == room


def test_two_chunks_of_nine_megabytes_are_halves():
    room = layout.plan(8, 64 << 20).buffer_words("two_shot", "simple", "all_reduce") * 8
    assert 8 << 20 < 8 * room < 9 << 20
    assert on_the_device(9 << 17, room, 4096) == (2, 9 << 16)
