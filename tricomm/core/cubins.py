"""Prebuilt machine code in files; each kernel is found by the key of its sources, compiler and architecture.

    DIRECTORY/sm_90-triton3.9.0-<digest of the kernels' sources>/all_reduce_one_shot-<key>.json

DIRECTORY is one of `TRICOMM_CUBINS`, or the installed package `tricomm_cubins`, whose files are trusted like code.
Triton's cache is not used, because its keys contain the version of ptxas, which Triton runs to get it, and absolute
paths; a machine that only runs the kernels has neither. The key (`compiler.key_of`) consists of the other parts of
Triton's key. A file that is broken, or that other users could have written, is not used: there is one warning, and the
kernel is compiled.
"""

from __future__ import annotations

import base64
import hashlib
import importlib.util
import json
import logging
import os
import zlib
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import triton

from tricomm import env, kernels, typed_json
from tricomm.errors import InvalidArgument, ResourceError
from tricomm.store import files

log = logging.getLogger("tricomm")
VARIABLE, PACKAGE = "TRICOMM_CUBINS", "tricomm_cubins"
_SCHEMA = 1
_MOST_BYTES = 16 << 20  # of a file, and of a cubin: hundreds of times the size of any
_said: set[str] = set()


class Metadata(NamedTuple):
    """The part of Triton's metadata that a launch needs."""

    name: str
    num_warps: int
    shared: int
    global_scratch_size: int = 0
    profile_scratch_size: int = 0


class Prebuilt(NamedTuple):
    """Replaces Triton's compiled kernel in a launch."""

    asm: dict[str, bytes]
    metadata: Metadata
    instead: Any = None  # function of a reason and the arguments of `compile_kernel` that compiles the kernel


@dataclass(frozen=True)
class _File:
    """A file: `cubin` is compressed, in base 64; `sha256` is of everything else."""

    schema: int
    key: str
    name: str
    num_warps: int
    shared: int
    cubin: str
    sha256: str = ""

    def digest(self) -> str:
        values = asdict(self) | {"sha256": ""}
        return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()


@cache
def folder_name(capability: int) -> str:
    """The folder of machine code that these sources and this Triton make for an architecture."""
    sources, root = hashlib.sha256(), Path(kernels.__file__).parent
    for file in sorted(root.rglob("*.py")):
        sources.update(file.relative_to(root).as_posix().encode() + b"\0" + file.read_bytes() + b"\0")
    return f"sm_{capability}-triton{triton.__version__}-{sources.hexdigest()[:12]}"


def save(directory: Path, name: str, key: str, capability: int, compiled: Any) -> int:
    """Write Triton's `compiled` kernel for `find`, whole or not at all; returns the file's bytes. Raises `OSError`."""
    metadata, packed = compiled.metadata, zlib.compress(compiled.asm["cubin"], 9)
    if metadata.global_scratch_size or metadata.profile_scratch_size:
        raise ResourceError(f"{name}: Triton wants scratch memory (a profiler's?), which no launch gives")
    file = _File(_SCHEMA, key, metadata.name, metadata.num_warps, metadata.shared, base64.b64encode(packed).decode())
    text = json.dumps(asdict(file) | {"sha256": file.digest()}).encode()
    folder = directory / folder_name(capability)
    for each in (directory, folder):
        each.mkdir(mode=0o755, parents=True, exist_ok=True)
        files.check_directory(each)
    files.replace(_path(folder, name, key), text)
    return len(text)


def saved(directory: Path, name: str, key: str, capability: int) -> int:
    """Bytes of the file that `save` has written; 0 if there is none, or a broken one."""
    path = _path(directory / folder_name(capability), name, key)
    try:
        _read(path, key, trusted=False)
        return path.stat().st_size
    except (OSError, ValueError, zlib.error):
        return 0


def find(name: str, key: str, capability: int) -> Prebuilt | None:
    """The machine code of a kernel; None if no directory has it, or only a broken file. Raises nothing."""
    for directory, trusted in _directories():
        folder = directory
        try:
            folder = directory / folder_name(capability)
            if not trusted:
                files.check_directory(directory)
            if not folder.is_dir():
                say(f"{directory} {_others(directory)}; this process needs {folder.name}")
                continue
            if not trusted:
                files.check_directory(folder)
            return _read(_path(folder, name, key), key, trusted)
        except FileNotFoundError as error:
            missing = f"has no {name} for some calls" if folder.is_dir() and folder != directory else error.strerror
            say(f"{directory}: {missing}")
        except (OSError, ValueError, zlib.error) as error:
            say(f"{getattr(error, 'filename', None) or _path(folder, name, key)}: {_why(error)}")
    return None


def check() -> None:
    """Raises `InvalidArgument` for a directory in `TRICOMM_CUBINS` that does not exist."""
    for directory, trusted in _directories():
        if not trusted and not directory.is_dir():
            raise InvalidArgument(f"{VARIABLE}: there is no directory {directory}")
        if not trusted:
            files.refuse_shared(directory, "machine code")


def _directories() -> list[tuple[Path, bool]]:
    """The directories to search, in order, and for each whether its files are trusted like this code."""
    given = [(Path(part), False) for part in (env.text(VARIABLE) or "").split(os.pathsep) if part]
    try:
        package = importlib.util.find_spec(PACKAGE)
    except (ImportError, ValueError) as error:
        say(f"package {PACKAGE}: {error}")
        return given
    if package is None or package.origin is None:  # without an `__init__.py` it could be any folder of that name
        return given
    return given + [(Path(part), True) for part in package.submodule_search_locations or ()]


def _others(directory: Path) -> str:
    there = sorted(path.name for path in directory.iterdir() if path.name.startswith("sm_"))
    return f"has machine code for {', '.join(there)} alone" if there else "has no machine code"


def _read(path: Path, key: str, trusted: bool) -> Prebuilt:
    if trusted:
        with path.open("rb") as stream:
            text = stream.read(_MOST_BYTES + 1)
    else:
        text = files.read(path, _MOST_BYTES, root=True, shared=False)
    return _prebuilt(text, key)


def content(path: Path) -> bytes:
    """A file that `save` has written. Raises `OSError` for one that other users can change, and as `_prebuilt`."""
    files.check_directory(path.parent)
    text = files.read(path, _MOST_BYTES, root=True, shared=False)
    key = typed_json.decode(text, _File, strict=True).key
    if path != _path(path.parent, path.stem.rpartition("-")[0], key):
        raise ValueError("it is of another kernel than its name says")
    _prebuilt(text, key)
    return text


def _prebuilt(text: bytes, key: str) -> Prebuilt:
    """The code in `text`, the file of the kernel of `key`. Raises `ValueError` or `zlib.error` for any other file."""
    file = typed_json.decode(text, _File, strict=True)
    if file.schema != _SCHEMA or file.key != key or file.sha256 != file.digest():
        raise ValueError("it is broken, or of another kernel")
    cubin = zlib.decompressobj().decompress(base64.b64decode(file.cubin, validate=True), _MOST_BYTES)
    return Prebuilt({"cubin": cubin}, Metadata(file.name, file.num_warps, file.shared))


def _path(folder: Path, name: str, key: str) -> Path:
    return folder / f"{name}-{key[:24]}.json"


def _why(error: Exception) -> str:
    return (error.strerror if isinstance(error, OSError) else None) or str(error)


def say(text: str) -> None:
    """Warn, once per process, that prebuilt code is not used."""
    if text not in _said:
        _said.add(text)
        log.warning("prebuilt machine code: %s; a kernel that is not found elsewhere has to be compiled", text)
