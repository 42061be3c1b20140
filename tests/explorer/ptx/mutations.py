"""Small changes to a kernel's PTX: a barrier, a fence, an order, a scope or a width removed, a flag before its data.

A mutation keeps the number of lines, so that a finding's PTX line is also that line of the original kernel.
"""

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass

_MEMORY = re.compile(r"\b(st|ld|atom|red)((?:\.\w+(?:::\w+)*)+)")
_ACCESS = re.compile(
    r"(?P<guard>@!?[%\w]+\s+)?(?P<what>ld|st)(?P<how>(?:\.\w+(?:::\w+)*)*\.global(?:\.v(?P<number>\d))?)\.b(?P<bits>\d+)"
    r"\s+(?P<operands>[^;]*);"
)
_BARRIER = re.compile(r"\b(?:bar|barrier)(?:\.cta)?\.sync(?:\.aligned)?\s+([^;]*);")
_FENCE = re.compile(r"\b(?:fence|membar)[\w.:]*\s*;")
_ATOM = re.compile(
    r"(?P<guard>@!?[%\w]+\s+)?atom\.global\S*\.add\.u64\s+(?P<old>[%\w]+),\s*(?P<at>\[[^\]]*\]),\s*(?P<by>[%\w]+);"
)
# A change must be reported by at least one of these kinds.
RACE = frozenset({"race"})
SCOPE = frozenset({"scope", "race"})
TORN = frozenset({"race", "wrong_result", "rank_mismatch"})
BROKEN = frozenset({"race", "wrong_result", "rank_mismatch", "deadlock", "leftover", "exception", "uninitialised"})


@dataclass(frozen=True)
class Mutation:
    """`apply` gives the changed text of the kernel that `mutations` was called with.

    kind        what is taken away: "barrier", "order", "scope", "strength", "fence", "width", "sequence", "atomicity"
    expected    kinds of finding
    line        of the change in the PTX text, from 1
    """

    kind: str
    name: str
    expected: frozenset[str]
    line: int
    apply: Callable[[str], str]


def mutations(text: str) -> list[Mutation]:
    """Every single change to `text`, the PTX of one kernel, in the order of lines."""
    results: list[Mutation] = []
    for number, row in enumerate(text.splitlines(), 1):
        code = row.split("//")[0]
        for make in (_barriers, _fences, _orders, _widths, _atomics):
            results += make(code, number)
    return sorted([*results, *_sequences(text), *_copied_polls(text)], key=lambda m: (m.line, m.kind, m.name))


def _change(kind: str, name: str, expected: frozenset[str], line: int, new: str) -> Mutation:
    """Line `line` becomes `new`."""

    def apply(text: str) -> str:
        rows = text.splitlines()
        rows[line - 1] = new
        return "\n".join(rows) + "\n"

    return Mutation(kind, f"{line}: {name}", expected, line, apply)


def _spliced(code: str, match: re.Match[str], new: str) -> str:
    return code[: match.start()] + new + code[match.end() :]


def _barriers(code: str, line: int) -> Iterator[Mutation]:
    for match in _BARRIER.finditer(code):
        yield _change("barrier", f"{match[0]} removed", RACE, line, _spliced(code, match, ""))
        yield _change("barrier", f"{match[0]} by the warp", RACE, line, _spliced(code, match, "bar.warp.sync -1;"))


def _fences(code: str, line: int) -> Iterator[Mutation]:
    for match in _FENCE.finditer(code):
        yield _change("fence", f"{match[0]} removed", RACE, line, _spliced(code, match, ""))


def _orders(code: str, line: int) -> Iterator[Mutation]:
    """Weaker orders, smaller scopes, and a weak access instead of a strong one."""
    for match in _MEMORY.finditer(code):
        old, words = match[0], match[2].split(".")[1:]
        weaker = {"acq_rel": ("acquire", "release", "relaxed"), "acquire": ("relaxed",), "release": ("relaxed",)}
        for word in words:
            for new in weaker.get(word, ()):
                text = old.replace(f".{word}", f".{new}")
                yield _change("order", f"{old} -> {text}", RACE, line, _spliced(code, match, text))
            if word in ("sys", "gpu"):
                text = old.replace(f".{word}", {"sys": ".gpu", "gpu": ".cta"}[word])
                yield _change("scope", f"{old} -> {text}", SCOPE, line, _spliced(code, match, text))
        if match[1] in ("ld", "st"):
            text = re.sub(r"\.(volatile|relaxed|acquire|release|sys|gpu|cta)\b", "", old)
            if text != old:
                yield _change("strength", f"{old} -> {text}", RACE, line, _spliced(code, match, text))


def _widths(code: str, line: int) -> Iterator[Mutation]:
    """A strong access of 64 bits, or of a pair of them, in pieces. Halves of 64 bits are harmless in an LL word."""
    for match in _ACCESS.finditer(code):
        bits, number = int(match["bits"]), int(match["number"] or 1)
        if bits == 64 and re.search(r"\.(volatile|relaxed|acquire|release)\b", match["how"]):
            text = _halved(match, number)
            yield _change(
                "width", f"{match['what']}{match['how']}.b64 by 32 bits", TORN, line, _spliced(code, match, text)
            )


def _halved(match: re.Match[str], number: int) -> str:
    guard, how = match["guard"] or "", match["how"].replace(f".v{number}", "") if number > 1 else match["how"]
    operands = match["operands"]
    address = re.search(r"\[\s*([%\w]+)\s*(?:\+\s*(-?\d+))?\s*\]", operands)
    assert address is not None
    values = re.findall(r"[%\w]+", operands.replace(address[0], ""))
    base, offset = address[1], int(address[2] or 0)
    parts = [".reg .b32 low, high;"]
    for position, value in enumerate(values):
        places = [f"[{base}+{offset + 8 * position + 4 * half}]" for half in (0, 1)]
        if match["what"] == "st":
            parts.append(f"mov.b64 {{low, high}}, {value};")
            parts += [
                f"{guard}st{how}.b32 {place}, {half};" for place, half in zip(places, ("low", "high"), strict=True)
            ]
        else:
            parts += [
                f"{guard}ld{how}.b32 {half}, {place};" for place, half in zip(places, ("low", "high"), strict=True)
            ]
            parts.append(f"{guard}mov.b64 {value}, {{low, high}};")
    return "{ " + " ".join(parts) + " }"


def _atomics(code: str, line: int) -> Iterator[Mutation]:
    """A counter that is loaded and stored."""
    for match in _ATOM.finditer(code):
        guard, old, at, by = match["guard"] or "", match["old"], match["at"], match["by"]
        parts = f"{guard}ld.relaxed.gpu.global.b64 {old}, {at}; {guard}add.u64 next, {old}, {by};"
        text = f"{{ .reg .b64 next; {parts} {guard}st.relaxed.gpu.global.b64 {at}, next; }}"
        yield _change("atomicity", "atom.add as a load and a store", BROKEN, line, _spliced(code, match, text))


def _sequences(text: str) -> Iterator[Mutation]:
    """Move a release before the barrier that completes the data, or an acquire after the one that guards the reads."""
    rows = text.splitlines()
    barriers = [number for number, row in enumerate(rows) if _BARRIER.search(row.split("//")[0])]
    for number, row in enumerate(rows):
        earlier = [n for n in barriers if n < number] if "st.release" in row else []
        later = [n for n in barriers if n > number] if "ld.acquire" in row else []
        if earlier:
            yield _moved(number, earlier[-1], "flag before data")
        if later:
            yield _moved(number, later[0], "data before flag")


def _moved(access: int, barrier: int, name: str) -> Mutation:
    """Move the barrier of row `barrier` across the access of row `access`."""

    def apply(text: str) -> str:
        rows = text.splitlines()
        result = _BARRIER.search(rows[barrier])
        assert result is not None
        rows[barrier] = _spliced(rows[barrier], result, "")
        ends = (rows[access], result[0]) if barrier < access else (result[0], rows[access])
        rows[access] = "\t".join(end.strip() for end in ends)
        return "\n".join(rows) + "\n"

    return Mutation("sequence", f"{access + 1}: {name}", BROKEN, access + 1, apply)


def _copied_polls(text: str) -> Iterator[Mutation]:
    """Flags and payload of LL words from two loads, as Triton 3.6 to 3.8 copied inline assembly."""
    rows = text.splitlines()
    for number, row in enumerate(rows):
        match = re.search(r"(ld\.volatile\.global\.v2\.b64) \{ (%\w+), (%\w+) \}, (\[[^\]]*\]);", row)
        if match is None:
            continue
        word = f"{re.escape(match[2])}|{re.escape(match[3])}"
        flag = re.compile(rf"mov\.b64\s+\{{(%\w+), (%\w+)\}}, ({word});")
        if any(flag.search(other) for other in rows):
            yield _copied(match, number, flag)


def _copied(match: re.Match[str], number: int, flag: re.Pattern[str]) -> Mutation:
    def apply(text: str) -> str:
        second = {match[2]: "%flag0", match[3]: "%flag1"}
        rows = [
            flag.sub(
                lambda word: f"mov.b64 {{{word[1]}, _}}, {word[3]}; mov.b64 {{_, {word[2]}}}, {second[word[3]]};", row
            )
            for row in text.splitlines()
        ]
        rows[number] = f"\t{match[0]} {match[1]} {{ %flag0, %flag1 }}, {match[4]};"
        first = next(n for n, row in enumerate(rows) if row.strip().startswith(".reg"))
        rows[first] += " .reg .b64 %flag0, %flag1;"
        return "\n".join(rows) + "\n"

    return Mutation("sequence", f"{number + 1}: flags from a second load", TORN, number + 1, apply)
