"""Sizes as a command line gives them."""

from __future__ import annotations

import pytest

from tricomm.errors import InvalidArgument
from tricomm.perf import parsing


@pytest.mark.parametrize(
    ("text", "sizes"),
    [
        ("1K:1M:4", (1024, 4096, 16384, 65536, 262144, 1048576)),
        ("1K:5K:4", (1024, 4096)),
        ("8:32", (8, 16, 32)),
        ("1k,64KB,1MiB,1K", (1024, 65536, 1048576)),
        ("7", (7,)),
    ],
)
def test_sizes(text: str, sizes: tuple[int, ...]) -> None:
    assert parsing.parse_sizes(text) == sizes


_BAD = ["", "x", "0", "-4", "1K:", "4K:1K:2", "1:9:1", "1:9:0", "1:2:3:4", "17G", "1T", "1.5K"]


@pytest.mark.parametrize("text", _BAD)
def test_bad_sizes_are_refused(text: str) -> None:
    with pytest.raises(InvalidArgument, match="size"):
        parsing.parse_sizes(text)
