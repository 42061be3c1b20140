"""Compiles machine code in advance, without a GPU: all kernels that an engine's calls can choose; and packs it in a
wheel."""

from __future__ import annotations

import base64
import hashlib
import io
import logging
import multiprocessing
import os
import zipfile
import zlib
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from functools import cache, partial
from itertools import product
from pathlib import Path
from typing import NamedTuple

import torch

from tricomm import __version__, env
from tricomm.core import cubins, kernel_forms, machine_code
from tricomm.core.fused.fused_call import FUSED, Epilogue
from tricomm.core.kernel_forms import KernelForm
from tricomm.core.launch_plan import Request
from tricomm.core.planner import choose
from tricomm.errors import InvalidArgument, ResourceError
from tricomm.kernels import layout
from tricomm.kernels.collectives import registry
from tricomm.kernels.launch import compiler
from tricomm.options import Options
from tricomm.perf.machine_code.kernel_report import COMPILED
from tricomm.policy import selection
from tricomm.policy.selection_facts import SelectionFacts
from tricomm.store import files

log = logging.getLogger("tricomm")
_CUBE, _CUBE_ARCHITECTURE = "hybrid_cube_mesh", "sm_70"  # only of V100s
_FLOATS = ("bfloat16", "float16", "float32")
_MOST_WORKERS = 32  # each has torch in memory
_EPS = 1e-6  # no part of the machine code


class _Calls(NamedTuple):
    """Calls of one collective; a type stands for all types of its width if nothing is reduced."""

    collective: str
    dtypes: tuple[str, ...] = _FLOATS
    ops: tuple[str, ...] = ("sum",)


_BOTH = ("sum", "avg")
_WIDTHS = ("uint8", "bfloat16", "float32", "int64")
ENGINES = {
    "vllm": (_Calls("all_reduce"), _Calls("all_gather", _WIDTHS), _Calls("reduce_scatter")),
    "sglang": (_Calls("all_reduce"), _Calls(FUSED)),
    "ddp": (
        _Calls("all_reduce", ops=_BOTH), _Calls("reduce_scatter", ops=_BOTH), _Calls("all_gather", _WIDTHS),
        _Calls("broadcast", _WIDTHS), _Calls("barrier"),
    ),
}  # fmt: skip

COLLECTIVES = tuple(dict.fromkeys(calls.collective for engine in ENGINES.values() for calls in engine))
DTYPES = (*_FLOATS, "uint8", "int64")


@dataclass(frozen=True)
class Order:
    """The kernels to build for `arch` and `world_size`: of the calls of an engine of `ENGINES` (or "all") with default
    options; of these the `collectives` and `dtypes`, if any are named; for fused calls, rows of `hidden` elements.
    `wire`: also those of an all_reduce that is quantised so.

    Raises `InvalidArgument` for a value that does not exist, and if nothing is left.
    """

    arch: str
    world_size: int
    engine: str = "all"
    collectives: tuple[str, ...] = ()
    dtypes: tuple[str, ...] = ()
    hidden: tuple[int, ...] = ()
    wire: str = ""

    def __post_init__(self) -> None:
        if self.arch not in COMPILED:
            raise InvalidArgument(f"architecture {self.arch!r} is unknown; there is {', '.join(COMPILED)}")
        if not 1 <= self.world_size <= layout.MAX_WORLD_SIZE:
            raise InvalidArgument(f"world size {self.world_size}: 1 to {layout.MAX_WORLD_SIZE} ranks are possible")
        if self.engine not in (*ENGINES, "all"):
            raise InvalidArgument(f"engine {self.engine!r} is unknown; there is {', '.join(ENGINES)}, all")
        if not self.calls:
            asked = " ".join((*self.collectives, *self.dtypes))
            rows = f"; {FUSED} needs hidden sizes" if FUSED in self.collectives else ""
            raise InvalidArgument(f"nothing is left: {self.engine} makes no call of {asked or 'any kind'}{rows}")

    @property
    def capability(self) -> int:
        return int(self.arch.removeprefix("sm_"))

    @property
    def calls(self) -> list[Request]:
        """The kinds of calls; without `hidden` none of fused rows."""
        engines = ENGINES if self.engine == "all" else (self.engine,)
        found: dict[Request, None] = {}
        for calls in (calls for engine in engines for calls in ENGINES[engine]):
            if self.collectives and calls.collective not in self.collectives:
                continue
            for dtype in calls.dtypes:
                if not self.dtypes or dtype in self.dtypes or calls.collective == "barrier":
                    found.update(dict.fromkeys(self._of(calls, dtype)))
        return list(found)

    def _of(self, calls: _Calls, dtype: str) -> Iterator[Request]:
        if calls.collective == "barrier":
            yield Request("barrier")
        elif calls.collective == FUSED:
            for hidden in self.hidden:
                of_type = getattr(torch, dtype)
                yield Request("all_reduce", "sum", epilogue=Epilogue(hidden, of_type, _EPS), dtype=of_type)
        else:
            reduces = calls.collective in ("all_reduce", "reduce_scatter")
            for op in calls.ops if reduces else (None,):
                request = Request(calls.collective, op, dtype=getattr(torch, dtype))
                yield request
                if self.wire and calls.collective == "all_reduce":
                    yield request._replace(algorithm=registry.algorithm_of(self.wire))

    def sites(self) -> Iterator[SelectionFacts]:
        """A machine with each kind of links, with and without NVLS, with and without dependent launches: the latter for
        ranks that turn these off or have an old driver, and for GPUs with so few multiprocessors that a grid of the
        shipped tables is more than half of the blocks that a group may have."""
        memory = layout.plan(self.world_size, Options.arena_bytes)
        kinds = {table.topology or "" for table in selection.shipped_tables() if table.device != "cpu"}
        if self.arch != _CUBE_ARCHITECTURE or self.world_size != layout.MESH_RANKS:
            kinds -= {_CUBE}
        dependent = ("", "it is turned off") if self.capability >= 90 else ("it needs sm_90",)
        for kind, reason, refusal in product(sorted(kinds), ("", "there is no switch"), dependent):
            yield SelectionFacts(
                self.arch, self.world_size, memory, layout.MAX_BLOCKS, topology=kind, reachable=kind != _CUBE,
                no_dependent_launch=refusal, no_multicast=selection.why_not_multicast(self.arch, reason),
            )  # fmt: skip


@cache
def ordered(order: Order) -> tuple[tuple[str, KernelForm], ...]:
    """The kernels of an order, each once, by their keys, and in the same sequence in every process."""
    if (reason := compiler.refused() or compiler.altered()) is not None:
        raise ResourceError(reason)
    found: dict[str, KernelForm] = {}
    for site in order.sites():
        for request in order.calls:
            made = kernel_forms.of_calls(site, request, partial(choose, site))
            for form in made:
                found.setdefault(_key(form, order.capability), form)
    return tuple(found.items())


def _key(form: KernelForm, capability: int) -> str:
    return compiler.key_of(form.kernel, form.constexprs, form.bits, form.aligned, capability)


def build(order: Order, number: int, out: Path) -> tuple[int, bool]:
    """Compile kernel `number` of an order unless `out` has it; (bytes of its file, whether it was compiled)."""
    key, form = ordered(order)[number]
    name, capability = form.kernel.fn.__name__, order.capability
    if there := cubins.saved(out, name, key, capability):
        return there, False
    made = machine_code.compiled(key, form.kernel, form.constexprs, form.bits, form.aligned, capability)
    return cubins.save(out, name, key, capability, made), True


def build_all(order: Order, count: int, out: Path) -> Iterator[tuple[int, bool]]:
    """`build` every kernel of an order, `count` in all; in processes, as `kernel_report.examine_all`. Raises
    `ResourceError` for the first one that cannot be compiled or written."""
    workers = min(count, len(os.sched_getaffinity(0)), _MOST_WORKERS)
    with ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context("spawn")) as pool:
        try:
            with env.without("TRITON_INTERPRET"):
                started = {pool.submit(build, order, number, out): number for number in range(count)}
            for done in as_completed(started):
                try:
                    yield done.result()
                except (ResourceError, BrokenProcessPool):
                    raise
                except Exception as error:  # whatever a compiler may raise
                    name = ordered(order)[started[done]][1].kernel.fn.__name__
                    raise ResourceError(f"{name} for {order.arch}: {type(error).__name__}: {error}") from error
        except BrokenProcessPool as error:
            raise ResourceError("a process that compiled was ended, as for lack of memory; run it again") from error
        finally:
            pool.shutdown(cancel_futures=True)


def wheel(out: Path) -> Path:
    """A wheel of the package `tricomm_cubins`, with the files in `out` of these sources and this Triton, of all
    architectures. A file that is broken, or that other users can change, is left out, and that is logged. Raises
    `OSError`."""
    _, suffix = cubins.folder_name(0).split("-", 1)
    content = {f"{cubins.PACKAGE}/__init__.py": b'"""Machine code for tricomm: `tricomm compile`."""\n'}
    for path in sorted(out.glob(f"sm_*-{suffix}/*.json")):
        try:
            content[f"{cubins.PACKAGE}/{path.relative_to(out).as_posix()}"] = cubins.content(path)
        except (OSError, ValueError, zlib.error) as error:
            log.warning("%s is left out of the wheel: %s", path, error)
    digest = hashlib.sha256(repr([(n, hashlib.sha256(b).digest()) for n, b in content.items()]).encode()).hexdigest()
    version = f"{__version__}+{digest[:12]}"
    info = f"{cubins.PACKAGE}-{version}.dist-info"
    tags = "Wheel-Version: 1.0\nGenerator: tricomm\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    content[f"{info}/METADATA"] = f"Metadata-Version: 2.1\nName: {cubins.PACKAGE}\nVersion: {version}\n".encode()
    content[f"{info}/WHEEL"] = tags.encode()
    lines = [f"{name},sha256={_hash(data)},{len(data)}\n" for name, data in content.items()]
    content[f"{info}/RECORD"] = ("".join(lines) + f"{info}/RECORD,,\n").encode()
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in content.items():
            archive.writestr(zipfile.ZipInfo(name), data, zipfile.ZIP_DEFLATED)
    path = out / f"{cubins.PACKAGE}-{version}-py3-none-any.whl"
    files.replace(path, packed.getvalue())
    return path


def _hash(data: bytes) -> str:
    return base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
