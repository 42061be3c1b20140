"""Splits PTX text into statements, without comments and debug sections."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from tricomm.errors import InvalidArgument

_STOP = re.compile(r'//[^\n]*|/\*.*?\*/|"[^"\n]*"|[;{}\n]', re.S)
_LABEL = re.compile(r"\s*([A-Za-z_$%][\w$]*)\s*:(?!:)")
# Directives that end with their line; all others end with a semicolon or a brace.
_LINE_ENDS = re.compile(r"\s*\.(?:version|target|address_size|file|loc)\b")
_HEADER = re.compile(r"\.(?:entry|func)\b")
_BEGIN_INLINE, _END_INLINE = "// begin inline asm", "// end inline asm"


@dataclass(frozen=True, slots=True)
class Statement:
    """A statement of PTX text, or a mark.

    `kind` is "statement", "label", "header" (of a function; "open" follows), "open", "close", "inline" or "plain".
    "inline" and "plain" mark the begin and the end of inline assembly.
    """

    kind: str
    text: str
    line: int


def statements(text: str) -> Iterator[Statement]:
    """The statements of PTX `text` without their semicolons. Raises `InvalidArgument` if the text ends within one."""
    reader = _Reader()
    position = 0
    for match in _STOP.finditer(text):
        yield from reader.read(text[position : match.start()], match[0])
        position = match.end()
    yield from reader.read(text[position:], "\n")
    reader.finish()


class _Reader:
    """The state of reading: `depth` is the depth of scopes, `braces` of braces within the present statement, and
    `skipping` of braces within a section that is skipped."""

    def __init__(self) -> None:
        self.line = self.first = 1
        self.pending = ""
        self.depth = self.braces = self.skipping = 0

    def read(self, piece: str, stop: str) -> Iterator[Statement]:
        """The statements that are complete after `piece` (text without a line end) and the `stop` character after
        it."""
        if self.skipping:
            self._skip(stop)
            return
        if piece.strip():
            if not self.pending:
                self.first = self.line
            self.pending += piece
        if stop == ";":
            yield from self._labels()
            if self.braces:
                raise InvalidArgument(f"PTX line {self.first}: a brace is not closed in {self._flat()!r}")
            yield from self._statement("statement")
        elif stop == "\n":
            yield from self._line_end()
        elif stop == "{":
            yield from self._open()
        elif stop == "}":
            yield from self._close()
        elif stop.startswith('"'):
            if not self.pending:
                self.first = self.line
            self.pending += stop
        else:
            if stop.startswith(_BEGIN_INLINE) or stop.startswith(_END_INLINE):
                yield Statement("inline" if stop.startswith(_BEGIN_INLINE) else "plain", "", self.line)
            if self.pending:
                self.pending += " "
            self.line += stop.count("\n")

    def finish(self) -> None:
        if self.pending.strip():
            raise InvalidArgument(f"PTX line {self.first}: the text ends within {self._flat()!r}; it was cut")
        if self.depth or self.skipping:
            raise InvalidArgument(f"PTX line {self.line}: the text ends within braces; it was cut")

    def _line_end(self) -> Iterator[Statement]:
        if self.pending:
            yield from self._labels()
            if _LINE_ENDS.match(self.pending):
                yield from self._statement("statement")
            elif self.pending:
                self.pending += " "
        self.line += 1

    def _open(self) -> Iterator[Statement]:
        yield from self._labels()
        if self.braces or (self.pending and not _HEADER.search(self.pending) and ".section" not in self.pending):
            self.braces += 1
            self.pending += "{"
        elif ".section" in self.pending:
            self.pending, self.skipping = "", 1
        else:
            yield from self._statement("header")
            self.depth += 1
            yield Statement("open", "", self.line)

    def _close(self) -> Iterator[Statement]:
        if self.braces:
            self.braces -= 1
            self.pending += "}"
            return
        yield from self._labels()
        if self.pending.strip():
            raise InvalidArgument(f"PTX line {self.first}: no semicolon after {self._flat()!r}")
        if not self.depth:
            raise InvalidArgument(f"PTX line {self.line}: a closing brace without an opening one")
        self.depth -= 1
        yield Statement("close", "", self.line)

    def _skip(self, stop: str) -> None:
        self.skipping += (stop == "{") - (stop == "}")
        self.line += stop.count("\n")

    def _labels(self) -> Iterator[Statement]:
        while self.pending and not self.braces and (label := _LABEL.match(self.pending)):
            yield Statement("label", label[1], self.first)
            self.pending = self.pending[label.end() :].lstrip()
            self.first = self.line

    def _statement(self, kind: str) -> Iterator[Statement]:
        text, self.pending = self._flat(), ""
        if text:
            yield Statement(kind, text, self.first)

    def _flat(self) -> str:
        return " ".join(self.pending.split())
