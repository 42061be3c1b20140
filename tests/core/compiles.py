"""Counts the kernels that a test compiles."""

from __future__ import annotations

from typing import Any

import pytest

from tricomm.kernels.launch import compiler, cuda_launcher


def counted(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Empty the caches of compiled kernels. The list that is returned gets the name of each kernel compiled later."""
    for known in ("_compiled", "_loaded"):
        monkeypatch.setattr(cuda_launcher, known, {})
    names: list[str] = []
    compile_kernel = compiler.compile_kernel

    def compile_it(kernel: Any, *variant: Any) -> Any:
        names.append(kernel.fn.__name__)
        return compile_kernel(kernel, *variant)

    monkeypatch.setattr(compiler, "compile_kernel", compile_it)
    return names
