"""Which kernel a call runs, and why: a pure function, so that equal inputs give equal choices on all ranks.

What only one rank knows (alignment, contiguity, its rank) takes no part in it. The shipped table is data
(`tables/default.json`); its first row that fits the collective, the world size and the bytes decides.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any

from tricomm.errors import InvalidArgument
from tricomm.kernels import registry
from tricomm.kernels.layout import MAX_BLOCKS, Layout

COLLECTIVES = ("all_reduce", "all_gather", "barrier")
GPU_WARPS = 8
GPU_TILE = 512  # words: two a thread, so that every access is 16 bytes wide
CPU_TILE = 8192  # the interpreter pays per operation, not per element


@dataclass(frozen=True)
class Choice:
    """What a call runs: kernel, launch shape, and the reason in words.

    `blocks` and `warps` are the grid and the warps of a block, `block` the 64-bit words of a tile, `table` and `row`
    what decided (`row` is None where the caller forced the kernel).
    """

    collective: str
    algorithm: str
    protocol: str
    blocks: int
    warps: int
    block: int
    reason: str
    table: str
    row: int | None


@dataclass(frozen=True)
class Site:
    """The facts about a communicator that selection needs; the same on all ranks."""

    device: str  # "cpu" or "sm_90" and so on
    world_size: int
    layout: Layout
    max_blocks: int
    blocks: int | None = None
    tile: int | None = None


def check_device(device: str, arena: Layout, tile: int | None) -> None:
    """Refuse what a GPU's polls cannot work with: every tile must span all threads of a block.

    Raises `InvalidArgument` for an arena or a forced tile that is too small.
    """
    if device != "cuda":
        return
    if tile is not None and tile < GPU_TILE:
        raise InvalidArgument(f"Options.tile={tile}: a GPU needs tiles of at least {GPU_TILE} words")
    if arena.largest_tile("two_shot", "ll") < GPU_TILE:
        raise InvalidArgument(f"Options.arena_bytes: {arena.nbytes} bytes leave tiles under {GPU_TILE} words")


def choose(
    site: Site, collective: str, nbytes: int, algorithm: str | None = None, protocol: str | None = None
) -> Choice:
    """Pick the kernel for `nbytes` bytes of input per rank; `algorithm` and `protocol` force one.

    Raises `InvalidArgument` for a collective, algorithm or protocol that does not exist, with those that do.
    """
    if collective not in COLLECTIVES:
        raise InvalidArgument(f"collective {collective!r} is unknown; there is {', '.join(COLLECTIVES)}")
    for name, value in (("algorithm", algorithm), ("protocol", protocol)):
        if value is not None and not isinstance(value, str):
            raise InvalidArgument(f"{name}={value!r}: a name or None is needed")
    table, row, number = _row(site, collective, nbytes)
    forced = [f"{n}={v}" for n, v in (("algorithm", algorithm), ("protocol", protocol)) if v is not None]
    kernel = registry.find(collective, *_complete(collective, row, algorithm, protocol))
    blocks, tile = _shape(site, kernel, nbytes)
    if forced:
        reason = f"{' and '.join(forced)} forced by the caller"
    else:
        limit = "any size" if row["max_bytes"] is None else f"up to {row['max_bytes']} bytes"
        reason = f"table {table!r} row {number}: {collective}, up to {row['world_size']} ranks, {limit}"
    return Choice(
        collective,
        kernel.algorithm,
        kernel.protocol,
        blocks,
        GPU_WARPS,
        tile,
        reason,
        table,
        None if forced else number,
    )


def _complete(collective: str, row: dict[str, Any], algorithm: str | None, protocol: str | None) -> tuple[str, str]:
    """Fill in what the caller left open: the table's pick where it fits, else the first kernel that does."""
    known = [(k.algorithm, k.protocol) for k in registry.KERNELS if k.collective == collective]
    fits = [k for k in known if algorithm in (None, k[0]) and protocol in (None, k[1])]
    if not fits:
        asked = "/".join(part or "any" for part in (algorithm, protocol))
        raise InvalidArgument(
            f"{collective}: there is no {asked} kernel; there is {', '.join(f'{a}/{p}' for a, p in known)}"
        )
    preferred = (row["algorithm"], row["protocol"])
    return preferred if preferred in fits else fits[0]


def _shape(site: Site, kernel: registry.Kernel, nbytes: int) -> tuple[int, int]:
    """Grid and tile. Every input is the same on all ranks, and so is the grid."""
    words = -(-nbytes // 8)
    widest = site.layout.largest_tile(kernel.algorithm, kernel.protocol)
    if site.device == "cpu":
        tile = min(CPU_TILE, max(16, 1 << (max(words, 1) - 1).bit_length()))
        blocks = 1
    else:
        tile = GPU_TILE
        share = -(-words // site.world_size) if kernel.algorithm == "two_shot" else words
        blocks = min(32, max(1, -(-share // tile)))
    tile = min(site.tile or tile, widest)
    return min(site.blocks or blocks, site.max_blocks, MAX_BLOCKS), tile


_NO_ROW = {"algorithm": "one_shot", "protocol": "simple", "max_bytes": None, "world_size": "any"}


def _row(site: Site, collective: str, nbytes: int) -> tuple[str, dict[str, Any], int]:
    for table in _tables():
        if table["device"] == site.device or (table["device"] == "cuda" and site.device != "cpu"):
            for number, row in enumerate(table["rows"]):
                fits = row["max_bytes"] is None or nbytes <= row["max_bytes"]
                if row["collective"] == collective and site.world_size <= row["world_size"] and fits:
                    return table["name"], row, number
            return table["name"], _NO_ROW, -1
    return "none", _NO_ROW, -1


@cache
def _tables() -> list[dict[str, Any]]:
    text = files("tricomm").joinpath("tables/default.json").read_text()
    tables: list[dict[str, Any]] = json.loads(text)["tables"]
    return tables
