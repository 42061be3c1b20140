"""Which versions of an engine an adapter has been tested with."""

from __future__ import annotations

import re
from dataclasses import dataclass


@dataclass(frozen=True)
class VersionRange:
    """Minor versions, as (0, 32), from `first` to `last`, both included."""

    first: tuple[int, int]
    last: tuple[int, int]

    def refusal(self, engine: str, version: str) -> str | None:
        """Why an adapter leaves this version of `engine` alone; None if it is inside the range."""
        found = re.match(r"(\d+)\.(\d+)", version)
        if found is not None and self.first <= (int(found[1]), int(found[2])) <= self.last:
            return None
        first, last = ("{}.{}".format(*bound) for bound in (self.first, self.last))
        return (
            f"{engine} {version} is outside the range that this version of tricomm was tested with, {first} to {last}; "
            "install one of those, or a newer tricomm"
        )
