"""The shortcuts give the results of Triton's own functions."""

import itertools

import numpy as np
import pytest
import triton.language as tl
from triton.runtime import interpreter as _triton

from tricomm.kernels.launch import interpreter, triton_adapter, triton_shortcuts

INTEGERS = (tl.int1, tl.int8, tl.uint8, tl.int16, tl.int32, tl.uint32, tl.int64, tl.uint64)
SCALARS = (*INTEGERS, tl.float16, tl.bfloat16, tl.float32, tl.float64, tl.float8e5, tl.float8e4nv)
POINTER = tl.pointer_type(tl.int32)


@pytest.fixture
def pairs():
    """Name of each patch -> (Triton's function, the shortcut)."""
    return {name: (old, new) for _, name, old, new in triton_shortcuts.changes()}


def test_numpy_types(pairs):
    own, short = pairs["_get_np_dtype"]
    kinds = (*SCALARS, POINTER, *(tl.block_type(kind, [4]) for kind in (*SCALARS, POINTER)))
    for kind in kinds * 2:
        assert short(kind) == own(kind)


@pytest.mark.parametrize("shape", [[4], [2, 8], [tl.constexpr(16)], tl.tuple([4, 1])], ids=str)
def test_types_and_tensors_of_a_shape(pairs, shape):
    triton_adapter.patch()  # the shortcuts of both classes have one name
    try:
        made = [tl.tensor(None, tl.block_type(tl.float32, shape)) for _ in range(2)]
    finally:
        triton_adapter.restore()
    own = tl.tensor(None, tl.block_type(tl.float32, shape))
    for tensor in made:
        assert tensor.type == own.type and tensor.type.name == own.type.name
        assert tensor.type.numel == own.type.numel and tensor.numel.value == own.numel.value
        assert [size.value for size in tensor.shape] == [size.value for size in own.shape]
    assert made[0].shape is made[1].shape and made[0].shape is not own.shape


VALUES = (0, 1, -1, 2**31, -(2**40), True, 1.5, -0.0)


def operand(kind, shape):
    count = int(np.prod(shape))
    width = np.uint64 if kind.is_ptr() else _triton._get_np_dtype(kind)
    data = (np.arange(count) % 2).astype(width).reshape(shape or [1])
    return tl.tensor(_triton.TensorHandle(data, kind), tl.block_type(kind, shape) if shape else kind)


@pytest.mark.parametrize("how", [(), (True, True), (False, False, False), (False, False, True, True)])
def test_operands_of_an_operation(how):
    """Tensors of each pair of types, of one shape and of two, and numbers; the second result is a cached one."""
    triton_adapter.patch()
    try:
        semantic = _triton.interpreter_semantic
        changed = type(semantic).binary_op_type_checking_impl
        own = next(old for _, name, old, _ in triton_shortcuts.changes() if name == "binary_op_type_checking_impl")
        tensors = [operand(kind, shape) for kind in (*SCALARS, POINTER) for shape in ([], [4])]
        tensors.append(operand(tl.int32, [2, 4]))
        for left, right in itertools.product(tensors, (*tensors, *VALUES)):
            for pair in ((left, right), (right, left)):
                expected = described(own, semantic, *pair, *how)
                assert described(changed, semantic, *pair, *how) == expected
                assert described(changed, semantic, *pair, *how) == expected
    finally:
        triton_adapter.restore()


def described(function, semantic, left, right, *how):
    try:
        result = function(semantic, left, right, *how)
    except Exception as error:
        return type(error), str(error)
    return [(x.type.name, x.handle.data.dtype, x.handle.data.tobytes(), x is left or x is right) for x in result]


def test_a_cached_number_is_read_only():
    triton_adapter.patch()
    try:
        # One that no kernel has: before Triton 3.8 a shift by a number gives that number a copy, which can be written.
        _, kept = _triton.interpreter_semantic.binary_op_type_checking_impl(operand(tl.int32, [4]), 987654)
    finally:
        triton_adapter.restore()
    with pytest.raises(ValueError, match="read-only"):
        kept.handle.data[0] = 2


def test_operations_are_called_without_wrappers():
    triton_adapter.patch()
    try:
        short = tl.core.load
    finally:
        triton_adapter.restore()
    assert "function" in short.__code__.co_freevars, "this Triton puts other functions around its operations"


@pytest.mark.parametrize("shape", [[3], [0], [1 << 21], [], (4,)], ids=str)
def test_a_shape_is_refused_each_time_if_triton_refuses_it(shape):
    def refused():
        try:
            tl.block_type(tl.int32, shape)
        except (ValueError, TypeError, AssertionError) as error:
            return type(error)
        return None

    own = refused()
    assert own is not None or shape == [0], "Triton 3.6 and 3.7 take an empty shape"
    for _ in range(2):
        triton_adapter.patch()
        try:
            assert refused() == own
        finally:
            triton_adapter.restore()


def test_tritons_functions_are_restored_afterwards():
    before = [(owner, name, old) for owner, name, old, _ in triton_shortcuts.changes()]
    triton_adapter.patch()
    changed = [getattr(owner, name) is not old for owner, name, old in before]
    triton_adapter.restore()
    assert all(changed) and interpreter.supported() is None
    assert all(getattr(owner, name) is old for owner, name, old in before)


def test_integers_wrap_without_the_check_for_overflow():
    triton_adapter.patch()
    try:
        semantic = _triton.interpreter_semantic
        with np.errstate(all="ignore"):
            total = semantic.add(semantic.to_tensor(2**31 - 1), semantic.to_tensor(1), True)
    finally:
        triton_adapter.restore()
    assert total.handle.data.tolist() == [-(2**31)] and total.dtype == tl.int32
