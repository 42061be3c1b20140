"""Code from Triton's cache names the files of this process, not of the one that compiled it."""

import gc
import importlib.util
from types import SimpleNamespace

import pytest
import torch
import triton

from tricomm.kernels.launch import compiler, jit_dispatch

_HELPER = """import triton
import triton.language as tl

@triton.jit
def add(a, b):
    return a + b * 3
"""
_KERNEL = """import {helper} as helper
import triton
import triton.language as tl

@triton.jit
def outer(x_ptr):
    lane = tl.arange(0, 32)
    a = tl.load(x_ptr + lane)
    tl.store(x_ptr + lane, helper.add(a, tl.sum(a)))
"""


@pytest.fixture
def compiled_in(tmp_path, monkeypatch):
    """The same two files in a folder, imported from there, and their kernel compiled."""

    def imported(folder, name, text):
        file = tmp_path / folder / f"{name}.py"
        file.parent.mkdir(exist_ok=True)
        file.write_text(text)
        spec = importlib.util.spec_from_file_location(name, file)
        module = importlib.util.module_from_spec(spec)
        monkeypatch.setitem(__import__("sys").modules, name, module)
        spec.loader.exec_module(module)
        return module

    def compile_(folder):
        imported(folder, "paths_helper", _HELPER)
        kernel = imported(folder, "paths_kernel", _KERNEL.format(helper="paths_helper")).outer
        made, _, _ = jit_dispatch.compile_for(kernel, (torch.zeros(32, dtype=torch.int32),), {}, 90)
        return made

    with triton.knobs.cache.scope():
        triton.knobs.cache.dir = str(tmp_path / "cache")
        yield compile_


def test_a_kernel_from_the_cache_names_the_files_that_it_was_imported_from(compiled_in, tmp_path):
    first, second = compiled_in("one"), compiled_in("two")
    helper, kernel = tmp_path / "one/paths_helper.py", tmp_path / "one/paths_kernel.py"
    assert f'"{helper}"' in first.asm["ptx"] and f'"{kernel}"' in first.asm["ptx"]
    assert second.asm["ptx"] == first.asm["ptx"], "the second kernel was not taken from the cache"
    text = compiler.ptx_of(second.asm["cubin"])
    assert f'"{tmp_path / "two/paths_helper.py"}"' in text and f'"{tmp_path / "two/paths_kernel.py"}"' in text
    assert str(tmp_path / "one") not in text.split(".section")[0]
    ttgir = compiler.ttgir_text(second)
    assert f'loc("{tmp_path / "two/paths_helper.py"}":' in ttgir and str(tmp_path / "one") not in ttgir


def test_nothing_but_the_paths_of_files_changes(compiled_in):
    made = compiled_in("only")
    assert compiler.ptx_text(made) == made.asm["ptx"]
    moved = made.asm["ptx"].replace(f'"{triton.__path__[0]}', '"/gone/triton')
    assert moved != made.asm["ptx"], "no file of Triton's own is in it"
    assert compiler.with_present_files(moved, made.src.fn) == made.asm["ptx"]
    assert compiler.ttgir_text(made) == made.asm["ttgir"]


def test_paths_of_files_that_are_no_kernels_are_unchanged(compiled_in):
    made = compiled_in("stays")
    foreign = '.file\t9 "/elsewhere/generated.py"\n' + made.asm["ptx"]
    assert compiler.with_present_files(foreign, made.src.fn) == foreign


@pytest.mark.parametrize("gone", [0, 1])
def test_the_ptx_of_a_cubin_is_known_as_long_as_one_kernel_of_it_is_alive(compiled_in, gone):
    once = compiled_in("only")
    cubin = b"assembled twice"
    made = [
        compiler.noted(SimpleNamespace(asm={"cubin": cubin, "ptx": once.asm["ptx"]}, src=once.src)) for _ in range(2)
    ]
    for which in (gone, 0):
        assert compiler.ptx_of(cubin) == once.asm["ptx"]
        made.pop(which)
        gc.collect()
    assert compiler.ptx_of(cubin) is None
