"""What a kernel expects at the head of a rank's arena, and how the rest of it is divided. The same on all ranks.

    byte 0      group table   64-bit words: who am I, where are my peers, the epoch
    1024        headers       [phase][parity][source][block], one 64-bit word each
    ll          LL mailbox    [parity][source], `ll_room` bytes each; two words of 64 bits for 8 bytes of payload
    simple      mailbox       [parity][source], `simple_room` bytes each

Rooms are powers of two so that every tile that fits into a room at all divides it.
"""

from __future__ import annotations

import zlib
from dataclasses import astuple, dataclass

from tricomm.errors import InvalidArgument

MAX_WORLD_SIZE = 16
MAX_BLOCKS = 64
VERSION = 2
PHASES = 3  # headers that a block may send a peer in one epoch

# Words of the group table. Epoch, arrivals and busy are the kernels' own; the host writes them once, at the start.
RANK, CONTROL, LL_BASE, LL_ROOM, SIMPLE_BASE, SIMPLE_ROOM, EPOCH, ARRIVALS, BUSY = range(9)
PEERS = 16
# Of a hybrid cube mesh: the ranks of one's own quad and of the other one, by position (relay partners have the same),
# one's own position, and one's place among the quad's ranks in ascending order.
QUAD, OTHER, POSITION, PLACE = 32, 36, 40, 41
HEADERS = 1024

# Words of the control page that host and kernel share (host memory, mapped for a GPU).
ABORT, STATUS, STARTED, ENDED = range(4)

# Status codes in the low byte of the status word.
MISMATCH, OVERLAP, SPLITS = 2, 3, 4

EPOCH_LIMIT = 1 << 32
CLEAR_EVERY = 1 << 30
MIN_ARENA = 64 * 1024


@dataclass(frozen=True)
class Layout:
    """Offsets and sizes in bytes of one arena."""

    world_size: int
    nbytes: int
    ll: int
    ll_room: int
    simple: int
    simple_room: int

    @property
    def digest(self) -> int:
        """A 32-bit number that differs where two ranks would lay their arenas out differently."""
        return zlib.crc32(repr((VERSION, MAX_BLOCKS, HEADERS, astuple(self))).encode())

    def largest_tile(self, algorithm: str, protocol: str) -> int:
        """64-bit payload words of the largest tile that divides a room of this kernel."""
        if protocol == "ll":
            return self.ll_room // (32 if "two_shot" in algorithm else 16)
        return self.simple_room // (8 if algorithm == "one_shot" else 16)


def plan(world_size: int, arena_bytes: int) -> Layout:
    """Divide `arena_bytes` between the two mailboxes; raises `InvalidArgument` where it is too small for the group."""
    if not 1 <= world_size <= MAX_WORLD_SIZE:
        raise InvalidArgument(f"world_size={world_size}: 1 to {MAX_WORLD_SIZE} ranks are possible")
    ll = _up(HEADERS + 8 * PHASES * 2 * world_size * MAX_BLOCKS, 4096)
    per_slot = (arena_bytes - ll) // (4 * world_size)  # two mailboxes, two parities each, a slot per source
    if per_slot < 1024:
        least = max(MIN_ARENA, ll + 4 * world_size * 1024)
        raise InvalidArgument(
            f"arena_bytes={arena_bytes} is too small for {world_size} ranks: at least {least} bytes are needed"
        )
    room = 1 << (per_slot.bit_length() - 1)
    simple = ll + 2 * world_size * room
    return Layout(world_size, simple + 2 * world_size * room, ll, room, simple, room)


def _up(value: int, unit: int) -> int:
    return -(-value // unit) * unit
