"""Mistakes in kraken's all-reduces and their barrier, as changes to the text of its files."""

import re
from dataclasses import dataclass
from pathlib import Path

ONE, TWO, BARRIER = "comm/one_shot_all_reduce.py", "comm/two_shot_all_reduce.py", "_ptx_utils/symm_mem_barrier.py"
EARLY = "race uninitialised"
_CALL = r" *ptx_utils\.symm_mem_sync\([^()]*\)\n"


@dataclass(frozen=True)
class Mutant:
    """`number`: which place that `pattern` matches is changed, from 1. `of`: the all-reduce that is called."""

    of: str
    name: str
    file: str
    pattern: str
    number: int
    instead: str
    kinds: str

    def put(self, package: Path) -> None:
        """Change the file in this copy of the package."""
        file = package / self.file
        text = file.read_text()
        places = list(re.finditer(self.pattern, text))
        assert len(places) >= self.number, f"{file} has {len(places)} places that match {self.pattern!r}"
        start, end = places[self.number - 1].span()
        file.write_text(text[:start] + self.instead + text[end:])


def _of(file: str, *rows: tuple[str, str, int, str, str], of: str = TWO) -> tuple[Mutant, ...]:
    return tuple(Mutant(of, name, file, pattern, number, new, kinds) for name, pattern, number, new, kinds in rows)


_BEFORE, _AFTER = r"hasPreviousMemAccess=True", r"hasSubsequentMemAccess=True"
MUTANTS = (
    *_of(
        ONE,
        ("no first barrier", _CALL, 1, "", EARLY),
        ("no barrier before the memory is used again", _CALL, 2, "", "race"),
        ("the first barrier acquires nothing", _AFTER, 1, "hasSubsequentMemAccess=False", "race"),
        ("the last barrier releases nothing", _BEFORE, 1, "", "race"),
        ("elements past the end", r"offsets < numel", 1, "offsets <= numel", "out_of_bounds"),
        of=ONE,
    ),
    *_of(
        TWO,
        ("no first barrier", _CALL, 1, "", EARLY),
        ("no second barrier", _CALL, 2, "", "race"),
        ("the first barrier releases nothing", _BEFORE, 1, "hasPreviousMemAccess=False", EARLY),
        ("the first barrier acquires nothing", _AFTER, 1, "hasSubsequentMemAccess=False", EARLY),
        ("the second barrier releases nothing", _BEFORE, 2, "hasPreviousMemAccess=False", "race"),
        ("the second barrier acquires nothing", _AFTER, 2, "hasSubsequentMemAccess=False", "race"),
        ("each rank reduces the same share", r"rank \* BLOCK_SIZE \+", 1, "", "race"),
    ),
    *_of(
        BARRIER,
        ("a signal in the GPU's scope", r"\{sem\}\.sys\.cas", 1, "{sem}.gpu.cas", f"scope {EARLY}"),
        ("a wait in the GPU's scope", r"global\.sys\.", 1, "global.gpu.", f"scope {EARLY}"),
        ("a relaxed signal", r'"release" if hasPreviousMemAccess else ', 1, "", EARLY),
        ("a relaxed wait", r'"acquire" if hasSubsequentMemAccess else ', 1, "", EARLY),
        ("a signal before the block's other threads", r"tl\.debug_barrier\(\)", 1, "pass", EARLY),
        ("accesses before the first threads' wait", r"tl\.debug_barrier\(\)", 2, "pass", EARLY),
        ("a signal in a wrong word", r"world_size \+ rank\b", 1, "world_size", "deadlock"),
        ("a wait in a wrong word", r"world_size \+ remote_ranks", 1, "world_size + remote_ranks * 0", "deadlock"),
        (
            "a wait in another block's word",
            r"local_signal_pad_addr \+ block_id",
            1,
            "local_signal_pad_addr + 1",
            f"deadlock {EARLY}",
        ),
        ("signals without an epoch", r"\], 1, 0;", 1, "], 1, 1;", "deadlock"),
        ("only one thread signals", r"flat_tid < world_size", 1, "flat_tid < 1", f"deadlock {EARLY}"),
    ),
)
