"""The stages, in the order in which cases of the same tier run: checks first, then measurements."""

from __future__ import annotations

import importlib
from dataclasses import replace

from tricomm.errors import InvalidArgument
from tricomm.perf.evidence.stage import Stage
from tricomm.perf.evidence.stages import (
    device_time,
    faults,
    first,
    host_path,
    many_gpus,
    peers,
    processes,
    sanitizer,
    streams,
)

STAGES: tuple[Stage, ...] = (
    first.STAGE, first.ON_STREAMS, streams.STAGE, processes.STAGE, faults.STAGE, sanitizer.STAGE, device_time.STAGE,
    peers.STAGE, host_path.STAGE, many_gpus.STAGE,
)  # fmt: skip


def find(name: str) -> Stage:
    """The stage of that name, or the one at "module:attribute"; raises `InvalidArgument` if there is none."""
    module, _, attribute = name.partition(":")
    if attribute:
        stage = getattr(importlib.import_module(module), attribute, None)
        if isinstance(stage, Stage):
            return replace(stage, reference=name)
    for stage in STAGES:
        if stage.name == name:
            return stage
    raise InvalidArgument(f"stage {name!r} is unknown; there is {', '.join(s.name for s in STAGES)}")
