"""The layout of a rank's arena: the tables at its head, and the division of the rest. The same on all ranks.

    byte 0      group table   64-bit words: this rank, the peers' addresses, each block's epoch
    1024        headers       [phase][parity][source][block], one 64-bit word each
    ll          LL mailbox    [parity][source], `ll_buffer` bytes each; two words of 64 bits for 8 bytes of payload
    wide        mailbox of `ll128`: [parity][source], `wide_buffer` bytes each; 16 bytes for 12 bytes of payload
    simple      mailbox       [parity][source], `simple_buffer` bytes each
    queue_states              of messages: [rank][queue], 16 words each: headers of incoming pieces, acknowledgements of
                              sent ones, own counters
    slots                     of messages: [source][queue][slot], `slot` bytes each

LL buffers, wide ones and slots are powers of two, and a `simple` buffer is a multiple of one (`_simple_buffer`), so
that a tile no larger than `Layout.largest_tile` divides its part of the buffer. Words with flags need little room,
because their messages are short: in a large arena wide words get at most a quarter, LL an eighth, messages between two
ranks a sixteenth, and `simple` the rest. Wide words cannot share the mailbox of LL words, because payload of the one
would be read as flags of the other.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import astuple, dataclass
from typing import Any

from tricomm.errors import InvalidArgument

MAX_WORLD_SIZE = 16
MAX_BLOCKS = 64
VERSION = 7
PHASES = 3  # headers that a block may send a peer in one epoch

# Words of the group table. Only kernels change epochs and arrivals; the host writes them once, at the start.
RANK, CONTROL, LL_BASE, LL_BUFFER, WIDE_BASE, WIDE_BUFFER, SIMPLE_BASE, SIMPLE_BUFFER = range(8)
MESSAGE_ARRIVALS, QUEUE_STATES, SLOT_DATA, SLOT_BYTES, QUEUES = range(8, 13)
PEERS = 16
# The parameters of a shipped kernel: the table's address, its constants (the words before MESSAGE_ARRIVALS), and the
# peers' addresses.
CONSTANTS = MESSAGE_ARRIVALS
PARAMETER_PEERS = 1 + CONSTANTS
# Of a hybrid cube mesh: the ranks of this rank's quad and of the other quad, by position (relay partners have the same
# position), this rank's position, and its index among the quad's ranks in ascending order.
QUAD, PEER_QUAD, POSITION, QUAD_RANK = 32, 36, 40, 41
MESH_RANKS, PARTNERS = 8, 5  # partners of a rank: itself, three of its quad, and the relay
MULTICAST = 42  # the address that stands for all ranks' arenas (`kernels/multimem.py`); 0 if there is none
# From here on a word for each block: the epoch of the group's next collective; while one runs, its call number in the
# upper half.
EPOCHS = 64
HEADERS = 1024

# The state of a queue: for each slot a header of two words, and an acknowledgement; the number of the next piece to
# send; the number of the first piece not received, with a bit for each later one that was; and a bit for each slot that
# has held plain data.
SLOTS = 4
QUEUE_STATE = 128
ACKS, SENT, NEXT, RECEIVED_AHEAD, PLAIN = 8, 12, 13, 14, 15
MAX_QUEUES = 16

# Words of the control page that host and kernel share (host memory, mapped for a GPU). For messages: the number of the
# running one, its peer (-1: any), the number of the last one that has ended; from RECV_SOURCE on, the source of each
# message received from any rank, by the message's number. From ENDED on, for each block, the epoch after its last one.
ABORT, STATUS, STARTED, MESSAGE, MESSAGE_PEER, MESSAGE_ENDED = range(6)
LOADING = 6  # written by the host: kernels that are being compiled or loaded now
RECV_SOURCE, RECV_SOURCE_WORDS = 64, 256
ENDED = RECV_SOURCE + RECV_SOURCE_WORDS
CONTROL_WORDS = ENDED + MAX_BLOCKS

# Status codes in the low byte of the status word.
MISMATCH, OVERLAP, SPLITS, PENDING, MESSAGE_MISMATCH = 2, 3, 4, 5, 6

EPOCH_LIMIT = 1 << 32
CLEAR_EVERY = 1 << 30
MIN_ARENA = 64 * 1024
_LEAST_BUFFER, _LEAST_SLOT, _GOOD_SLOT, _LARGEST_SLOT = 512, 256, 8192, 65536  # bytes
_LEAST_STATE = QUEUE_STATE + SLOTS * _LEAST_SLOT
_PAGE = 4096
_GOOD_LL = 65536  # bytes of an LL buffer; LL gets half of an arena until its buffers have this size
_LEAST_STEP, _LARGEST_STEP = 32768, 131072  # bytes: two halves of tiles of 2048 words (a GPU's), of 8192 (a CPU's)


@dataclass(frozen=True)
class Layout:
    """Offsets and sizes in bytes of one arena of `nbytes`."""

    world_size: int
    nbytes: int
    ll: int
    ll_buffer: int
    wide: int
    wide_buffer: int
    simple: int
    simple_buffer: int
    queue_states: int
    queues: int
    slots: int
    slot: int

    @property
    def digest(self) -> int:
        """A 32-bit number that differs between ranks with different layouts."""
        return zlib.crc32(repr((VERSION, MAX_BLOCKS, HEADERS, astuple(self))).encode())

    @property
    def constants(self) -> dict[int, int]:
        """The words of a group table that describe the layout."""
        return {
            LL_BASE: self.ll,
            LL_BUFFER: self.ll_buffer,
            WIDE_BASE: self.wide,
            WIDE_BUFFER: self.wide_buffer,
            SIMPLE_BASE: self.simple,
            SIMPLE_BUFFER: self.simple_buffer,
            QUEUE_STATES: self.queue_states,
            QUEUES: self.queues,
            SLOT_DATA: self.slots,
            SLOT_BYTES: self.slot,
        }

    def largest_tile(self, algorithm: str, protocol: str) -> int:
        """The largest tile that divides a buffer of this kernel, in 64-bit payload words (for `ll128` wide words): a
        power of two."""
        quantised = algorithm.startswith("two_shot_")
        if protocol in ("ll", "ll128"):
            return self._flagged_words(algorithm, protocol) // (2 if quantised else 1)  # the scales need room, too
        step = self.simple_buffer & -self.simple_buffer
        if quantised:  # its words are codes; one has up to four words of a tensor
            return step // 64
        return step // (8 if algorithm == "one_shot" else 16)

    def buffer_words(self, algorithm: str, protocol: str, collective: str) -> int:
        """64-bit payload words in the part of a buffer that one phase of this kernel uses."""
        if protocol in ("ll", "ll128"):
            return tile_words(protocol, self._flagged_words(algorithm, protocol))
        whole = algorithm in ("multicast", "hybrid_cube_mesh") and collective != "all_reduce"
        return self.simple_buffer // (8 if whole or algorithm == "one_shot" else 16)

    def _flagged_words(self, algorithm: str, protocol: str) -> int:
        """Words with flags, of 16 bytes, of the part of a buffer that one phase has."""
        return (self.ll_buffer if protocol == "ll" else self.wide_buffer) // (32 if "two_shot" in algorithm else 16)

    def slot_words(self, protocol: str) -> int:
        """64-bit payload words that a slot of messages holds."""
        return self.slot // (16 if protocol == "ll" else 8)

    def first_counters(self, epoch: int) -> list[list[list[int]]]:
        """The initial states of the queues, [rank][queue][word], of a group that begins with `epoch`."""
        first = max(epoch, SLOTS)
        state = [0] * (QUEUE_STATE // 8)
        state[SENT] = state[NEXT] = first
        for number in range(first, first + SLOTS):  # as if the four pieces before had been read
            wrapped = piece_number(number)
            last = wrapped - SLOTS if wrapped >= 2 * SLOTS else wrapped + EPOCH_LIMIT - 2 * SLOTS
            state[ACKS + wrapped % SLOTS] = upper_half(last)
        return [[state] * self.queues] * self.world_size


def alike(words: int, room: int, unit: int) -> tuple[int, int]:
    """(chunks, words of each but the last one): how `device/chunks.py` divides a call of `words` words of plain
    data."""
    chunks = -(-words // room)
    return chunks, room if chunks <= 1 else -(-words // (chunks * unit)) * unit


def tile_words(protocol: str, block: int) -> int:
    """64-bit payload words of a tile of `block`, which counts wide words under `ll128`."""
    return block * 3 // 2 if protocol == "ll128" else block


def piece_number(number: int) -> int:
    """The number of a piece of a message: `number`, which is a valid one plus some pieces, with 4 again for 2^32."""
    return number if number < EPOCH_LIMIT else number - (EPOCH_LIMIT - SLOTS)


def upper_half(number: int) -> int:
    """The signed 64-bit word that has the 32-bit `number` in its upper half and zeros in its lower one."""
    return (number << 32) - (number >> 31 << 64)


def unacknowledged(state: list[int]) -> bool:
    """True if a piece that was sent through the queue with this `state` is not yet acknowledged."""
    for back in range(1, SLOTS + 1):
        number = state[SENT] - back
        number += (EPOCH_LIMIT - SLOTS) if number < SLOTS else 0
        if (state[ACKS + number % SLOTS] >> 32) & (EPOCH_LIMIT - 1) != number:
            return True
    return False


def group_words(world_size: int) -> int:
    """The number of words of a `group_argument`."""
    return PARAMETER_PEERS + 2 * world_size + (2 * PARTNERS if world_size == MESH_RANKS else 0)


def group_argument(table: Any, words: Sequence[int], world_size: int) -> tuple[Any, ...]:
    """The group argument of a shipped kernel, the same in every launch: the address `table` of the group table, whose
    contents are `words`; its constants; the addresses of the ranks' arenas twice, from this rank on and from rank 0 on;
    for eight ranks also the partners in a hybrid cube mesh (the quad by step, then the relay) and their addresses."""
    constants, peers = [int(word) for word in words[:CONSTANTS]], [int(word) for word in words[PEERS:][:world_size]]
    rank, partners = constants[RANK], []
    if world_size == MESH_RANKS:
        position = int(words[POSITION])
        partners = [int(words[QUAD + (position ^ step)]) for step in range(4)] + [int(words[PEER_QUAD + position])]
    return (table, *constants, *peers[rank:], *peers[:rank], *peers, *partners, *(peers[p] for p in partners))


def plan(world_size: int, arena_bytes: int) -> Layout:
    """Divide `arena_bytes` between the mailboxes and messages. In a small arena the mailboxes of `ll` and `simple` have
    the same size.

    Raises `InvalidArgument` if it is too small for the group.
    """
    if not 1 <= world_size <= MAX_WORLD_SIZE:
        raise InvalidArgument(f"world_size={world_size}: 1 to {MAX_WORLD_SIZE} ranks are possible")
    ll = _headers_end(world_size)
    good = world_size * (QUEUE_STATE + SLOTS * _GOOD_SLOT)
    large = 8 * good <= arena_bytes
    reserve = world_size * _LEAST_STATE
    if large:
        reserve = max(good, world_size * MAX_QUEUES * QUEUE_STATE + arena_bytes // 16)
    half = (arena_bytes - ll - reserve) * 4 // (18 * world_size)  # two and a quarter mailboxes of two parities
    if half < _LEAST_BUFFER:
        least = max(MIN_ARENA, _least(world_size))
        raise InvalidArgument(
            f"arena_bytes={arena_bytes} is too small for {world_size} ranks: at least {least} bytes are needed"
        )
    ll_buffer = simple_buffer = _power_of_two(half)
    if ll_buffer > _GOOD_LL:
        ll_buffer = max(_GOOD_LL, _power_of_two(arena_bytes // (8 * world_size)))
    wide_buffer = ll_buffer // 2
    if 2 * (2 * ll_buffer + wide_buffer) > 4 * half:  # leave something for messages
        wide_buffer = ll_buffer // 4
    elif ll_buffer > _GOOD_LL:  # wide words serve longer calls, so they get the rest
        ll_buffer, wide_buffer = wide_buffer, ll_buffer
    wide = ll + 2 * world_size * ll_buffer
    simple = wide + 2 * world_size * wide_buffer
    if large:
        simple_buffer = _simple_buffer((arena_bytes - simple - reserve) // (2 * world_size))
    states = simple + 2 * world_size * simple_buffer
    queues, slot = _queues((arena_bytes - states) // world_size)
    slots = states + world_size * queues * QUEUE_STATE
    nbytes = slots + world_size * queues * SLOTS * slot
    return Layout(
        world_size, nbytes, ll, ll_buffer, wide, wide_buffer, simple, simple_buffer, states, queues, slots, slot
    )


def _least(world_size: int) -> int:
    """Bytes of the smallest arena."""
    return _headers_end(world_size) + world_size * (_LEAST_STATE + _LEAST_BUFFER * 18 // 4)


def _headers_end(world_size: int) -> int:
    return -(-(HEADERS + 8 * PHASES * 2 * world_size * MAX_BLOCKS) // _PAGE) * _PAGE


def _power_of_two(nbytes: int) -> int:
    """The largest power of two that is not above `nbytes`."""
    return 1 << (nbytes.bit_length() - 1)


def _simple_buffer(nbytes: int) -> int:
    """Bytes of a buffer of at most `nbytes`. A large one is a multiple of 1/32 of a power of two."""
    whole = _power_of_two(nbytes)
    step = min(whole, max(_LEAST_STEP, min(_LARGEST_STEP, whole // 32)))
    return nbytes // step * step


def _queues(nbytes: int) -> tuple[int, int]:
    """(number of queues, bytes of a slot) that fit into `nbytes` bytes."""
    queues = 1
    while queues < MAX_QUEUES and nbytes >= 2 * queues * (QUEUE_STATE + SLOTS * _GOOD_SLOT):
        queues *= 2
    each = (nbytes // queues - QUEUE_STATE) // SLOTS
    return queues, min(_LARGEST_SLOT, 1 << (each.bit_length() - 1))
