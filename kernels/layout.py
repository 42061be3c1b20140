"""What a kernel expects at the head of a rank's arena, and how the rest of it is divided. The same on all ranks.

    byte 0      group table   64-bit words: who am I, where are my peers, the epoch
    1024        headers       [phase][parity][source][block], one 64-bit word each
    ll          LL mailbox    [parity][source], `ll_room` bytes each; two words of 64 bits for 8 bytes of payload
    simple      mailbox       [parity][source], `simple_room` bytes each
    lines       of messages   [rank][channel], 16 words each: headers of what comes, acks of what went, own counters
    slots       of messages   [source][channel][slot], `slot` bytes each

Rooms and slots are powers of two so that every tile that fits into one at all divides it.
"""

from __future__ import annotations

import zlib
from dataclasses import astuple, dataclass

from tricomm.errors import InvalidArgument

MAX_WORLD_SIZE = 16
MAX_BLOCKS = 64
VERSION = 3
PHASES = 3  # headers that a block may send a peer in one epoch

# Words of the group table. Epoch, arrivals and busy are the kernels' own; the host writes them once, at the start.
RANK, CONTROL, LL_BASE, LL_ROOM, SIMPLE_BASE, SIMPLE_ROOM, EPOCH, ARRIVALS, BUSY = range(9)
MESSAGE_ARRIVALS, LINES, SLOT_DATA, SLOT_BYTES, CHANNELS = range(9, 14)
PEERS = 16
# Of a hybrid cube mesh: the ranks of one's own quad and of the other one, by position (relay partners have the same),
# one's own position, and one's place among the quad's ranks in ascending order.
QUAD, OTHER, POSITION, PLACE = 32, 36, 40, 41
HEADERS = 1024

# A line of messages: a header of two words for each slot, an ack for each, and the numbers of the next piece to send
# and of the first one not taken, with a bit for each one behind it that was; a bit for each slot with plain data in it.
SLOTS = 4
LINE = 128
ACKS, SENT, NEXT, TAKEN, PLAIN = 8, 12, 13, 14, 15
MAX_CHANNELS = 16

# Words of the control page that host and kernel share (host memory, mapped for a GPU). Of messages: the number of the
# one that runs, its peer (-1: any), the number of the last one that has ended; from TOLD on, who sent what any source
# could have sent, by the message's number.
ABORT, STATUS, STARTED, ENDED, MESSAGE, MESSAGE_PEER, MESSAGE_ENDED = range(7)
TOLD, TOLD_WORDS = 64, 256

# Status codes in the low byte of the status word.
MISMATCH, OVERLAP, SPLITS, PENDING, UNLIKE = 2, 3, 4, 5, 6

EPOCH_LIMIT = 1 << 32
CLEAR_EVERY = 1 << 30
MIN_ARENA = 64 * 1024
_LEAST_ROOM, _LEAST_SLOT, _GOOD_SLOT, _LARGEST_SLOT = 512, 256, 8192, 65536  # bytes


@dataclass(frozen=True)
class Layout:
    """Offsets and sizes in bytes of one arena."""

    world_size: int
    nbytes: int
    ll: int
    ll_room: int
    simple: int
    simple_room: int
    lines: int
    channels: int
    slots: int
    slot: int

    @property
    def digest(self) -> int:
        """A 32-bit number that differs where two ranks would lay their arenas out differently."""
        return zlib.crc32(repr((VERSION, MAX_BLOCKS, HEADERS, astuple(self))).encode())

    def largest_tile(self, algorithm: str, protocol: str) -> int:
        """64-bit payload words of the largest tile that divides a room of this kernel."""
        if protocol == "ll":
            return self.ll_room // (32 if "two_shot" in algorithm else 16)
        return self.simple_room // (8 if algorithm == "one_shot" else 16)

    def slot_words(self, protocol: str) -> int:
        """64-bit payload words of a message's slot."""
        return self.slot // (16 if protocol == "ll" else 8)

    def first_counters(self, epoch: int) -> list[list[list[int]]]:
        """[rank][channel][word of a line]: a group's that begins with `epoch`."""
        first = max(epoch, SLOTS)
        line = [0] * (LINE // 8)
        line[SENT] = line[NEXT] = first
        for number in range(first, first + SLOTS):  # as if the four before had been read
            wrapped = number if number < EPOCH_LIMIT else number - (EPOCH_LIMIT - SLOTS)
            last = wrapped - SLOTS if wrapped >= 2 * SLOTS else wrapped + EPOCH_LIMIT - 2 * SLOTS
            line[ACKS + wrapped % SLOTS] = (last << 32) - (last >> 31 << 64)  # signed
        return [[line] * self.channels] * self.world_size


def unread(line: list[int]) -> bool:
    """True where a piece that was sent through a line has not been acknowledged."""
    for back in range(1, SLOTS + 1):
        number = line[SENT] - back
        number += (EPOCH_LIMIT - SLOTS) if number < SLOTS else 0
        if (line[ACKS + number % SLOTS] >> 32) & (EPOCH_LIMIT - 1) != number:
            return True
    return False


def plan(world_size: int, arena_bytes: int) -> Layout:
    """Divide `arena_bytes` between the two mailboxes, and what rounding leaves of it among messages; raises
    `InvalidArgument` where it is too small for the group."""
    if not 1 <= world_size <= MAX_WORLD_SIZE:
        raise InvalidArgument(f"world_size={world_size}: 1 to {MAX_WORLD_SIZE} ranks are possible")
    ll = _up(HEADERS + 8 * PHASES * 2 * world_size * MAX_BLOCKS, 4096)
    good = world_size * (LINE + SLOTS * _GOOD_SLOT)
    reserve = good if 8 * good <= arena_bytes else world_size * (LINE + SLOTS * _LEAST_SLOT)
    per_slot = (arena_bytes - ll - reserve) // (4 * world_size)  # two mailboxes, two parities each, a slot per source
    if per_slot < _LEAST_ROOM:
        least = max(MIN_ARENA, ll + reserve + 4 * world_size * _LEAST_ROOM)
        raise InvalidArgument(
            f"arena_bytes={arena_bytes} is too small for {world_size} ranks: at least {least} bytes are needed"
        )
    room = 1 << (per_slot.bit_length() - 1)
    simple = ll + 2 * world_size * room
    lines = simple + 2 * world_size * room
    channels, slot = _channels((arena_bytes - lines) // world_size)
    slots = lines + world_size * channels * LINE
    return Layout(
        world_size, slots + world_size * channels * SLOTS * slot, ll, room, simple, room, lines, channels, slots, slot
    )


def _channels(nbytes: int) -> tuple[int, int]:
    """How many channels with slots of how many bytes fit into `nbytes` bytes."""
    channels = 1
    while channels < MAX_CHANNELS and nbytes >= 2 * channels * (LINE + SLOTS * _GOOD_SLOT):
        channels *= 2
    each = (nbytes // channels - LINE) // SLOTS
    return channels, min(_LARGEST_SLOT, 1 << (each.bit_length() - 1))


def _up(value: int, unit: int) -> int:
    return -(-value // unit) * unit
