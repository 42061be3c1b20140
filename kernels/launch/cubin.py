"""Facts about the kernels of a cubin, read from the sections of the ELF file as CUDA's driver does."""

from __future__ import annotations

import struct
from collections.abc import Iterator

_PARAMETER = 0x17  # EIATTR_KPARAM_INFO
_WITH_VALUE = 0x04  # EIFMT_SVAL: the value follows, after its size


def parameters(cubin: bytes, function: str) -> list[tuple[int, int]] | None:
    """(offset, size) in bytes of each parameter of `function`, in its order; None if the cubin has no such kernel."""
    info = _section(cubin, f".nv.info.{function}")
    if info is None:
        return None
    by_ordinal = {}
    for kind, value in _attributes(info):
        if kind == _PARAMETER:
            _, ordinal, offset, bits = struct.unpack_from("<IHHI", value)
            by_ordinal[ordinal] = offset, bits >> 18
    return [by_ordinal[n] for n in sorted(by_ordinal)]


def static_shared(cubin: bytes, function: str) -> int:
    """Bytes of static shared memory of `function`."""
    header = _header(cubin, f".nv.shared.{function}")  # the section has a size, but no data in the file
    return 0 if header is None else header[5]


def registers(cubin: bytes, function: str) -> int | None:
    """Registers of a thread of `function`; None if the cubin does not say."""
    header = _header(cubin, f".text.{function}")
    return None if header is None else header[7] >> 24 or None


def instructions(cubin: bytes, function: str) -> int | None:
    """The number of machine instructions of `function` without padding; None if there is no such kernel.

    Each has 16 bytes since Volta.
    """
    code = _section(cubin, f".text.{function}")
    if code is None:
        return None
    words = [code[n : n + 16] for n in range(0, len(code), 16)]
    return len(words) - words.count(words[-1])


def _section(cubin: bytes, wanted: str) -> bytes | None:
    header = _header(cubin, wanted)
    return None if header is None else cubin[header[4] : header[4] + header[5]]


def _header(cubin: bytes, wanted: str) -> tuple[int, ...] | None:
    """Elf64_Shdr up to sh_info: the offset is its fifth, the size its sixth."""
    (table,) = struct.unpack_from("<Q", cubin, 0x28)
    size, count, names = struct.unpack_from("<HHH", cubin, 0x3A)
    sections = [struct.unpack_from("<IIQQQQII", cubin, table + n * size) for n in range(count)]
    strings = sections[names][4]
    for header in sections:
        at = strings + header[0]
        if cubin[at : cubin.index(b"\0", at)].decode() == wanted:
            return header
    return None


def _attributes(info: bytes) -> Iterator[tuple[int, bytes]]:
    at = 0
    while at < len(info):
        form, kind, value = struct.unpack_from("<BBH", info, at)
        at += 4
        if form == _WITH_VALUE:
            yield kind, info[at : at + value]
            at += value
