"""The registry names every kernel by its file, and imports the file on first use."""

import subprocess
import sys
from pathlib import Path

from tricomm.kernels.collectives import registry


def test_every_kernel_is_the_function_of_its_file_and_every_file_has_a_kernel() -> None:
    functions = {kernel.function.fn for kernel in (*registry.ALL, *registry.FUSED)}
    files = {function.__module__.split(".")[-1] for function in functions}
    assert all(f.__name__.removesuffix("_zero_copy") == f.__module__.split(".")[-1] for f in functions)
    assert files == {file.stem for file in Path(registry.__file__).parent.glob("*.py")} - {"__init__", "registry"}


def test_a_kernel_is_imported_on_first_use() -> None:
    code = """
import sys
from tricomm.kernels.collectives import registry
kernels = {name for name in sys.modules if name.startswith("tricomm.kernels.collectives.")}
assert kernels == {"tricomm.kernels.collectives.registry"}, kernels
assert registry.find("all_reduce", "one_shot", "ll").function.__name__ == "all_reduce_one_shot"
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
