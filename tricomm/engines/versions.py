"""The versions of an engine with which an adapter has been tested."""

from __future__ import annotations

import re
from dataclasses import dataclass


@dataclass(frozen=True)
class VersionRange:
    """From `first` to `last`, both included, such as (0, 32) for all of 0.32, or (0, 5, 23)."""

    first: tuple[int, ...]
    last: tuple[int, ...]

    def refusal(self, engine: str, version: str) -> str | None:
        """The reason why an adapter does not support this version of `engine`; None if it is inside the range."""
        match = re.match(r"\d+(\.\d+)*", version)
        numbers = tuple(map(int, match[0].split("."))) if match is not None else ()
        if self.first <= numbers[: len(self.first)] <= self.last:
            return None
        first, last = (".".join(map(str, bound)) for bound in (self.first, self.last))
        return (
            f"{engine} {version} is outside the range that this version of tricomm was tested with, {first} to {last}; "
            "install one of those, or a newer tricomm"
        )
