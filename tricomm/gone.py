"""Names that were removed, and their replacements. Code that reads a name from a user checks this table first."""

from __future__ import annotations

from collections.abc import Sequence

from tricomm.errors import InvalidArgument

_BETWEEN_NODES = "NCCL (Gloo on CPUs) runs the calls of a group that spans nodes"
_AT_ONCE = "for calls at the same time make a second communicator, comm.split(range(comm.world_size))"

# The key is the name in errors: of an option, an argument, a field of a file, a command with its option.
GONE = {
    "Options(two_level)": f"leave it out; {_BETWEEN_NODES}",
    "Options(channels)": f"leave it out; {_AT_ONCE}",
    "Options(max_registers)": "Options(beside_compute=True) limits kernels to 128 registers a thread",
    "Options(blocks)": "max_blocks limits the grid; a table sets it by size (tricomm tune)",
    "Options(tile)": "a table sets tiles by size (tricomm tune)",
    "Options(first_epoch)": "leave it out; only tests set it",
    "algorithm='two_level'": f"leave the algorithm open; {_BETWEEN_NODES}",
    "tricomm predict --nodes": f"leave it out; {_BETWEEN_NODES}, and predict knows one node",
    "tricomm tune export": "`tricomm tune show` prints the tables with their files, which are JSON",
    "tricomm evidence": "`make gpu-evidence` writes one summary and one archive (devtools/notes/evidence.md)",
    "islands of a topology": "leave the field out; no kernel distinguishes the ranks of a node",
}


def refuse(*names: str) -> None:
    """Raises `InvalidArgument` if one of `names` is gone."""
    for name in names:
        if name in GONE:
            raise InvalidArgument(f"{name} is gone: {GONE[name]}")


def command(words: Sequence[str]) -> str:
    """The replacement, in words, for a removed name in a command line that was refused; empty if it has none."""
    given = {"tricomm", *(word.partition("=")[0] for word in words)}
    gone = (name for name in GONE if name.startswith("tricomm ") and given.issuperset(name.split()))
    return next((f"{name} is gone: {GONE[name]}" for name in gone), "")
