"""The memory accesses of a compiled kernel, read from its TTGIR, PTX and SASS. Needs no GPU.

Every global access is attributed to the source line that it was inlined from: PTX carries `.loc`, the disassembly
carries the same line table, and the TTGIR says whether that line accesses a tile or one word.
"""

from __future__ import annotations

import re
import struct
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from tricomm.errors import ResourceError

Line = tuple[str, int]

_FILE = re.compile(r'^\s*\.file\s+(\d+)\s+"([^"]+)"', re.M)
_LOC = re.compile(r"^\s*\.loc\s+(\d+)\s+(\d+)\s+\d+")
_PTX = re.compile(r"\b(multimem\.ld_reduce|multimem\.st|ld|st|atom|red)((?:\.[\w:]+)+)")
_SASS_LINE = re.compile(r'^\s*//## File "([^"]+)", line (\d+)')
_SASS = re.compile(r"^\s*/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9]*)((?:\.[A-Z0-9_x]+)*)")
_LOADS = ("LDG", "LD", "LDGMC")
_BITS = {"256": 256, "128": 128, "64": 64, "U16": 16, "S16": 16, "U8": 8, "S8": 8}
_LOCAL = re.compile(r"/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?(LDL|STL)\b")


@dataclass(frozen=True)
class MemoryInstruction:
    """One global memory instruction: its source line, its width in bits, and its full mnemonic."""

    line: Line
    store: bool
    bits: int
    mnemonic: str

    @property
    def order(self) -> str | None:
        """Memory order in PTX: acquire, release, acq_rel, relaxed, or None for a weak or volatile access."""
        return next((p for p in ("acq_rel", "acquire", "release", "relaxed") if f".{p}" in self.mnemonic), None)

    @property
    def system(self) -> bool:
        """True if the access is ordered across GPUs (`.sys` in PTX, `STRONG.SYS` in SASS)."""
        return ".sys" in self.mnemonic or "STRONG.SYS" in self.mnemonic


@dataclass(frozen=True)
class Resources:
    """Registers per thread, stack and static shared memory in bytes, and local loads and stores in SASS."""

    registers: int
    stack: int
    shared: int
    spill_loads: int
    spill_stores: int


def plain_lines(ptx: str) -> str:
    """`ptx` with one source line for each piece of inline assembly.

    LLVM counts the lines of a piece as lines of the Python source, and nearly every access that Triton emits is the
    second or third line of such a piece.
    """
    kept, inside, placed = [], False, False
    for text in ptx.splitlines():
        if "// begin inline asm" in text:
            inside, placed = True, False
        elif "// end inline asm" in text:
            inside = False
        elif inside and _LOC.match(text):
            if placed:
                continue
            placed = True
        kept.append(text)
    return "\n".join(kept) + "\n"


def text_of(cubin: bytes) -> dict[str, bytes]:
    """The machine code of a cubin: the contents of its `.text` sections, by name."""
    table = struct.unpack_from("<Q", cubin, 40)[0]
    size, count, names = struct.unpack_from("<HHH", cubin, 58)
    heads = [struct.unpack_from("<IIQQQQ", cubin, table + i * size) for i in range(count)]
    first = heads[names][4]
    sections = {}
    for name, _, _, _, offset, length in heads:
        start = first + name
        label = cubin[start : cubin.index(b"\0", start)].decode()
        if label.startswith(".text"):
            sections[label] = cubin[offset : offset + length]
    return sections


def ptx_accesses(ptx: str) -> list[MemoryInstruction]:
    """Every global load, store and atomic of `ptx`, in order."""
    names = {number: path for number, path in _FILE.findall(ptx)}
    accesses, line = [], ("", 0)
    for text in ptx.splitlines():
        location = _LOC.match(text)
        if location:
            line = (_name(names.get(location[1], "")), int(location[2]))
            continue
        for kind, suffix in _PTX.findall(text.split("//")[0]):
            if ".global" in suffix:
                accesses.append(MemoryInstruction(line, "ld" not in kind, _ptx_bits(suffix), kind + suffix))
    return accesses


def _ptx_bits(suffix: str) -> int:
    vector = re.search(r"\.v(\d)", suffix)
    element = re.search(r"\.(?:[busf]|bf)(\d+)(x2)?$", suffix)
    bits = int(element[1]) * (2 if element[2] else 1) if element else 0
    return (int(vector[1]) if vector else 1) * bits


def sass_accesses(sass: str) -> list[MemoryInstruction]:
    """Every global load, store and atomic of a disassembly with line information (`disassemble`), in order."""
    instructions = (sass_access(text, line) for text, line in sass_lines(sass))
    return [instruction for instruction in instructions if instruction is not None]


def sass_lines(sass: str) -> Iterator[tuple[str, Line]]:
    """The labels and instructions of a disassembly, each with the innermost source line of its inlining."""
    line, fresh = ("", 0), True
    for text in sass.splitlines():
        location = _SASS_LINE.match(text)
        if location:
            if fresh:  # the first of a run of these comments
                line = (_name(location[1]), int(location[2]))
            fresh = False
        elif _SASS.match(text):
            fresh = True
            yield text, line
        elif text.startswith(".L"):
            yield text, line


def sass_access(text: str, line: Line) -> MemoryInstruction | None:
    """The instruction if it accesses global memory, else None."""
    instruction = _SASS.match(text)
    if instruction is None or instruction[1] not in (*_LOADS, "STG", "ST", "ATOM", "ATOMG", "RED", "REDG"):
        return None
    name, suffix = instruction[1], instruction[2]
    bits = next((_BITS[p] for p in suffix.split(".") if p in _BITS), 32)
    packed = re.search(r"\.B?F(16|32)x(\d)|\.[SU]?64", suffix)  # of LDGMC
    if name == "LDGMC" and packed:
        bits = int(packed[1]) * int(packed[2]) if packed[1] else 64
    return MemoryInstruction(line, name not in _LOADS, bits, name + suffix)


def tile_lines(ttgir: str) -> set[Line]:
    """Source lines that access a tile, of which every thread has its own elements; other lines move one word."""
    names = dict(re.findall(r"^(#loc\d*) = loc\((.*)\)$", ttgir, re.M))
    lines = set()
    for text in ttgir.splitlines():
        if re.search(r"tt\.(load|store|atomic_\w+|elementwise_inline_asm)\b", text) and "tensor<" in text:
            location = re.search(r"loc\((#loc\d*)\)$", text)
            lines.add(_resolve(names, location[1]) if location else ("", 0))
    return lines


def _resolve(names: dict[str, str], alias: str) -> Line:
    for _ in range(64):
        text = names.get(alias, "")
        location = re.match(r'"([^"]+)":(\d+):\d+', text)
        if location:
            return _name(location[1]), int(location[2])
        inner = re.search(r"#loc\d*", text)  # callsite(callee at caller), "name"(place): the first is the innermost
        if inner is None:
            break
        alias = inner[0]
    return "", 0


@cache
def _name(path: str) -> str:
    return str(Path(path).resolve()) if path else ""


def disassemble(cubin: bytes) -> str:
    """SASS of `cubin` with the line table; empty if Triton's disassembler no longer knows an architecture that its
    compiler still does (sm_70). Raises `ResourceError` if Triton's own tools are missing or fail."""
    try:
        return _tool("nvdisasm", cubin, "-gi")
    except ResourceError as error:
        if "is deprecated" not in str(error):
            raise
        return ""


def resources(cubin: bytes, sass: str, shared: int) -> Resources:
    """Registers and stack as the loader sees them; spills are counted in `sass`, because a stack has other uses."""
    usage = _tool("cuobjdump", cubin, "--dump-resource-usage")
    numbers = {n: int(v) for n, v in re.findall(r"\b(REG|STACK|LOCAL):(\d+)", usage)}
    if "REG" not in numbers:
        raise ResourceError(f"cuobjdump gave no resource usage; it said {usage[-200:]!r}")
    local = _LOCAL.findall(sass)
    stack = max(numbers.get("STACK", 0), numbers.get("LOCAL", 0))
    return Resources(numbers["REG"], stack, shared, local.count("LDL"), local.count("STL"))


def _tool(name: str, cubin: bytes, *flags: str) -> str:
    import triton

    path = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / name
    if not path.exists():
        raise ResourceError(f"{name} is not part of this Triton ({path.parent.parent} has no bin/{name})")
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        done = subprocess.run([str(path), *flags, file.name], capture_output=True, text=True, timeout=120)
    if done.returncode:
        raise ResourceError(f"{name} failed with exit code {done.returncode}: {done.stderr.strip()[-500:]}")
    return done.stdout
