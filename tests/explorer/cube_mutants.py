"""The table of mutants, fourth part: two hops in a hybrid cube mesh of eight (`kernels/device/mesh.py`)."""

from __future__ import annotations

import torch

from tests.explorer import bodies
from tests.explorer.mutation import Body, Edit, Key, Mutant
from tricomm.kernels.collectives.registry import CUBE_RANKS
from tricomm.topology.model import Topology
from tricomm.topology.presets import dgx1v

L = ("all_reduce", "hybrid_cube_mesh", "ll")
S = ("all_reduce", "hybrid_cube_mesh", "simple")
T = ("all_reduce", "hybrid_cube_mesh_two_shot", "simple")
GL = ("all_gather", "hybrid_cube_mesh", "ll")
GS = ("all_gather", "hybrid_cube_mesh", "simple")
READ_BY_ALL = ("all_reduce", "one_shot", "simple")

FILE = "kernels/device/mesh.py"
LL = "kernels/collectives/all_reduce_hybrid_cube_mesh_ll.py"
SIMPLE = "kernels/collectives/all_reduce_hybrid_cube_mesh_simple.py"
TWO_SHOT = "kernels/collectives/all_reduce_hybrid_cube_mesh_two_shot_simple.py"
GATHER_LL = "kernels/collectives/all_gather_hybrid_cube_mesh_ll.py"
GATHER = "kernels/collectives/all_gather_hybrid_cube_mesh_simple.py"

# One of the quads has its ranks at other positions than they have places.
OTHERWISE = dgx1v().of([7, 2, 5, 0, 1, 3, 6, 4])
RACE, DEADLOCK = frozenset({"race"}), frozenset({"deadlock"})
WRONG = frozenset({"wrong_result"})
_KEEP = "kept = simple_room(group, group, epoch, RELAYED + n, RANKS) + half"
_OVER_THE_LINK = "simple_room(group, peer(group, relay(group)), epoch, RELAYED + n, RANKS)"
_SUM = "sums = accumulate(parts, ELEMENT, OP, BITS, 4)"
_SEND = (
    "        tl.debug_barrier()\n        send_headers_to(group, mask, epoch, call, PHASE, True, RANKS, LANES, PTX)\n"
)
_GAIN = "send(group, epoch, call, 1, True, False, False, LANES, PTX)"
_SEEN = "status = wait(group, epoch, call, 1, True, False, False, LANES, PTX)"
_RELAY = "            send(group, epoch, call, 0, False, True, "
_AGAIN = "            send(group, epoch, call, 1, True, False, "
_MET_LL = "        status = wait(group, epoch, call, 0, True, False, True, LANES, PTX)\n        if status == 0:\n"
_MET = "status = wait(group, epoch, call, 0, True, False, False, LANES, PTX)"


def _mutant(
    name: str, title: str, bug: str, edits: tuple[Edit, ...], keys: Key | tuple[Key, ...], expect: frozenset[str],
    advice: str = "", *, sizes: tuple[int, ...] = (3,), dtype: torch.dtype = torch.int64, body: Body | None = None,
    topology: Topology | None = None,
) -> Mutant:  # fmt: skip
    keys = (keys,) if isinstance(keys[0], str) else keys
    return Mutant(
        name, title, bug, edits, keys, expect, advice, schedules=2, world_size=CUBE_RANKS, sizes=sizes, dtype=dtype,
        body=body, topology=topology,
    )  # fmt: skip


CUBES = (
    _mutant(
        "C01", "cube: the quad is not waited for", "its shares are summed before they have come",
        (Edit(SIMPLE, _MET, "status = 0"),), S, RACE, "no flag tells rank",
    ),
    _mutant(
        "C02", "cube: no block barrier before a header", "other lanes' pushes are not ordered",
        (Edit(FILE, _SEND, _SEND.partition("\n")[2]),), S, RACE, "put tl.debug_barrier() before the release",
    ),
    _mutant(
        "C03", "cube: no block barrier after a header", "other lanes read before one has acquired",
        (Edit(FILE, "    if not LL:\n        tl.debug_barrier()\n", ""),), S, RACE,
        "put tl.debug_barrier() after the acquire",
    ),
    _mutant(
        "C04", "cube: the relay's header is relaxed", "what crosses between the quads is not published",
        (Edit(FILE, _SEND, _SEND.replace("True", "TO_QUAD")),), S, RACE, "make it sem='release'",
    ),
    _mutant(
        "C05", "cube: the relay's sum over the own one", "both sums of a pair in one place",
        (Edit(SIMPLE, _OVER_THE_LINK, f"{_OVER_THE_LINK} + half"),), S, RACE,
    ),
    _mutant(
        "C06", "cube: the own sum where the relay writes", "both sums of a pair in one place",
        (
            Edit(SIMPLE, _KEEP, _KEEP.removesuffix(" + half")),
            Edit(SIMPLE, "load_tile(room + half, first", "load_tile(room, first"),
        ),
        S, RACE,
    ),
    _mutant(
        "C07", "cube: summed by position, not by place", "a quad's order is that of its ranks, whoever is linked how",
        (Edit(SIMPLE, "place = tl.load(group + PLACE)", "place = tl.load(group + PLACE - 1)"),), S, WRONG,
        body=bodies.cube_floats, topology=OTHERWISE, dtype=torch.float32,
    ),
    _mutant(
        "C08", "cube: summed from the own place on", "ranks of a quad hold different bits",
        (Edit(SIMPLE, "simple_room(group, group, epoch, n, RANKS)",
              "simple_room(group, group, epoch, (place + n) % 4, RANKS)"),),
        S, frozenset({"rank_mismatch"}), body=bodies.cube_floats, dtype=torch.float32,
    ),
    _mutant(
        "C09", "cube: a quad's sum is rounded before it crosses", "16-bit floats are rounded once, at the end",
        (Edit(SIMPLE, _SUM, "sums = accumulate((finish(accumulate(parts, ELEMENT, OP, BITS, 4), ELEMENT, OP, BITS, 4),)"
              ", ELEMENT, OP, BITS, 1)"),),
        S, WRONG, body=bodies.cube_floats, dtype=torch.bfloat16,
    ),
    _mutant(
        "C10", "cube: relays by place, not by position", "who writes to whom is not the same at both ends of a link",
        (Edit(FILE, "tl.load(group + OTHER + tl.load(group + POSITION))",
              "tl.load(group + OTHER + tl.load(group + PLACE))"),),
        S, DEADLOCK, topology=OTHERWISE,
    ),
    _mutant(
        "C11", "LL cube: the relay's sum in a room of the quad", "a room has one writer",
        (Edit(LL, "epoch, RELAYED + n, first, RANKS)", "epoch, RELAYED - 1 + n, first, RANKS)"),),
        L, frozenset({"race", "deadlock"}),
    ),
    _mutant(
        "C12", "LL cube: the relay's header is not waited for", "a flag that nobody reads is there for the next call",
        (Edit(LL, "            status = wait(group, epoch, call, 0, False, True, True, LANES, PTX)\n",
              "            status = 0\n"),),
        L, frozenset({"leftover"}),
    ),
    _mutant(
        "C13", "cube two-shot: one header for both phases of a quad", "the last barrier finds the first one's flag",
        (Edit(TWO_SHOT, _GAIN, _GAIN.replace("call, 1", "call, 0")),
         Edit(TWO_SHOT, _SEEN, _SEEN.replace("call, 1", "call, 0"))),
        T, RACE, "no flag tells rank",
    ),
    _mutant(
        "C14", "cube two-shot: results over shards", "a relay's header does not say that the quad has read",
        (
            Edit(TWO_SHOT, "epoch, position, RANKS) + half", "epoch, position, RANKS)"),
            Edit(TWO_SHOT, "epoch, position ^ step, RANKS) + half", "epoch, position ^ step, RANKS)"),
        ),
        T, RACE, "two buffers used in turn",
    ),
    _mutant(
        "C15", "cube two-shot: a shard belongs to a place", "both ends of a relay link own the same shard",
        (Edit(TWO_SHOT, "tl.load(group + PLACE), tl.load(group + POSITION)",
              "tl.load(group + PLACE), tl.load(group + POSITION + 1)"),),
        T, frozenset({"wrong_result", "uninitialised", "race"}), topology=OTHERWISE,
    ),
    _mutant(
        "C16", "cube gather: the quad is not met again", "what it passes on is copied before it has come",
        (Edit(GATHER, _GAIN, "pass"), Edit(GATHER, _SEEN, "status = 0")), GS, RACE, "no flag tells rank",
    ),
    _mutant(
        "C17", "cube gather: the relay's row goes to the own room", "rooms go by whose the data are, not by who sends",
        (Edit(GATHER, "simple_room(group, peer(group, in_quad(group, step)), epoch, source, RANKS)",
              "simple_room(group, peer(group, in_quad(group, step)), epoch, me, RANKS)"),),
        GS, frozenset({"wrong_result", "uninitialised"}),
    ),
    _mutant(
        "C18", "LL cube gather: no wait for the second headers", "a flag that nobody reads is there for the next call",
        (Edit(GATHER_LL, "            status = wait(group, epoch, call, 1, True, False, True, LANES, PTX)\n",
              "            status = 0\n"),),
        GL, frozenset({"leftover"}),
    ),
    # Between calls that let ranks without a link write to each other, or read.
    _mutant(
        "C19", "LL cube: the relay's header is relaxed", "it stands for the whole quad, which a relaxed flag cannot",
        (Edit(LL, _RELAY, f"{_RELAY}True or "),),
        (READ_BY_ALL, L, READ_BY_ALL), RACE, "two buffers used in turn", sizes=(3, 3, 3), body=bodies.in_turn,
    ),
    _mutant(
        "C20", "LL cube: the relay's header before the quad's are seen", "it does not say that all eight have come",
        (Edit(LL, _MET_LL + _RELAY, f"{_RELAY[4:]}False, LANES, PTX)\n{_MET_LL[:-2]} & (epoch == 0):\n{_RELAY}"),),
        (READ_BY_ALL, L, READ_BY_ALL), RACE, "two buffers used in turn", sizes=(3, 3, 3), body=bodies.in_turn,
    ),
    _mutant(
        "C21", "LL cube gather: the second headers are relaxed", "they stand for the relays, too",
        (Edit(GATHER_LL, _AGAIN, f"{_AGAIN}True or "),),
        (READ_BY_ALL, GL, READ_BY_ALL), RACE, "two buffers used in turn", sizes=(3, 3, 3), body=bodies.in_turn,
    ),
)  # fmt: skip
