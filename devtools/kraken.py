"""Compares the instructions of tricomm's all-reduce loops over symmetric memory with kraken's equivalent kernels.

    python -m devtools.kraken DIR        DIR: a checkout of github.com/meta-pytorch/kraken, never committed

Kraken's two all-reduce kernels are compiled as ours are (8 warps, 16 bytes a thread, 8 ranks, no fused multiply-add),
always with fp32 accumulation. No GPU is needed, because kraken's own set-up is not run.
"""

from __future__ import annotations

import importlib.util
import sys
import tempfile
from pathlib import Path
from types import ModuleType
from typing import Any

import click

from tricomm.errors import InvalidArgument
from tricomm.kernels.launch.compiler import COMPILE_OPTIONS
from tricomm.perf.machine_code import accesses as code
from tricomm.perf.machine_code import kernel_report, steady_loop
from tricomm.perf.machine_code.kernel_report import Variant

# The result of `measured` for kraken's commit 90a24c2 with Triton 3.9.
INSTRUCTIONS = {"one_shot": 203, "two_shot": 231}
_WORLD_SIZE, _BLOCK = 8, 2048
_FOLDERS = ("kraken", "kraken.comm")
_ONE_SHOT = {"buf_tuple": ("*bf16",) * _WORLD_SIZE, "signal_pad_ptrs": "*i64", "output_ptr": "*bf16"}
_TWO_SHOT = {
    "symm_mem_buffer_ptrs": "i64",
    "symm_mem_signal_pad_ptrs": "i64",
    "input_ptr": "*bf16",
    "output_ptr": "*bf16",
    "numel": "i32",
}
# fp32 where kraken's one-shot kernel accumulates in bf16.
_WIDER = (
    ("acc = tl.zeros((BLOCK_SIZE,), dtype=tl.bfloat16)", "acc = tl.zeros((BLOCK_SIZE,), dtype=tl.float32)"),
    ("x = tl.load(buffer_rank + offsets, mask=mask)", "x = tl.load(buffer_rank + offsets, mask=mask).to(tl.float32)"),
)


@click.command()
@click.argument("folder", type=click.Path(path_type=Path))
def main(folder: Path) -> None:
    """Print the instructions per 16 bytes, ours and kraken's."""
    try:
        theirs = measured(folder)
    except InvalidArgument as error:
        raise click.UsageError(str(error)) from None
    for name, number in theirs.items():
        kernel = f"all_reduce_{name}_zero_copy"
        ours = kernel_report.examine(Variant(kernel, "sm_90")).steady
        click.echo(
            f"{name}: tricomm {ours}, kraken {number}, {ours / number:.2f} of it ({kernel}, bf16, 8 ranks, sm_90)"
        )


def measured(folder: Path) -> dict[str, int]:
    """Instructions per 16 bytes in kraken's largest loops, which read the peers' memory.

    Raises `InvalidArgument` if `folder` is no checkout, or one with other kernels.
    """
    source = folder / "kraken" / "comm" / "one_shot_all_reduce.py"
    if not source.exists():
        raise InvalidArgument(f"{folder} is no checkout of kraken: it has no kraken/comm/one_shot_all_reduce.py")
    _packages(folder)
    try:
        one = _wider(source)
        two = importlib.import_module("kraken.comm.two_shot_all_reduce")
        kernels = one["one_shot_all_reduce_kernel"], two.two_shot_all_reduce_kernel
    except (KeyError, AttributeError, ImportError) as error:
        raise InvalidArgument(f"{folder}: this kraken has other kernels than those known here: {error}") from error
    shape = {"rank": 3, "world_size": _WORLD_SIZE, "BLOCK_SIZE": _BLOCK}
    return {
        "one_shot": _largest(kernels[0], _ONE_SHOT, shape | {"numel": 1 << 20}),
        "two_shot": _largest(kernels[1], _TWO_SHOT, shape | {"stride_per_program": _BLOCK * _WORLD_SIZE}),
    }


def _packages(folder: Path) -> None:
    """Make kraken's packages importable without their set-up."""
    for name in _FOLDERS:
        package = ModuleType(name)
        package.__path__ = [str(folder.joinpath(*name.split(".")))]
        sys.modules[name] = package


def _wider(source: Path) -> dict[str, Any]:
    """A copy of the one-shot kernel's module with fp32 accumulation. Triton reads a kernel's source from its file."""
    text = source.read_text()
    for old, new in _WIDER:
        if text.count(old) != 1 and text.count(new) != 1:
            raise KeyError(old)
        text = text.replace(old, new)
    with tempfile.TemporaryDirectory() as place:
        copy = Path(place) / source.name
        copy.write_text(text)
        spec = importlib.util.spec_from_file_location("kraken.comm.one_shot_all_reduce_fp32", copy)
        if spec is None or spec.loader is None:
            raise ImportError(f"{copy} cannot be imported")
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return vars(module)


def _largest(function: Any, arguments: dict[str, Any], constants: dict[str, int]) -> int:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    signature, values, hints = {}, {}, {}
    for i, parameter in enumerate(function.params):
        kind = arguments.get(parameter.name, "constexpr")
        signature[parameter.name] = kind
        if kind == "constexpr":
            values[(i,)] = constants[parameter.name]
        for place in [(i, n) for n in range(len(kind))] if isinstance(kind, tuple) else [(i,)]:
            if kind != "constexpr":
                hints[place] = [["tt.divisibility", 16]]
    source = ASTSource(fn=function, signature=signature, constexprs=values, attrs=hints)
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=COMPILE_OPTIONS)
    sass = code.disassemble(compiled.asm["cubin"])
    return max(steady_loop.loops(sass, lambda access: True), default=0)


if __name__ == "__main__":
    main()
