"""JSON to and from dataclasses; values that do not fit are refused with their place."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tricomm import typed_json
from tricomm.typed_json import WrongJson


@dataclass(frozen=True)
class Leaf:
    number: int
    share: float = 0.0

    def __post_init__(self) -> None:
        if self.number == 7:
            raise ValueError("seven is taken")


@dataclass(frozen=True)
class Tree:
    name: str
    open: bool = False
    leaves: tuple[Leaf, ...] = ()
    pair: tuple[int, str] | None = None
    words: Mapping[str, str] = field(default_factory=dict)
    by_rank: dict[int, str] = field(default_factory=dict)


_INTEGERS = st.integers(-(1 << 63), (1 << 63) - 1)
_LEAVES = st.builds(Leaf, _INTEGERS.filter(lambda n: n != 7), st.floats(allow_nan=False, allow_infinity=False))
_TREES = st.builds(
    Tree,
    st.text(),
    st.booleans(),
    st.lists(_LEAVES, max_size=3).map(tuple),
    st.none() | st.tuples(_INTEGERS, st.text()),
    st.dictionaries(st.text(), st.text(), max_size=2),
    st.dictionaries(_INTEGERS, st.text(), max_size=2),
)


@given(_TREES)
def test_written_values_are_read_unchanged(tree: Tree) -> None:
    assert typed_json.decode(json.dumps(asdict(tree)), Tree, strict=True) == tree


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", "Expecting property name"),
        ("[" * 100_000, "recursion"),
        (b"\xff", "decode"),
        ("[]", "an object is needed, found an array"),
        ("{}", "name is missing"),
        ('{"name": 1}', "name: text is needed, found an integer"),
        ('{"name": "\\ud800"}', "name: the text has half a character"),
        ('{"name": "a", "open": 1}', "open: true or false is needed, found an integer"),
        ('{"name": "a", "leaves": {}}', "leaves: an array is needed, found an object"),
        (
            '{"name": "a", "leaves": [{"number": 1}, {"number": true}]}',
            r"leaves\[1\].number: an integer is needed, found",
        ),
        ('{"name": "a", "leaves": [{"number": 1.0}]}', r"leaves\[0\].number: an integer is needed"),
        ('{"name": "a", "leaves": [{"number": 7}]}', r"leaves\[0\]: seven is taken"),
        ('{"name": "a", "leaves": [{"number": 9223372036854775808}]}', "an integer of 64 bits is needed"),
        ('{"name": "a", "leaves": [{"number": 1, "share": NaN}]}', "NaN is not finite"),
        ('{"name": "a", "leaves": [{"number": 1, "share": 1e999}]}', "1e999 is not finite"),
        ('{"name": "a", "leaves": [{"number": 1, "share": 1' + "0" * 400 + "}]}", "share: the number is too large"),
        ('{"name": "a", "pair": [1]}', "pair: 2 items are needed, found 1"),
        ('{"name": "a", "pair": [1, 2]}', r"pair\[1\]: text is needed"),
        ('{"name": "a", "words": {"b": null}}', r"words\['b'\]: text is needed, found null"),
        ('{"name": "a", "by_rank": {"b": "c"}}', r"by_rank\['b'\]: invalid literal"),
    ],
)
def test_values_that_do_not_fit_are_refused_with_their_place(text: str | bytes, said: str) -> None:
    with pytest.raises(WrongJson, match=said):
        typed_json.decode(text, Tree)


def test_unknown_fields_are_skipped_or_refused() -> None:
    assert typed_json.decode('{"name": "a", "more": 1}', Tree) == Tree("a")
    with pytest.raises(WrongJson, match="there is no field more"):
        typed_json.decode('{"name": "a", "more": 1}', Tree, strict=True)
