"""Element types, and their forms in a kernel: the integers that it moves, and the numbers that it reduces.

A kernel moves raw integers of the element's width, so a copy never interprets them. A reduction reads them as
`element`, and one operation may stand for another: a bool's sum is an or, a complex sum two real ones.
"""

from __future__ import annotations

from dataclasses import dataclass

from tricomm.errors import InvalidArgument

OPS = ("sum", "avg", "min", "max", "prod", "band", "bor", "bxor")
_ARITHMETIC, _BITWISE, _LINEAR = OPS[:5], OPS[5:], OPS[:2]
_OF_BOOL = {"sum": "bor", "max": "bor", "bor": "bor", "prod": "band", "min": "band", "band": "band", "bxor": "bxor"}


@dataclass(frozen=True)
class Dtype:
    """One type of torch's.

    `raw` is the integer that kernels load and store, `lanes` of them make an element (two for a complex number),
    `element` is the type that a reduction reads each as, `ops` are the operations that are defined.
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
    """(element, operation) that a kernel reduces by. Raises `InvalidArgument` with the list of those that are defined.

    Bitwise operations are the same for every type: they run on whole words.
    """
    if op not in dtype.ops:
        raise InvalidArgument(f"op {op!r} is not defined for {dtype.name}; there is {', '.join(dtype.ops)}")
    op = _OF_BOOL[op] if dtype.name == "bool" else op
    return ("int64" if op in _BITWISE else dtype.element), op
