"""Maps an instruction of PTX to its Python lines, by `.file` and `.loc`."""

from __future__ import annotations

import re

from tricomm.explorer.ptx.instructions import SourceLine

_FILE = re.compile(r'\.file\s+(\d+)\s+"([^"]*)"')
_LOC = re.compile(
    r"\.loc\s+(\d+)\s+(\d+)(?:\s+(\d+))?"
    r"(?:\s*,\s*function_name\s+([\w$]+)[^,]*,\s*inlined_at\s+(\d+)\s+(\d+)(?:\s+(\d+))?)?"
)
_STRINGS = re.compile(r"\.section\s+\.debug_str\s*\{(.*?)^\s*\}", re.S | re.M)

Place = tuple[str, str, str | None]


class SourceMap:
    """Tracks the Python lines of the current statement: `present`, innermost first.

    `kernel` is the current kernel. Triton gives inlined functions the name of the kernel. This name says nothing, so it
    is left out.

    LLVM counts the lines of inline assembly as if they were lines of the Python source, and Triton's loads and stores
    are the second or third line of such assembly. So only the first location within it counts. Line 0 means "no line in
    particular" in LLVM, so the previous line stays.
    """

    def __init__(self, text: str) -> None:
        self.present: tuple[SourceLine, ...] = ()
        self.kernel = ""
        self._files = dict(_FILE.findall(text))
        self._names = _info_strings(text)
        self._chains: dict[Place, tuple[SourceLine, ...]] = {}
        self._inline = False
        self._placed = False

    def begin_inline(self) -> None:
        self._inline, self._placed = True, False

    def end_inline(self) -> None:
        self._inline = False

    @property
    def inline(self) -> bool:
        """True if the current statement is part of inline assembly."""
        return self._inline

    def location(self, text: str) -> None:
        """Read one `.loc` directive."""
        match = _LOC.match(text)
        if match is None or (self._inline and self._placed):
            return
        self._placed = True
        file, line, column, function, *caller = match.groups()
        outer = self._chains.get((caller[0], caller[1], caller[2]), ()) if function else ()
        chain = outer
        if line != "0":
            named = self._names.get(function)
            chain = (SourceLine(self._files.get(file, ""), int(line), None if named == self.kernel else named), *outer)
        self._chains[file, line, column] = chain
        if line != "0":
            self.present = chain


def _info_strings(text: str) -> dict[str | None, str]:
    """For each label, the string in the debug section."""
    section = _STRINGS.search(text)
    names: dict[str | None, str] = {}
    label, data = None, bytearray()
    for row in section[1].splitlines() if section else ():
        row = row.split("//")[0].strip()
        if row.endswith(":"):
            label, data = row[:-1], bytearray()
        elif row.startswith(".b8") and label is not None:
            data += bytes(int(number, 0) & 255 for number in row[3:].split(","))
            if 0 in data:
                names[label] = data.split(b"\0")[0].decode(errors="replace")
    return names
