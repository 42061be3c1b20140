"""The error of a quantised all-reduce, for the table of docs/algorithms.md: mean error over mean magnitude of the sum.

    PYTHONPATH=. python -m devtools.wire_error [ranks]

It is computed by the documented arithmetic (`tricomm.kernels.reference`), to which the kernels are equal to the bit.
Inputs are normal numbers, heavy tails (Student's t with two degrees of freedom), and normal numbers with one outlier of
100 in each block of 128.
"""

from __future__ import annotations

import sys

import torch

from tricomm.kernels import reference
from tricomm.kernels.collectives.registry import WIRES

_ELEMENTS = 1 << 20


def inputs(kind: str, ranks: int, elements: int = _ELEMENTS) -> list[torch.Tensor]:
    """Each rank's numbers, fp32: `normal`, `heavy` or `outlier`."""
    torch.manual_seed(1)
    if kind == "heavy":
        return list(torch.distributions.StudentT(torch.tensor(2.0)).sample((ranks, elements)))
    numbers = torch.randn(ranks, elements)
    if kind == "outlier":
        places = torch.randint(128, (ranks, elements // 128, 1))
        numbers.view(ranks, -1, 128).scatter_(2, places, 100.0)
    return list(numbers)


def error(kind: str, wire: str, ranks: int, elements: int = _ELEMENTS) -> float:
    """Mean error divided by mean magnitude."""
    parts = inputs(kind, ranks, elements)
    exact = torch.stack(parts).double().sum(0)
    return float((reference.quantised(wire, "sum", parts) - exact).abs().mean() / exact.abs().mean())


def main() -> None:
    ranks = int(sys.argv[1]) if len(sys.argv) > 1 else 8
    print(f"{ranks} ranks", *WIRES, sep="\t")
    for kind in ("normal", "heavy", "outlier"):
        print(kind, *(f"{error(kind, wire, ranks):.1%}" for wire in WIRES), sep="\t")


if __name__ == "__main__":
    main()
