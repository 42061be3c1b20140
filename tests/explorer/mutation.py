"""A mutant: one small change to a kernel, made in a temporary copy that runs instead of the shipped kernel."""

import ast
import importlib
import importlib.util
import itertools
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import patch

import torch

import tricomm
from tests.explorer import pad_kernels
from tricomm import kernels
from tricomm.communicator import Communicator
from tricomm.core import group, launch_plan
from tricomm.core.calls import point_to_point
from tricomm.explorer import Finding, Report, campaign, shipped
from tricomm.explorer.memory_model import allowed
from tricomm.explorer.report.findings import Execution
from tricomm.kernels.collectives import registry
from tricomm.kernels.launch import interpreted_wide, interpreter, triton_adapter
from tricomm.options import Options, Tuning
from tricomm.topology.model import Topology

Key = tuple[str, str, str]
Pair = tuple[torch.Tensor, torch.Tensor]
# Makes `calls` calls on one rank; after each one what came of it and what should have.
Body = Callable[[Communicator, "Mutant", ModuleType, int], Iterator[Pair]]

_KERNELS = Path(kernels.__file__ or "").parent
_GROUP = Path(group.__file__)
_PADS = Path(pad_kernels.__file__)
_numbers = itertools.count()


@dataclass(frozen=True)
class Edit:
    """In `file` ("kernels/**.py", "tricomm/core/group.py" or "tests/explorer/pad_kernels.py"), `old` becomes `new`."""

    file: str
    old: str
    new: str


@dataclass(frozen=True)
class Mutant:
    """A change that the explorer must notice.

    bug         the real bug that it imitates, or the rule of this protocol that it breaks.
    edits       the change; each `old` occurs exactly once in its file.
    keys        the shipped kernels that show it, called in turn; empty for a kernel of `pad_kernels`.
    expect      kinds of finding, at least one of which must be in the first schedule with a finding.
    advice      words that the advice of one finding must contain.
    schedules   the number of schedules within which it must be found.
    body        the calls; None: the calls of `tricomm check`, `tricomm.explorer.shipped.body`.
    clean       the error of the unchanged kernel for the same calls, if it has one.
    processes   why separate processes cannot show it, or have not been tried, if so.
    topology    how the ranks are linked, if it matters.
    """

    name: str
    title: str
    bug: str
    edits: tuple[Edit, ...]
    keys: tuple[Key, ...]
    expect: frozenset[str]
    advice: str = ""
    schedules: int = 4
    world_size: int = 2
    blocks: int = 1  # 0: none are forced
    tile: int = 4
    sizes: tuple[int, ...] = shipped.SIZES
    dtype: torch.dtype = torch.int64
    first_epoch: int = 1
    strategy: str = "random"
    seed: int = 0
    residency: int | None = None
    max_blocks: int | None = None
    body: Body | None = None
    clean: frozenset[str] = frozenset()
    processes: str = ""
    topology: Topology | None = None

    @property
    def options(self) -> Options:
        """The options of `tricomm check`, with this mutant's grid, tile and first epoch."""
        codes = [k for k in registry.WIRE if (k.collective, k.algorithm, k.protocol) in self.keys]  # they need room
        return Options(
            arena_bytes=shipped.options(self.world_size, kernel=codes[0] if codes else None).arena_bytes,
            max_blocks=self.max_blocks,
            topology=self.topology,
            _tuning=Tuning(blocks=self.blocks or None, tile=self.tile, first_epoch=self.first_epoch),
        )


def edited(file: str, text: str, edits: Sequence[Edit]) -> str:
    """`text` of `file` with its edits made. Raises `ValueError` for an edit that does not apply exactly once."""
    for edit in edits:
        if edit.file == file:
            if text.count(edit.old) != 1:
                raise ValueError(f"{file}: {edit.old!r} occurs {text.count(edit.old)} times, not once")
            text = text.replace(edit.old, edit.new)
    return text


@contextmanager
def loaded(edits: Sequence[Edit]) -> Iterator[ModuleType]:
    """While this lasts, communicators use a copy of the kernels with `edits` made. Gives the copy of `pad_kernels`."""
    name = f"tricomm_mutant_{next(_numbers)}"
    with ExitStack() as undo:
        folder = Path(tempfile.mkdtemp(prefix=f"{name}_"))
        undo.callback(shutil.rmtree, folder)
        _copy(folder, name, edits)
        undo.callback(_forget, name)
        package = importlib.util.spec_from_file_location(
            name, folder / "__init__.py", submodule_search_locations=[str(folder)]
        )
        if package is None or package.loader is None:
            raise ImportError(f"{folder}: no package")
        sys.modules[name] = importlib.util.module_from_spec(package)
        primitives = importlib.import_module(f"{name}.primitives")
        for module in ("primitives", "wide_words", "multimem", "device.message_queues", "device.arrival"):
            allowed.copy_of(str(importlib.import_module(f"{name}.{module}").__file__))
        interpreter.substitute(primitives.pause, triton_adapter.yield_to_others)
        wide_words = importlib.import_module(f"{name}.wide_words")
        interpreter.substitute(wide_words.store_wide, interpreted_wide.store)
        interpreter.substitute(wide_words.load_wide, interpreted_wide.load)
        for user in (launch_plan, point_to_point):
            undo.enter_context(patch.object(user, "registry", importlib.import_module(f"{name}.collectives.registry")))
        epilogue = importlib.import_module(f"{name}.device.epilogue")
        undo.enter_context(patch.object(launch_plan, "device", epilogue))
        for function, changed in _changed(edits).items():
            undo.enter_context(patch.object(group.Group, function, changed))
        yield importlib.import_module(f"{name}.pad_kernels")


def _copy(folder: Path, name: str, edits: Sequence[Edit]) -> None:
    files = {f"kernels/{file.relative_to(_KERNELS)}": file for file in _KERNELS.rglob("*.py")}
    files["tests/explorer/pad_kernels.py"] = _PADS
    unknown = {e.file for e in edits} - set(files) - {"tricomm/core/group.py"}
    if unknown:
        raise ValueError(f"{sorted(unknown)}: no files that can be edited")
    for file, path in files.items():
        text = edited(file, path.read_text(), edits)
        copy = folder / (path.relative_to(_KERNELS) if path.is_relative_to(_KERNELS) else path.name)
        copy.parent.mkdir(exist_ok=True)
        copy.write_text(text.replace("tricomm.kernels", name))


def _forget(name: str) -> None:
    for module in [m for m in sys.modules if m == name or m.startswith(f"{name}.")]:
        del sys.modules[module]
    for known in (triton_adapter.substitutes, triton_adapter._plain):
        for function in [f for f in known if f.__module__.startswith(f"{name}.")]:
            del known[function]


def _changed(edits: Sequence[Edit]) -> dict[str, Any]:
    """The methods of `tricomm.core.group.Group` that the edits change."""
    text = _GROUP.read_text()
    before, after = (_methods(t) for t in (text, edited("tricomm/core/group.py", text, edits)))
    results: dict[str, Any] = {}
    for name, method in after.items():
        if ast.dump(method) != ast.dump(before[name]):
            annotations = ast.ImportFrom("__future__", [ast.alias("annotations")], 0)
            module = ast.fix_missing_locations(ast.Module([annotations, method], []))
            names: dict[str, Any] = {}
            exec(compile(module, str(_GROUP), "exec"), vars(group), names)
            results[name] = names[name]
    return results


def _methods(text: str) -> dict[str, ast.FunctionDef]:
    classes = [node for node in ast.parse(text).body if isinstance(node, ast.ClassDef) and node.name == "Group"]
    return {node.name: node for node in classes[0].body if isinstance(node, ast.FunctionDef)}


def explore(mutant: Mutant, changed: bool = True, schedules: int | None = None, **others: Any) -> Report:
    """Check the mutant, or with `changed=False` the unchanged kernels in its place."""
    settings = {"residency": mutant.residency, "strategy": mutant.strategy, "seed": mutant.seed, **others}
    with loaded(mutant.edits if changed else ()) as pads, patch.object(campaign.Campaign, "_keep", _keep):
        fn = _subject(mutant, pads)
        return tricomm.check(fn, mutant.world_size, schedules or mutant.schedules, options=mutant.options, **settings)


def _keep(self: Any, report: Report, result: list[Finding], execution: Execution, number: int, outcome: Any) -> None:
    """As the campaign's own, without looking for a simpler execution that shows the same: that takes time."""
    report.findings += [finding.found_in(execution, number, ()) for finding in result]


def _subject(mutant: Mutant, pads: ModuleType) -> Callable[[Communicator], Any]:
    if mutant.body is None:
        return shipped.body(registry.find(*mutant.keys[0]), mutant.sizes)

    def fn(comm: Communicator) -> list[torch.Tensor]:
        results = []
        for got, want in mutant.body(comm, mutant, pads, len(mutant.sizes)):  # type: ignore[misc]
            if not mutant.keys and not torch.equal(got, want):
                raise AssertionError(f"{got.tolist()} instead of {want.tolist()}")
            results.append(got)
        return results

    return fn
