"""A user's own tuning tables: one file for each kind of box, in the XDG cache directory or TRICOMM_TUNING_DIR.

All ranks of a group use the same one, or none: where they find different ones, the shipped tables decide on all. What
finding, reading and writing one needs (platformdirs, msgspec, filelock) is imported there: a machine with only a
checkout has no such table, and must not need them.
"""

from __future__ import annotations

import logging
import os
import re
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

import torch

from tricomm import env
from tricomm.errors import InvalidArgument, ResourceError
from tricomm.policy.tables import Fingerprint, Tuned

if TYPE_CHECKING:
    from tricomm.store.control import ControlPage
    from tricomm.topology.model import Topology

log = logging.getLogger("tricomm")
_PATIENCE = 10.0  # seconds for another process to finish writing


def folder() -> Path:
    """Where tables are looked for and written. Raises `ResourceError` where nobody says."""
    given = env.text("TRICOMM_TUNING_DIR")
    if given is not None:
        return Path(given)
    try:
        import platformdirs
    except ModuleNotFoundError as error:
        raise ResourceError(f"no folder for tuning tables: {error}; set TRICOMM_TUNING_DIR") from None
    return Path(platformdirs.user_cache_dir("tricomm")) / "tables"


def path(fingerprint: Fingerprint) -> Path:
    """The file of a kind of box; the digest is what counts, the rest is for people."""
    words = re.sub(r"[^a-z0-9]+", "-", (fingerprint.gpu or fingerprint.device).lower()).strip("-")[:40]
    return folder() / f"{words}-w{fingerprint.world_size}-{fingerprint.digest}.json"


def fingerprint(kind: str, device: torch.device, world_size: int, topology: Topology | None) -> Fingerprint:
    """What kind of box `world_size` ranks run on. `kind` is their devices' architecture, or cpu."""
    gpu = torch.cuda.get_device_name(device) if device.type == "cuda" else ""
    links = ("", "") if topology is None else (topology.kind, topology.digest)
    return Fingerprint(kind, gpu, world_size, *links)


def read(file: Path) -> Tuned:
    """The table in `file`. Raises `InvalidArgument` that names it and says what is wrong, `ResourceError` where msgspec
    is missing."""
    table_file = _table_file(file)
    try:
        with file.open("rb") as stream:
            text = stream.read(table_file.MAX_BYTES + 1)
    except OSError as error:
        raise InvalidArgument(f"tuning table {file}: {error.strerror}") from None
    found: Tuned = table_file.loads(text, f"tuning table {file}")
    return found


def load(wanted: Fingerprint) -> Tuned | None:
    """The table of this kind of box; None where no folder is known; None, with a warning, for a table that is broken,
    cannot be read here, or was measured on another kind."""
    try:
        file = path(wanted)
    except ResourceError:
        return None
    if not os.path.exists(file):  # also where its directory may not be entered
        return None
    try:
        found = read(file)
    except (InvalidArgument, ResourceError) as error:
        log.warning("%s; it is ignored, the shipped tables decide", error)
        return None
    if found.fingerprint != wanted:
        log.warning(
            "tuning table %s is of %s, here are %s; it is ignored, the shipped tables decide",
            file, found.fingerprint, wanted,
        )  # fmt: skip
        return None
    return found


def save(tuned: Tuned) -> Path:
    """Write the table where `load` finds it, whole or not at all. Raises `ResourceError` where it cannot be written."""
    import filelock

    file = path(tuned.fingerprint)
    text = _table_file(file).dumps(tuned)
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with filelock.FileLock(f"{file}.lock", timeout=_PATIENCE):
            partial = file.with_name(f"{file.name}.{os.getpid()}.part")
            partial.write_bytes(text)
            os.replace(partial, file)
    except OSError as error:  # filelock's timeout among them
        raise ResourceError(
            f"tuning table {file} cannot be written: {error}; TRICOMM_TUNING_DIR names another directory"
        ) from None
    return file


def _table_file(file: Path) -> ModuleType:
    try:
        from tricomm.policy import table_json
    except ModuleNotFoundError as error:
        raise ResourceError(f"tuning table {file}: {error}; pip install msgspec") from None
    return table_json


def agree(control: ControlPage, wanted: Fingerprint, timeout: float) -> Tuned | None:
    """The table that all ranks have found, else None on all of them. Called by all ranks together."""
    mine = load(wanted)
    answers = control.exchange(mine.digest if mine is not None else b"", "tuning table", timeout)
    if len(set(answers)) > 1:
        said = ", ".join(f"rank {rank} {answer.hex()[:12] or 'none'}" for rank, answer in enumerate(answers))
        log.warning("ranks find different tuning tables (%s); the shipped ones decide on all", said)
        return None
    return mine
