"""Mutants of compiled kernels: a small change to the PTX, made when a kernel is launched."""

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import tricomm
from tests.explorer.mutation import _keep
from tests.explorer.ptx.mutations import Mutation, mutations
from tricomm.explorer import Report, campaign, shipped
from tricomm.explorer.compiled import launches
from tricomm.explorer.compiled.events import function_at
from tricomm.explorer.compiled.stream_queues import KernelLaunch
from tricomm.explorer.ptx.instructions import PtxKernel
from tricomm.explorer.ptx.text.parser import parse
from tricomm.kernels.collectives import registry
from tricomm.options import Options, tuned

Key = tuple[str, str, str]
SIZES = (520, 1, 36)
_parsed: dict[tuple[int, str], tuple[PtxKernel, PtxKernel]] = {}


@contextmanager
def changed(name: str, change: Callable[[str], str], kernel: str | None = None) -> Iterator[None]:
    """Launches (of `kernel`, if one is named) execute their PTX after `change`; `name` is the change's own."""

    def code_of(launch: KernelLaunch) -> PtxKernel:
        original = launch.loaded.kernel
        if kernel not in (None, original.name):
            return original
        key = id(original), name
        if key not in _parsed:
            _parsed[key] = original, parse(change(launch.loaded.text), original.name)
        return _parsed[key][1]

    with patch.object(launches, "code_of", code_of):
        yield
    for key in [k for k in _parsed if k[1] == name]:
        del _parsed[key]


def options(world_size: int, blocks: int = 1, **others: Any) -> Options:
    return tuned(shipped.options(world_size, blocks, compiled="sm_90"), **others)


def explore(key: Key, schedules: int = 4, world_size: int = 2, blocks: int = 1, **settings: Any) -> Report:
    """Check a shipped kernel, compiled, for a few calls; without looking for simpler schedules."""
    fn = shipped.body(registry.find(*key), settings.pop("sizes", SIZES))
    given = settings.pop("options", None) or options(world_size, blocks)
    with patch.object(campaign.Campaign, "_keep", _keep):
        return tricomm.check(fn, world_size, schedules, options=given, compiled="sm_90", **settings)


def text_of(key: Key, world_size: int = 2, blocks: int = 1, sizes: Sequence[int] = SIZES) -> str:
    """The PTX that `explore` executes for the first of `sizes`; others may have another tile and number of warps."""
    texts = launched(lambda: explore(key, 1, world_size, blocks, sizes=sizes, faults=()))
    return texts[registry.find(*key).function.__name__][0]


def chosen(
    text: str, kernel: str, function: str, kinds: Sequence[str], holds: str = "", innermost: bool = False
) -> list[Mutation]:
    """The mutations of `text`, that of `kernel`: of some kinds, in the instructions of a Python function, with words
    that their names hold; with `innermost` not in those of functions that it calls."""
    functions = {i.line: [function_at(s.file, s.line) for s in i.source] for i in parse(text, kernel).instructions}
    return [
        m
        for m in mutations(text)
        if m.kind in kinds and function in functions.get(m.line, ())[: 1 if innermost else None] and holds in m.name
    ]


def launched(run: Callable[[], Any]) -> dict[str, list[str]]:
    """The different PTX texts of each kernel that `run` launches, in order."""
    texts: dict[str, list[str]] = {}

    def code_of(launch: KernelLaunch) -> PtxKernel:
        known = texts.setdefault(launch.loaded.name, [])
        if launch.loaded.text not in known:
            known.append(launch.loaded.text)
        return launch.loaded.kernel

    with patch.object(launches, "code_of", code_of):
        run()
    return texts


def instructions(text: str) -> str:
    """A PTX text without the parts that do not affect execution: version, target, source lines, debug sections."""
    lines = (line.partition("//")[0].strip() for line in re.split(r"\n\s*\.section", text)[0].splitlines())
    unused = (".version", ".target", ".loc", ".file", "$L__tmp")
    return "\n".join(line for line in lines if line and not line.startswith(unused))
