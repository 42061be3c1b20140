"""A user's tuning tables: one file for each kind of machine, in the XDG cache directory or TRICOMM_TUNING_DIR.

All ranks of a group use the same table, or none: if they find different ones, the shipped tables decide on all.
"""

from __future__ import annotations

import logging
import os
import re
from pathlib import Path

import torch

from tricomm import env
from tricomm.errors import InvalidArgument, ResourceError
from tricomm.policy import tuning_tables
from tricomm.policy.tuning_tables import Fingerprint, TunedTable
from tricomm.store import files
from tricomm.store.control import ControlPage
from tricomm.topology.model import Topology

log = logging.getLogger("tricomm")
_PATIENCE = 10.0  # seconds for another process to finish writing
_NAME = re.compile(r"[a-z0-9-]+-w\d+-[0-9a-f]{12}\.json")  # as `path` makes it


def folder() -> Path:
    """The folder of the tables."""
    given = env.text("TRICOMM_TUNING_DIR")
    return env.user_folder("XDG_CACHE_HOME", ".cache") / "tables" if given is None else Path(given)


def path(fingerprint: Fingerprint) -> Path:
    """The file of a kind of machine; the digest identifies it, the rest of the name is for readers."""
    words = re.sub(r"[^a-z0-9]+", "-", (fingerprint.gpu or fingerprint.device).lower()).strip("-")[:40]
    return folder() / f"{words}-w{fingerprint.world_size}-{fingerprint.digest}.json"


def fingerprint(kind: str, device: torch.device, world_size: int, topology: Topology | None) -> Fingerprint:
    """The kind of machine on which `world_size` ranks run. `kind` is the architecture of their devices, or cpu."""
    gpu = torch.cuda.get_device_name(device) if device.type == "cuda" else ""
    links = ("", "") if topology is None else (topology.kind, topology.digest)
    return Fingerprint(kind, gpu, world_size, *links)


def found() -> list[Path]:
    """The files of `folder()`. Raises `InvalidArgument` if users other than this one and root can replace them."""
    files.refuse_shared(folder(), "tuning tables")
    return sorted(folder().glob("*.json"))


def read(file: Path, named: bool = False) -> TunedTable:
    """The table in `file`, which must belong to this user or root unless it was `named` on the command line.

    Raises `InvalidArgument` that names it and the mistake.
    """
    try:
        with file.open("rb") if named else files.opened(file, root=True) as stream:
            text = stream.read(tuning_tables.MAX_BYTES + 1)
    except OSError as error:
        raise InvalidArgument(f"tuning table {file}: {error.strerror}") from None
    return tuning_tables.loads(text, f"tuning table {file}")


def load(wanted: Fingerprint) -> TunedTable | None:
    """The table of this kind of machine; None, with a warning, if it is broken or was measured on another kind."""
    file = path(wanted)
    if not os.path.lexists(file):  # also if its directory may not be entered
        return None
    try:
        files.refuse_shared(file.parent, "tuning tables")
        table = read(file)
    except InvalidArgument as error:
        log.warning("%s; it is ignored, the shipped tables decide", error)
        return None
    if table.fingerprint != wanted:
        message = "tuning table %s is of %s, here are %s; it is ignored, the shipped tables decide"
        log.warning(message, file, table.fingerprint, wanted)
        return None
    return table


def save(tuned: TunedTable) -> Path:
    """Write the table atomically to the file that `load` reads; `undo` reverts it.

    Raises `ResourceError` if it cannot be written.
    """
    file = path(tuned.fingerprint)
    text = tuning_tables.dumps(tuned)
    try:
        files.make_directory(file.parent)
        with files.locked(f"{file}.lock", _PATIENCE):
            if file.exists():
                files.replace(_before(file), file.read_bytes())
            files.replace(file, text)
    except OSError as error:
        raise ResourceError(
            f"tuning table {file} cannot be written: {error}; TRICOMM_TUNING_DIR names another directory"
        ) from None
    return file


def in_use(file: Path) -> bool:
    """True for a name that `save` gives, which is the only one that a group looks for."""
    return _NAME.fullmatch(file.name) is not None


def undo(file: Path) -> bool:
    """Undo the last `save` of this table: True if the previous table is restored, False if there was none and `file` is
    removed. Raises `ResourceError` if nothing can be changed there."""
    try:
        with files.locked(f"{file}.lock", _PATIENCE):
            if _before(file).exists():
                _before(file).replace(file)
                return True
            file.unlink()
            return False
    except OSError as error:
        raise ResourceError(f"tuning table {file} cannot be changed: {error}") from None


def _before(file: Path) -> Path:
    return file.with_name(f"{file.name}.before")


def agree(control: ControlPage, wanted: Fingerprint, timeout: float) -> TunedTable | None:
    """The table that all ranks have found, else None on all of them. Called by all ranks together."""
    table = load(wanted)
    digest = table.digest.hex() if table is not None else "none"
    try:
        control.require_equal(digest, "tuning table", timeout)
    except InvalidArgument as error:
        log.warning("ranks find different tuning tables (%s); the shipped ones decide on all", error)
        return None
    return table
