"""Names that a row of measurement has wherever it goes."""

from __future__ import annotations

OURS = "tricomm"  # the library that the others are compared with
PLACES = ("out_of_place", "in_place")
