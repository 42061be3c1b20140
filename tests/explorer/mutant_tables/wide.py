"""The table of mutants, sixth part: words of 16 bytes with a flag inside, `ll128` (`kernels/wide_words.py`); rows."""

from tests.explorer import bodies
from tests.explorer.mutant_tables.names import ARRIVAL, CHUNKS, DEADLOCK, MAILBOX, PUSH, RACE, TWO_SHOT, L
from tests.explorer.mutation import Edit, Mutant
from tricomm.kernels.collective_specs import FUSED

W = ("all_reduce", "one_shot", "ll128")
T = ("all_reduce", "two_shot", "ll128")
G = ("all_gather", "one_shot", "ll128")
D = ("reduce_scatter", "one_shot", "ll128")

WORDS = "kernels/wide_words.py"
PLANES = "kernels/device/planes.py"

_BEFORE_CLEAR = 2**30 - 1
_LOW, _HIGH = "((low >> 32).to(tl.int32) != flag)", "((high >> 32).to(tl.int32) != flag)"
_FIRST = "    store_wide(at, planes[0], (planes[2] & LOW) | top, mask)\n"
_HALVES = """\
    tl.atomic_xchg(at, planes[0], mask=mask, sem="relaxed", scope="sys")
    tl.atomic_xchg(at + 1, (planes[2] & LOW) | top, mask=mask, sem="relaxed", scope="sys")
"""
_LATE = "lane < plane_words(lefts[n], BLOCK)"
_SENT = "put_wide(pointer, tile, flag, plane_words(left, SPEC.PLANE), SPEC.PLANE)"
_START = "    one, two, three = tile\n"
_CLEAR = "            clear_runs(start, words, idle, wide_runs, True, SPEC)\n"
_PLACE = "offset = wide_base(group) + buffer * wide_bytes(group)"


WIDE = (
    Mutant(
        "W01", "ll128: half of a tile's flags are not checked", "a tile is two halves of wide words, with a flag each",
        (Edit(WORDS, f"{_LOW} | {_HIGH}", _LOW),),
        (W,), frozenset({"wrong_result", "leftover", "race"}), schedules=20, body=bodies.in_turn,
    ),
    Mutant(
        "W02", "ll128: a wide word in two stores", "flag and payload are one access, or the flag says nothing",
        (Edit(WORDS, _FIRST, _HALVES),),
        (W,), RACE,
    ),
    Mutant(
        "W03", "ll128: polled for a third of a plane", "the words after the polled ones have not arrived",
        (Edit(ARRIVAL, _LATE, "lane < plane_words(lefts[n] // 3, BLOCK)"),),
        (W,), frozenset({"wrong_result", "leftover", "race"}), schedules=20, body=bodies.in_turn,
    ),
    Mutant(
        "W04", "ll128: the planes of a last tile are full ones", "sender and receiver must divide a tile the same way",
        (Edit(PLANES, _START, f"    plane = left * 0 + SPEC.PLANE\n{_START}"),),
        (W,), frozenset({"wrong_result", "out_of_bounds"}), body=bodies.in_turn, tile=16,
    ),
    Mutant(
        "W05", "ll128: a plane is pushed without its last words", "a plane's length is rounded up, not down",
        (Edit(PLANES, _SENT, _SENT.replace("(left,", "(left - 1,")),),
        (D,), DEADLOCK, sizes=(37, 1, 13),
    ),
    Mutant(
        "W06", "ll128: never cleared", "words of 2^32 epochs ago are taken for new",
        (Edit(MAILBOX, _CLEAR, ""),),
        (W,), frozenset({"wrong_result", "race"}), first_epoch=_BEFORE_CLEAR, sizes=(1, 1, 150), blocks=2,
        tile=64, body=bodies.prefilled, schedules=20,
    ),
    Mutant(
        "W07", "ll128: LL does not clear for it", "all calls at that time may be of the other width",
        (Edit(MAILBOX, _CLEAR, f"            if SPEC.WIDE:\n    {_CLEAR}"),),
        (L, L, W, W), frozenset({"wrong_result", "race"}), first_epoch=_BEFORE_CLEAR, sizes=(1, 1, 150, 150), blocks=2,
        tile=128, body=bodies.prefilled, schedules=20,
    ),
    Mutant(
        "W08", "ll128: the flag is taken from a place of payload", "the flag is in the upper half of the second word",
        (Edit(WORDS, _LOW, "(low.to(tl.int32) != flag)"),),
        (W,), DEADLOCK,
    ),
    Mutant(
        "W09", "ll128: no wait for headers", "the fingerprint is not read, and the header is there for the next call",
        (Edit(PUSH, "pointers, lefts, SOURCES, True,", "pointers, lefts, SOURCES, False,"),),
        (G,), frozenset({"leftover"}),
    ),
    Mutant(
        "W10", "ll128: in the mailbox of LL", "payload of a wide word lies where LL words have flags",
        (Edit(MAILBOX, _PLACE, _PLACE.replace("wide_base", "ll_base")),),
        (W, L), RACE, sizes=(36, 36, 40), body=bodies.in_turn,
    ),
    Mutant(
        "W11", "ll128: any flag will do", "a word of the epoch before the last is taken for new",
        (Edit(WORDS, f"{_LOW} | {_HIGH}", f"{_LOW.replace('!= flag', '== 0')} | {_HIGH.replace('!= flag', '== 0')}"),),
        (W,), frozenset({"race", "wrong_result", "leftover"}), schedules=20,
    ),
    Mutant(
        "W12", "ll128: tiles as far apart as those of LL", "a tile of three words takes four of the mailbox",
        (Edit(MAILBOX, "place = first // 3 * 4", "place = first"),),
        (T,), frozenset({"race", "deadlock"}), sizes=(36,),
    ),
    Mutant(
        "W13", "ll128 two-shot: both phases in one half", "a word of the second phase is taken for one of the first",
        (
            Edit(TWO_SHOT, "me, half + first, SPEC)", "me, first, SPEC)"),
            Edit(TWO_SHOT, "ll_buffer(chunk, table_of(group), source, half + first, SPEC)",
                 "ll_buffer(chunk, table_of(group), source, first, SPEC)"),
        ),
        (T,), RACE,
    ),
    Mutant(
        "R06", "rows: one epoch, whatever the chunks", "the next call takes this one's epochs again",
        (Edit(CHUNKS, "finish(group, start, chunks, status)", "finish(group, start, 1, status)"),),
        ((next(iter(FUSED)), "one_shot", "ll128"),), RACE, blocks=2, tile=32, sizes=(1, 1, 1),
    ),
)  # fmt: skip
