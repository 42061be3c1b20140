"""Parses values of a command line: sizes, durations, and names from a list."""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta

from tricomm.errors import InvalidArgument

_SECONDS = {"": 1.0, "s": 1.0, "m": 60.0, "h": 3600.0}
_HOURS = {"h": 1, "d": 24, "w": 168}
_WEEKDAYS = ("monday", "tuesday", "wednesday", "thursday", "friday", "saturday", "sunday")
DTYPES = dict(  # names of torch, nccl-tests and CUDA, and ours
    pair.split("=")
    for pair in (
        "double=float64 fp64=float64 float=float32 fp32=float32 half=float16 fp16=float16 bf16=bfloat16 "
        "fp8_e4m3=float8_e4m3fn f8e4m3=float8_e4m3fn fp8_e5m2=float8_e5m2 f8e5m2=float8_e5m2 "
        "long=int64 i64=int64 int=int32 i32=int32 short=int16 i16=int16 i8=int8 u8=uint8"
    ).split()
)
_BYTES = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}


def parse_sizes(text: str) -> tuple[int, ...]:
    """Bytes of `1K:1M:4` (first:last:factor) or of a comma list such as `1K,64K,1M`.

    Raises `InvalidArgument` for anything else, and for sizes below one byte or above 16 GiB.
    """
    if ":" not in text:
        sizes = [_size(part) for part in text.split(",")]
    else:
        parts = text.split(":")
        if len(parts) not in (2, 3) or (len(parts) == 3 and not re.fullmatch(r"\d{1,6}", parts[2])):
            raise InvalidArgument(f"sizes {text!r}: first:last:factor is needed, like 1K:1M:4, or a comma list")
        first, last, factor = _size(parts[0]), _size(parts[1]), int(parts[2]) if len(parts) == 3 else 2
        if first > last or factor < 2:
            raise InvalidArgument(f"sizes {text!r}: first must not exceed last, and the factor is 2 or more")
        sizes = [first]
        while sizes[-1] * factor <= last:
            sizes.append(sizes[-1] * factor)
    return tuple(dict.fromkeys(sizes))


def parse_range(
    sizes: str | None, first: str | None, last: str | None, factor: int | None, default: str
) -> tuple[int, ...]:
    """Bytes of `sizes`, or of nccl-tests' options: from `first` [1K] to `last` [first] by `factor` [2]; else `default`.

    Raises `InvalidArgument` as `parse_sizes`, and for both ways in one command.
    """
    if (first, last, factor) == (None, None, None):
        return parse_sizes(sizes or default)
    if sizes is not None:
        raise InvalidArgument(f"--sizes {sizes} and -b, -e or -f say the same; give one of the two")
    return parse_sizes(f"{first or '1K'}:{last or first or '1M'}:{factor or 2}")


def _size(text: str) -> int:
    match = re.fullmatch(r"\s*(\d{1,12})\s*([KMG]?)(?:i?B)?\s*", text, re.IGNORECASE)
    size = int(match[1]) * _BYTES[match[2].upper()] if match else 0
    if not 1 <= size <= 16 * _BYTES["G"]:
        raise InvalidArgument(f"size {text!r}: bytes from 1 to 16G are needed, with K, M or G for powers of 1024")
    return size


def parse_budget(text: str) -> float:
    """Seconds of `90`, `90s`, `5m`, `1h`. Raises `InvalidArgument`."""
    match = re.fullmatch(r"(\d{1,6}(?:\.\d{1,3})?)([smh]?)", text.strip())
    seconds = float(match[1]) * _SECONDS[match[2]] if match else 0.0
    if not 0 < seconds <= 86400.0:
        raise InvalidArgument(f"budget {text!r}: a time like 90s, 5m or 1h is needed, of a day at most")
    return seconds


def parse_when(text: str) -> tuple[str, str]:
    """Begin and end of the day `2026-01-31` or the latest `monday`; twice the same moment for an age (`7d`, `12h`) or
    `2026-01-31T18:00`. The text is local time, the result as the history's dates are. Raises `InvalidArgument`, also
    for a time to come."""
    word, begin, whole = text.strip().lower(), datetime.now(), timedelta(days=1)
    if age := re.fullmatch(r"(\d{1,4})([hdw])", word):
        begin, whole = begin - timedelta(hours=int(age[1]) * _HOURS[age[2]]), timedelta()
    elif word in _WEEKDAYS:
        begin -= timedelta(days=(begin.weekday() - _WEEKDAYS.index(word)) % 7)
        begin = datetime.combine(begin, datetime.min.time())
    else:
        try:
            begin, whole = datetime.fromisoformat(text.strip()), timedelta(days="T" not in text)
            begin.astimezone(UTC)
        except (ValueError, OverflowError):  # the first and the last year have no such moment in every zone
            raise InvalidArgument(f"date {text!r}: 7d, 12h, a weekday or a date like 2026-01-31 is needed") from None
    if _utc(begin) > _utc(datetime.now()):
        raise InvalidArgument(f"date {text!r}: it is in the future")
    return _utc(begin), _utc(begin + whole)


def _utc(moment: datetime) -> str:
    return moment.astimezone(UTC).isoformat(timespec="seconds")


def parse_names(
    text: str, allowed: tuple[str, ...], kind: str, aliases: Mapping[str, str] | None = None
) -> tuple[str, ...]:
    """The names of a comma list, each of them in `allowed`, or an alias of one that is; `all` stands for all.

    Raises `InvalidArgument`.
    """
    names = allowed if text == "all" else [part.strip() for part in text.split(",")]
    return tuple(dict.fromkeys(parse_name(name, allowed, kind, aliases) for name in names))


def parse_name(text: str, allowed: tuple[str, ...], kind: str, aliases: Mapping[str, str] | None = None) -> str:
    """`text` if it is one of `allowed`, or the name of which it is an alias; otherwise raises `InvalidArgument` with
    the nearest name and the list."""
    name = (aliases or {}).get(text, text)
    if name not in allowed:
        others = {alias: meant for alias, meant in (aliases or {}).items() if meant in allowed}
        near = difflib.get_close_matches(text, allowed, n=1) or difflib.get_close_matches(text, others, n=1)
        near = near or [each for each in others if text and each.startswith(text)]
        meant = f" (did you mean {others.get(near[0], near[0])}?)" if near else ""
        raise InvalidArgument(f"{kind} {text!r} is unknown{meant}; there is {', '.join(allowed)}")
    return name
