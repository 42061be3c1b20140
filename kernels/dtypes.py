"""Element types, and their forms in a kernel: the integers that it moves, and the numbers that it reduces.

A kernel moves raw integers of the element's width, so a copy never interprets them. A reduction reads them as
`element`, and may use another operation: the sum of bools is an or, a complex sum is two real sums.
"""

from __future__ import annotations

from dataclasses import dataclass

from tricomm.errors import InvalidArgument

OPS = ("sum", "avg", "min", "max", "prod", "band", "bor", "bxor")
_ARITHMETIC, _BITWISE, _LINEAR = OPS[:5], OPS[5:], OPS[:2]
_OF_BOOL = {"sum": "bor", "max": "bor", "bor": "bor", "prod": "band", "min": "band", "band": "band", "bxor": "bxor"}


@dataclass(frozen=True)
class Dtype:
    """One dtype of torch.

    `raw` is the integer type that kernels load and store; `lanes` of them make an element (two for a complex number).
    `element` is the type as which a reduction reads each of them, `ops` are the operations that are defined.
    """

    name: str
    bits: int
    lanes: int
    element: str
    ops: tuple[str, ...]

    @property
    def raw(self) -> str:
        return f"int{self.bits}"


def _real(name: str, bits: int, ops: tuple[str, ...]) -> Dtype:
    return Dtype(name, bits, 1, name, ops)


_ALL = (
    _real("float64", 64, _ARITHMETIC),
    _real("float32", 32, _ARITHMETIC),
    _real("float16", 16, _ARITHMETIC),
    _real("bfloat16", 16, _ARITHMETIC),
    _real("float8_e4m3fn", 8, _ARITHMETIC),
    _real("float8_e5m2", 8, _ARITHMETIC),
    _real("int64", 64, OPS),
    _real("int32", 32, OPS),
    _real("int16", 16, OPS),
    _real("int8", 8, OPS),
    _real("uint8", 8, OPS),
    Dtype("bool", 8, 1, "int8", tuple(op for op in OPS if op in _OF_BOOL)),
    Dtype("complex64", 32, 2, "float32", _LINEAR),
    Dtype("complex128", 64, 2, "float64", _LINEAR),
)
DTYPES = {dtype.name: dtype for dtype in _ALL}


def reduction(dtype: Dtype, op: str) -> tuple[str, str]:
    """(element type, operation) of a kernel that reduces `dtype` by `op`. Raises `InvalidArgument`, which lists the
    operations that are defined.

    Bitwise operations run on whole words, so they are the same for every type.
    """
    if op not in dtype.ops:
        raise InvalidArgument(f"op {op!r} is not defined for {dtype.name}; there is {', '.join(dtype.ops)}")
    op = _OF_BOOL[op] if dtype.name == "bool" else op
    return ("int64" if op in _BITWISE else dtype.element), op
