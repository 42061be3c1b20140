"""devtools/notes/hardware.md lists every call of CUDA's driver that may block; the tests that it names exist."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DOCUMENT = ROOT / "devtools" / "notes" / "hardware.md"
FOLDERS = ("kernels", "store", "tricomm")  # perf only measures; the explorer and the PTX machine run on a CPU
HEAD = "## Calls of the driver that may block"
ROW = re.compile(r"^\| `([\w.]+)` \| ((?:`[\w.]+`(?:, )?)+|anywhere) \| (.+?) \| (.+) \|$")
NEVER = re.compile(r"^These never wait for the device: (.+)\.$", re.MULTILINE)
DRIVER = re.compile(r"cu[A-Z][A-Za-z_0-9]*")
METHODS = {"item", "cpu", "cuda", "copy_", "synchronize", "empty_cache"}
MAKERS = {"torch.tensor", "torch.as_tensor", "torch.empty", "torch.zeros", "torch.ones", "torch.full"}
ELSEWHERE = {
    # between tensors of one device: asynchronous, or a copy on the CPU
    "copy_ in tricomm.core.calls.first_calls.unpack",
    "copy_ in tricomm.core.calls.point_to_point.PointToPoint.recv",
    "copy_ in tricomm.core.fused.unfused.finish",
    "copy_ in tricomm.core.fused.unfused._fp8",
    "copy_ in tricomm.core.fused.unfused._fp8_per_group",
    "copy_ in tricomm.core.fused.unfused._fp8_per_token",
    "copy_ in tricomm.core.fused.unfused._nvfp4",
    # filled by a kernel
    "torch.full in tricomm.core.fused.unfused._number",
    # methods of the library's Driver and Gpu, which have rows
    "synchronize in tricomm.core.group.Group.begin",
    "synchronize in store.arenas.cuda_ipc.IpcBlocks.allocate",
    "synchronize in store.arenas.cuda_vmm.VmmBlocks.allocate",
    "synchronize in store.arenas.cuda_arena.CudaArena._write_probe",
    "synchronize in store.arenas.cuda_arena.CudaArena._clear_probe",
    "synchronize in store.arenas.cuda_arena.CudaArena._check_context",
    "synchronize in store.arenas.cuda_multicast.Multicast._try.run",
    "synchronize in store.arenas.cuda_multicast.Multicast._clear",
    "synchronize in store.arenas.cuda_arena.CudaArena.suspend",
    "synchronize in store.arenas.local_arena._GpuBlocks.give_back",
    "synchronize in store.arenas.local_arena._GpuBlocks.__init__",
    "synchronize in store.arenas.local_arena._GpuBlocks.free",
    "synchronize in store.arenas.local_arena._GpuBlocks.take_again",
    # the interpreter's tensors, on the CPU
    "item in kernels.launch.triton_adapter._atomic_poll",
}


def calls(source: str, module: str) -> set[str]:
    """Every call of a module that reaches the driver, as `call in module.function`."""
    return set(_calls(ast.parse(source), module))


def _calls(node: ast.AST, where: str) -> Iterator[str]:
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
        where = f"{where}.{node.name}"
    name = _name(node, where)
    if name is not None:
        yield f"{name} in {where}"
    for field, value in ast.iter_fields(node):
        if field not in ("annotation", "returns"):
            for child in value if isinstance(value, list) else [value]:
                if isinstance(child, ast.AST):
                    yield from _calls(child, where)


def _name(node: ast.AST, where: str) -> str | None:
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        named = where.startswith("store.cuda.cuda_driver.Driver") and DRIVER.fullmatch(node.value)
        return node.value if named else None  # how that class calls the bindings
    if isinstance(node, ast.Attribute):
        dotted = ast.unparse(node)
        if DRIVER.fullmatch(node.attr):
            return node.attr
        return dotted if re.fullmatch(r"torch\.cuda\.\w+", dotted) else None
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
        return None
    dotted = ast.unparse(node.func)
    if dotted in MAKERS and any(k.arg == "device" and ast.unparse(k.value) != "'cpu'" for k in node.keywords):
        return dotted
    method = node.func.attr in METHODS and not dotted.startswith("torch.")
    moved = "c10d" in where and node.func.attr == "copy_"  # from one tensor of a call to another, on its device
    return node.func.attr if method and not moved else None


@cache
def all_calls() -> frozenset[str]:
    results: set[str] = set()
    for folder in FOLDERS:
        for path in (ROOT / folder).rglob("*.py"):
            module = ".".join(path.relative_to(ROOT).with_suffix("").parts)
            results |= calls(path.read_text(), module)
    return frozenset(results)


def document() -> str:
    text = DOCUMENT.read_text()
    return text[text.index(HEAD) :].split("\n## ")[0]


def wrong(text: str, result: frozenset[str] | set[str]) -> list[str]:
    """The calls in `result` that the section does not list, and those that it lists without reason."""
    rows = [match.groups() for line in text.splitlines() if (match := ROW.match(line))]
    listed = {f"{call} in {place}" for call, places, _, _ in rows for place in re.findall(r"`([\w.]+)`", places)}
    anywhere = {call for call, places, _, _ in rows if places == "anywhere"}
    never = set(re.findall(r"`([\w.]+)`", "".join(NEVER.findall(text))))
    used = {call.split(" in ")[0] for call in result}
    known = never | anywhere
    problems = [f"{call} is in no row" for call in result - listed - ELSEWHERE if call.split(" in ")[0] not in known]
    problems += [f"{call} is in the table and not in the sources" for call in listed - result]
    problems += [f"{call} never blocks, and nobody calls it" for call in never - used]
    problems += [f"{call} is in the table, and nobody calls it" for call in anywhere - used]
    problems += [f"{call} both blocks and never does" for call in never & {row[0] for row in rows}]
    lines = [line for line in text.splitlines() if line.startswith("| `")]
    return problems + [f"not a row: {line}" for line in lines if not ROW.match(line)]


def test_every_call_that_may_block_has_a_row() -> None:
    assert wrong(document(), all_calls()) == []
    assert ELSEWHERE <= all_calls()


@pytest.mark.parametrize(
    ("added", "call"),
    [
        ("import torch\ndef wait(event):\n    event.synchronize()", "synchronize"),
        ("import torch\ndef wait():\n    torch.cuda.empty_cache()", "torch.cuda.empty_cache"),
        ("def wait(bindings):\n    bindings.cuStreamSynchronize(0)", "cuStreamSynchronize"),
        ("def wait(x):\n    return x.sum().item()", "item"),
        ("import torch\ndef wait(rows, where):\n    return torch.tensor(rows, device=where)", "torch.tensor"),
        ("class Ring:\n    def wait(self, x):\n        self.x.copy_(x)", "copy_"),
    ],
)
def test_a_call_that_is_added_to_the_sources_is_found(added: str, call: str) -> None:
    new = calls(added, "tricomm.new")
    (problem,) = wrong(document(), all_calls() | new)
    assert problem.startswith(f"{call} in tricomm.new.") and problem.endswith("is in no row")


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("| `cuMemFree` |", "| `cuMemFree_v2` |", "cuMemFree in store.cuda.cuda_driver.Driver.mem_free is in no row"),
        ("Driver.mem_alloc`", "Driver.alloc`", "cuMemAlloc in store.cuda.cuda_driver.Driver.alloc is in the table"),
        ("`cuDeviceGet`, ", "", "cuDeviceGet in store.cuda.cuda_driver.Driver._device is in no row"),
        ("`cuDeviceGet`, ", "`cuDeviceGet`, `cuMemFree`, ", "cuMemFree both blocks"),
        ("`cuDeviceGet`, ", "`cuDeviceGet`, `cuCtxGetId`, ", "cuCtxGetId never blocks, and nobody"),
        ("| as `cuMemFree` |", "| |", "not a row"),
    ],
)
def test_a_list_that_is_out_of_date_is_found(old: str, new: str, words: str) -> None:
    assert old in document()
    assert any(text.startswith(words) for text in wrong(document().replace(old, new, 1), all_calls()))


FINDINGS = [f"C{n}" for n in range(1, 11)] + [f"S{n}" for n in range(1, 10)]
TEST = re.compile(r"`(tests/(?:\w+/)*test_\w+\.py)(?:::(\w+))?`")


def missing(text: str) -> list[str]:
    """Findings without a row, and tests in their rows that do not exist."""
    rows = dict(re.findall(r"^\| ([CS]\d+) \| (.+) \|$", text, re.MULTILINE))
    wrong = [f"{number} has no row" for number in FINDINGS if number not in rows]
    for number, row in rows.items():
        for file, name in TEST.findall(row):
            path = ROOT / file
            names = re.findall(r"^def (test_\w+)", path.read_text(), re.MULTILINE) if path.is_file() else []
            if not names or (name and name not in names):
                wrong.append(f"{number}: there is no {file}{'::' if name else ''}{name}")
    return wrong


def test_every_finding_has_a_row_and_every_test_that_it_names_exists():
    assert missing(DOCUMENT.read_text()) == []


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("| C5 |", "| X5 |", "C5 has no row"),
        ("test_uneven_gpu.py::test_on_a_gpu", "test_uneven_gpu.py::test_on_gpus", "C8: there is no tests/gpu"),
        ("store/test_host_words.py", "store/test_words.py", "C2: there is no tests/store/test_words.py"),
    ],
)
def test_a_row_that_is_out_of_date_is_found(old, new, words):
    text = DOCUMENT.read_text()
    assert old in text
    assert any(result.startswith(words) for result in missing(text.replace(old, new, 1)))
