"""Accesses of tricomm's own primitives that the detector's rules would report, and why each is correct.

store_ll    A plain store in the pure variant, because Triton before 3.9 has no relaxed store. It counts as a relaxed
            `.sys` store of 64 bits, like `st.relaxed.sys.v2.b64` of the PTX variant.
get_ll,     A volatile load, which is relaxed at `.sys`, and reads words that may be written at the same time. An LL
poll_planes word is one naturally aligned 64-bit access that contains its flag: a reader that sees the flag
            has the payload, so it needs no order with any other word. But no word may be overwritten before it has been
            read, which is checked instead (`Detector._ll_overwritten`).
put_wide,   The same in one access of 16 bytes (`wide_words`). It is relaxed at `.sys` in both variants, so no rule
get_wide    reports it. As for LL words, it is checked that none is overwritten before it has been read.
store_to_   Stores payload by pairs of words, relaxed in the PTX variant. A header publishes it, like plain stores. The
all         padding of the last pair may stay unread.
"""

from __future__ import annotations

from pathlib import Path

from tricomm.explorer.memory_model.source_lines import Site
from tricomm.kernels import multimem, primitives, wide_words
from tricomm.kernels.device import arrival, message_queues

_LL = ("store_ll", "get_ll", "poll_planes", "put_wide", "get_wide", "see_wide", "clear_wide", "store_wide", "load_wide")
_MODULES = (primitives, wide_words, message_queues, arrival, multimem)
_UNREAD = ("store_to_all",)
_files = {str(module.__file__) for module in _MODULES}


def copy_of(file: str) -> None:
    """Apply the same exceptions to another copy of one of these files, such as a mutant."""
    _files.add(file)


def present(file: str) -> str:
    """The present path of one of these files.

    Triton's cache keeps the path that a kernel was compiled from first: it may be of another copy of the same source,
    and that copy may be gone.
    """
    if file in _files:
        return file
    ours = tuple(str(module.__file__) for module in _MODULES)
    here = sorted((f for f in _files if Path(f).name == Path(file).name and Path(f).exists()), key=ours.__contains__)
    return next((f for f in here if not Path(file).exists() or _alike(f, file)), file)


def _alike(one: str, other: str) -> bool:
    return Path(one).read_bytes() == Path(other).read_bytes()


def is_ll(site: Site) -> bool:
    file, name = site.function
    return name in _LL and file in _files


def may_stay_unread(site: Site) -> bool:
    return any(name in _UNREAD and file in _files for file, _, name in site.chain)
