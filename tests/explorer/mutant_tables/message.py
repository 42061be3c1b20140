"""The table of mutants, fifth part: messages between two ranks (`message_queues.py`, `send.py`, `recv.py`)."""

from tests.explorer.mutant_tables.names import DEADLOCK, RACE, both
from tests.explorer.mutation import Edit, Mutant

L, S = both("send")
FILE, SEND, RECV = "kernels/device/message_queues.py", "kernels/collectives/send.py", "kernels/collectives/recv.py"
LOST = frozenset({"race", "deadlock", "exception", "wrong_result"})  # whichever the schedule shows first
NOT_TRIED = "not tried"

_FREE = "            status = wait_free(group, mine, number, SPEC)\n"
_READ = "                    acknowledge(theirs, number, SPEC)\n"
_SEEN = "    tl.debug_barrier()  # no thread reads the payload before the acquiring ones have seen the header\n"
_LOOP = "                first = tl.zeros([], tl.int64)\n                while (first < count)"


def _mutant(name, title, bug, file, old, new, key=S, expect=RACE, advice="", **more):
    """Of one edit, for a message by `key`."""
    return Mutant(name, title, bug, (Edit(file, old, new),), (key,), expect, advice, processes=NOT_TRIED, **more)


MESSAGES = (
    _mutant(
        "S01", "send: no wait for the ack", "a slot is filled again while it is read",
        SEND, _FREE, "", sizes=(36, 1, 40, 2),
    ),
    _mutant(
        "S02", "LL send: no wait for the ack", "words are lost before they are polled",
        SEND, _FREE, "", L, LOST, sizes=(36, 1, 40, 2),
    ),
    _mutant(
        "S03", "recv: the ack is relaxed", "the receiver's loads may come after it",
        FILE, "(number << 32) + lane * 0, lane == 0, True, SPEC.PTX)",
        "(number << 32) + lane * 0, lane == 0, False, SPEC.PTX)",
        advice="make it sem='release'",
    ),
    _mutant(
        "S04", "recv: no block barrier before the ack", "other threads are still reading",
        FILE, '`wait_free`."""\n    tl.debug_barrier()\n', '`wait_free`."""\n',
        advice="put tl.debug_barrier() before the release",
    ),
    _mutant(
        "S05", "send: no block barrier after the ack", "other threads store before one has acquired",
        FILE, "    tl.debug_barrier()  # no thread writes before the acquiring ones have seen the ack\n", "",
    ),
    _mutant(
        "S06", "send: the header does not release", "the payload is not published",
        FILE, "signal(place, value, lane < 2, True, SPEC.PTX)", "signal(place, value, lane < 2, False, SPEC.PTX)",
        advice="make it sem='release'",
    ),
    _mutant(
        "S07", "send: no block barrier before the header", "other threads' payload is not ordered",
        FILE, "        tl.debug_barrier()  # all threads' payload is written before the release\n", "        pass\n",
        advice="put tl.debug_barrier() before the release",
    ),
    _mutant(
        "S08", "recv: no block barrier after the header", "other threads load before one has acquired",
        FILE, _SEEN, "",
    ),
    _mutant(
        "S09", "recv: frees the slot before it is read", "the ack stands for the reading",
        RECV, _LOOP, f"                acknowledge(theirs, number, SPEC)\n{_LOOP}",
    ),
    _mutant(
        "S10", "recv: frees no slot", "a sender waits for its fifth piece",
        RECV, _READ, "", expect=DEADLOCK,
    ),
    _mutant(
        "S11", "recv: takes any tag", "messages of one pair overtake each other",
        FILE, "if (status == 0) & (its_tag == (tag & LOW)):", "if status == 0:", expect=frozenset({"exception"}),
    ),
    _mutant(
        "S12", "recv: forgets what it took ahead", "a piece is taken twice",
        RECV, "                tl.store(mine + RECEIVED_AHEAD, taken)\n", "", expect=LOST, sizes=(1, 2, 3),
    ),
    _mutant(
        "S13", "recv: does not go on", "every message is the first one",
        RECV, "                tl.store(mine + NEXT, following)\n", "", expect=LOST,
    ),
    _mutant(
        "S14", "send: does not go on", "every message has the first one's number",
        SEND, "            tl.store(mine + SENT, number)\n", "", expect=LOST,
    ),
    _mutant(
        "S15", "numbers wrap to 0", "a slot is skipped, and the wait is for the ack of another one",
        FILE, "following - (NUMBERS - SLOTS), following)", "following - NUMBERS, following)", expect=LOST,
        first_epoch=2**32 - 6, sizes=(1, 2, 3, 4),
    ),
    _mutant(
        "S16", "LL: the payload has the number before", "a word is taken for the last piece's",
        SEND, "put_ll(slot + 2 * first, data, number,", "put_ll(slot + 2 * first, data, number - 1,", L, DEADLOCK,
    ),
    _mutant(
        "S17", "a message's arrivals are not reset", "from the second message on no block is the last one",
        FILE, "            tl.store(table_of(group) + MESSAGE_ARRIVALS, 0)\n", "",
        expect=frozenset({"leftover", "exception"}),
    ),
)  # fmt: skip
