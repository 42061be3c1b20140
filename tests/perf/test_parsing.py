"""Sizes as a command line gives them."""

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


def test_the_sizes_of_nccl_tests() -> None:
    assert parsing.parse_range(None, "1K", "1M", 4, "8") == parsing.parse_sizes("1K:1M:4")
    assert parsing.parse_range(None, "64K", None, None, "8") == (65536,)
    assert parsing.parse_range(None, None, "4K", None, "8") == (1024, 2048, 4096)
    assert parsing.parse_range(None, None, None, None, "8") == parsing.parse_range("8", None, None, None, "1K") == (8,)


def test_types_have_the_names_of_torch_and_of_nccl_tests() -> None:
    known = tuple("float16,float32,float64,bfloat16,float8_e4m3fn,float8_e5m2,int8,int32,uint8".split(","))
    aliases = "half,fp32,double,bf16,fp8_e4m3,f8e5m2,i8,int,u8"
    assert parsing.parse_names(aliases, known, "dtype", parsing.DTYPES) == known
    assert parsing.parse_names("fp32,float32,float", known, "dtype", parsing.DTYPES) == ("float32",)
    with pytest.raises(InvalidArgument, match="dtype 'int64' is unknown"):
        parsing.parse_name("int64", known, "dtype", parsing.DTYPES)
    with pytest.raises(InvalidArgument, match="dtype 'long' is unknown"):
        parsing.parse_name("long", known, "dtype", parsing.DTYPES)
