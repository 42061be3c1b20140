"""The table of mutants, fourth part: two hops in a hybrid cube mesh of eight (`kernels/device/mesh.py`)."""

from functools import partial

import torch

from tests.explorer import bodies
from tests.explorer.mutant_tables.names import RACE, WRONG, both
from tests.explorer.mutant_tables.names import S as READ_BY_ALL
from tests.explorer.mutation import Edit, Mutant
from tests.topology.shapes import dgx1v
from tricomm.kernels.collectives.registry import CUBE_RANKS

L, S = both("all_reduce", "hybrid_cube_mesh")
T = ("all_reduce", "hybrid_cube_mesh_two_shot", "simple")
GL, GS = both("all_gather", "hybrid_cube_mesh")

FILE = "kernels/device/mesh.py"
REDUCE = "kernels/collectives/all_reduce_hybrid_cube_mesh.py"
TWO_SHOT = "kernels/collectives/all_reduce_hybrid_cube_mesh_two_shot.py"
GATHER = "kernels/collectives/all_gather_hybrid_cube_mesh.py"

# In one quad the positions of the ranks differ from their places.
OTHERWISE = dgx1v().of([7, 2, 5, 0, 1, 3, 6, 4])
_KEEP = "kept = simple_buffer(chunk, table_of(group), mesh.RELAYED + n, SPEC) + half"
_OVER_THE_LINK = "simple_buffer(chunk, peer(group, mesh.relay(group)), mesh.RELAYED + n, SPEC)"
_SUM = "sums = accumulate(parts, 4, SPEC)\n            for n in tl.static_range(PARTS):\n                kept"
_PUBLISH = "    tl.debug_barrier()\n    send_headers_to(chunk.group, mask, chunk.epoch, chunk.call, PHASE, True,"
_RELAXED = "    if not SPEC.LL:\n    " + _PUBLISH.replace("True", "not SPEC.LL")
_GAIN = "mesh.send_headers(chunk, 1, True, False, SPEC)"
_SEEN = "status = mesh.wait_headers(chunk, 1, True, False, SPEC)"
_MET = (
    "    mesh.send_headers(chunk, 0, True, False, SPEC)\n    status = mesh.wait_headers(chunk, 0, True, False, SPEC)\n"
)
_MET_LL = "    status = mesh.wait_headers(chunk, 0, True, False, SPEC)\n    if status == 0:\n    "
_RELAY = "    mesh.send_headers(chunk, 0, False, True, SPEC)\n"
_RELAY_SEEN = "        status = mesh.wait_headers(chunk, 0, False, True, SPEC)\n    first"
_AGAIN = "        status = mesh.wait_headers(chunk, 1, True, False, SPEC)\n    for step"
# Two schedules of short calls, because eight ranks take long.
_mutant = partial(Mutant, schedules=2, world_size=CUBE_RANKS, sizes=(3,))

CUBES = (
    _mutant(
        "C01", "cube: no wait for the quad", "its shares are summed before they have come",
        (Edit(REDUCE, _MET, "    mesh.send_headers(chunk, 0, True, False, SPEC)\n    status = 0\n"),), (S,), RACE,
        "no flag tells rank",
    ),
    _mutant(
        "C02", "cube: no block barrier before a header", "other lanes' pushes are not ordered",
        (Edit(FILE, _PUBLISH, _PUBLISH.partition("\n")[2]),), (S,), RACE, "put tl.debug_barrier() before the release",
    ),
    _mutant(
        "C03", "cube: no block barrier after a header", "other lanes read before one has acquired",
        (Edit(FILE, "    if not SPEC.LL:\n        tl.debug_barrier()\n", ""),), (S,), RACE,
        "put tl.debug_barrier() after the acquire",
    ),
    _mutant(
        "C04", "cube: the relay's header is relaxed", "what crosses between the quads is not published",
        (Edit(FILE, _PUBLISH, _PUBLISH.replace("True", "TO_QUAD")),), (S,), RACE, "make it sem='release'",
    ),
    _mutant(
        "C05", "cube: the relay's sum over the own one", "both sums of a pair in one place",
        (Edit(REDUCE, _OVER_THE_LINK, f"{_OVER_THE_LINK} + half"),), (S,), RACE,
    ),
    _mutant(
        "C06", "cube: the own sum where the relay writes", "both sums of a pair in one place",
        (
            Edit(REDUCE, _KEEP, _KEEP.removesuffix(" + half")),
            Edit(REDUCE, "load_tile(buffer + half, first", "load_tile(buffer, first"),
        ),
        (S,), RACE,
    ),
    _mutant(
        "C07", "cube: summed by position, not by place", "a quad is added in rank order, whatever the links are",
        (Edit(REDUCE, "tl.load(table_of(group) + mesh.QUAD_RANK)", "tl.load(table_of(group) + mesh.QUAD_RANK - 1)"),),
        (S,), WRONG, body=bodies.cube_floats, topology=OTHERWISE, dtype=torch.float32,
    ),
    _mutant(
        "C08", "cube: summed from the own place on", "ranks of a quad hold different bits",
        (Edit(REDUCE, "simple_buffer(chunk, table_of(group), n, SPEC)",
              "simple_buffer(chunk, table_of(group), (quad_rank + n) % 4, SPEC)"),),
        (S,), frozenset({"rank_mismatch"}), body=bodies.cube_floats, dtype=torch.float32,
    ),
    _mutant(
        "C09", "cube: a quad's sum is rounded before it crosses", "16-bit floats are rounded once, at the end",
        (Edit(REDUCE, _SUM, _SUM.replace("accumulate(parts, 4, SPEC)",
                                        "accumulate((finish(accumulate(parts, 4, SPEC), SPEC),), 1, SPEC)")),),
        (S,), WRONG, body=bodies.cube_floats, dtype=torch.bfloat16,
    ),
    _mutant(
        "C10", "cube: relays by place, not by position", "who writes to whom is not the same at both ends of a link",
        (Edit(FILE, "tl.load(table + PEER_QUAD + tl.load(table + POSITION))",
              "tl.load(table + PEER_QUAD + tl.load(table + QUAD_RANK))"),),
        (S,), frozenset({"race", "deadlock"}), topology=OTHERWISE,
    ),
    _mutant(
        "C11", "LL cube: the relay's sum in a buffer of the quad", "a buffer has one writer",
        (Edit(REDUCE, "mesh.RELAYED + n, first, SPEC)", "mesh.RELAYED - 1 + n, first, SPEC)"),),
        (L,), frozenset({"race", "deadlock"}),
    ),
    _mutant(
        "C12", "LL cube: no wait for the relay's header", "an unread flag is there for the next call",
        (Edit(REDUCE, _RELAY_SEEN, "        status = 0\n    first"),),
        (L,), frozenset({"leftover"}),
    ),
    _mutant(
        "C13", "cube two-shot: one header for both phases of a quad", "the last barrier finds the first one's flag",
        (Edit(TWO_SHOT, _GAIN, _GAIN.replace("1", "0")),
         Edit(TWO_SHOT, _SEEN, _SEEN.replace("1", "0"))),
        (T,), RACE, "no flag tells rank",
    ),
    _mutant(
        "C14", "cube two-shot: results over shards", "a relay's header does not say that the quad has read",
        (
            Edit(TWO_SHOT, "position, SPEC) + half", "position, SPEC)"),
            Edit(TWO_SHOT, "position ^ step, SPEC) + half", "position ^ step, SPEC)"),
        ),
        (T,), RACE, "two buffers used in turn",
    ),
    _mutant(
        "C15", "cube two-shot: a shard belongs to a place", "both ends of a relay link own the same shard",
        (Edit(TWO_SHOT, "tl.load(table_of(group) + mesh.POSITION)", "tl.load(table_of(group) + mesh.POSITION + 1)"),),
        (T,), frozenset({"wrong_result", "uninitialised", "race"}), topology=OTHERWISE,
    ),
    _mutant(
        "C16", "cube gather: the quad is not met again", "what it passes on is copied before it has come",
        (Edit(GATHER, f"{_GAIN}\n        {_SEEN}", "status = 0"),), (GS,), RACE, "no flag tells rank",
    ),
    _mutant(
        "C17", "cube gather: the relay's row in the own buffer", "buffers are by rank of data, not by sender",
        (Edit(GATHER, "simple_buffer(chunk, peer(group, mesh.in_quad(group, step)), source, SPEC)",
              "simple_buffer(chunk, peer(group, mesh.in_quad(group, step)), me, SPEC)"),),
        (GS,), frozenset({"wrong_result", "uninitialised"}),
    ),
    _mutant(
        "C18", "LL cube gather: no wait for the second headers", "an unread flag is there for the next call",
        (Edit(GATHER, _AGAIN, "        status = 0\n    for step"),),
        (GL,), frozenset({"leftover"}),
    ),
    # Between calls that let ranks without a link write to each other, or read.
    _mutant(
        "C19", "LL cube: the relay's header is relaxed", "it stands for the whole quad, which a relaxed flag cannot",
        (Edit(FILE, _PUBLISH, _RELAXED),),
        (READ_BY_ALL, L, READ_BY_ALL), RACE, "two buffers used in turn", sizes=(3, 3, 3), body=bodies.in_turn,
    ),
    _mutant(
        "C20", "LL cube: the relay's header before the quad's are seen", "it does not say that all eight have come",
        (Edit(REDUCE, _MET_LL + _RELAY, _RELAY + _MET_LL.partition("    if")[0]),),
        (READ_BY_ALL, L, READ_BY_ALL), RACE, "two buffers used in turn", sizes=(3, 3, 3), body=bodies.in_turn,
    ),
    _mutant(
        "C21", "LL cube gather: the second headers are relaxed", "they stand for the relays, too",
        (Edit(FILE, _PUBLISH, _RELAXED),),
        (READ_BY_ALL, GL, READ_BY_ALL), RACE, "two buffers used in turn", sizes=(3, 3, 3), body=bodies.in_turn,
    ),
)  # fmt: skip
