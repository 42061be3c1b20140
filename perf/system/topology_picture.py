"""A topology as text: a table as of `nvidia-smi topo -m`, its kind, and the quads of a cube mesh."""

from __future__ import annotations

from collections.abc import Sequence

from tricomm.perf import text_table
from tricomm.topology import mesh
from tricomm.topology.model import Topology

_WORDS = {
    "nvswitch": "every pair through NVSwitches",
    "fully_connected": "NVLink between every pair",
    "hybrid_cube_mesh": "two linked quads, joined GPU by GPU",
    "pairs": "NVLink between bridged pairs only",
    "pcie": "no NVLink",
    "partial": "NVLink between some pairs",
}
_MEANINGS = {
    "X": "itself",
    "=": "the same device",
    "NV#": "so many NVLinks",
    "NVS": "NVLinks through NVSwitches",
    "PCI": "peer access without NVLink (PIX to SYS; which one is unknown)",
    "-": "no peer access",
    "!": "linked, but without peer access",
}


def draw(topology: Topology, notes: Sequence[str] = (), fabric: Sequence[str] = ()) -> str:
    """Lines of text without a newline at the end. The device of the row reaches the device of the column."""
    size = range(len(topology))
    cells = [[_cell(topology, i, j) for j in size] for i in size]
    shared = len(set(topology.devices)) < len(topology)
    labels = [f"{rank}:GPU{device}" if shared else f"GPU{device}" for rank, device in enumerate(topology.devices)]
    rows = [[label, *row] for label, row in zip(labels, cells, strict=True)]
    widest = max(len(text) for row in rows for text in row)
    lines = text_table.lines(["", *labels], rows, right=["", *labels], indent=2, cell=widest)
    used = {symbol for row in cells for text in row for symbol in _symbols(text)}
    lines += ["", "; ".join(f"{symbol} {words}" for symbol, words in _MEANINGS.items() if symbol in used)]
    lines += ["", _devices(topology)]
    lines += [f"kind    {topology.kind}: {_WORDS[topology.kind]}", f"digest  {topology.digest}"]
    lines += _quads(topology)
    states = sorted(set(fabric))
    lines += [f"fabric  {', '.join(states)}"] if states else []
    return "\n".join(lines + [f"note    {note}" for note in notes])


def _cell(topology: Topology, i: int, j: int) -> str:
    if i == j:
        return "X"
    if topology.devices[i] == topology.devices[j]:
        return "="
    links, reach = topology.links[i][j], topology.peers[i][j]
    if not links:
        return "PCI" if reach else "-"
    return ("NVS" if topology.switched else f"NV{links}") + ("" if reach else "!")


def _symbols(cell: str) -> list[str]:
    bare = cell.rstrip("!")
    return [bare if bare in _MEANINGS else "NV#", *cell[len(bare) :]]


def _devices(topology: Topology) -> str:
    distinct, size = len(set(topology.devices)), range(len(topology))
    names = ", ".join(sorted(set(topology.names) - {""}))
    text = f"{distinct} {'device' if distinct == 1 else 'devices'}{f' ({names})' if names else ''}"
    if distinct < len(topology):
        return f"{len(topology)} ranks on {text}"
    counts = sorted({topology.links[i][j] for i in size for j in size if i != j})
    return text + (f", {' to '.join(map(str, counts))} NVLinks a pair" if topology.switched else "")


def _quads(topology: Topology) -> list[str]:
    """The two quads as squares with their diagonals, positions 0 1 over 2 3, and the link of each to its relay."""
    positions = mesh.positions(topology.links)
    if positions is None:
        return []
    near = positions[0].quad_by_position
    a, b, c, d = near
    e, f, g, h = (positions[rank].relay for rank in near)
    pairs = [(rank, positions[rank].relay) for rank in near]
    relays = ", ".join(f"{rank} =NV{topology.links[rank][relay]}= {relay}" for rank, relay in pairs)
    return [
        "",
        f"    {a} --- {b}       {e} --- {f}",
        "    | \\ / |       | \\ / |",
        "    | / \\ |       | / \\ |",
        f"    {c} --- {d}       {g} --- {h}",
        "",
        f"relays  {relays}",
    ]
