"""Programs that work if each callback runs when it is attached. With the rules they work in every other order, too."""

from __future__ import annotations

from collections.abc import Iterator

from devtools.call_order_model.events import Case
from devtools.call_order_model.ranks import (
    DEADLOCK,
    MISMATCH,
    WRONG,
    All,
    Call,
    Destroy,
    Groups,
    Program,
    Rules,
    Statement,
    Then,
    Wait,
)
from devtools.every_order import SAFE

Body = tuple[Statement, ...]
KEPT = Rules()


def sync(name: str, group: str = "g") -> Body:
    return Call(name, group), Wait(name)


def program(*main: Statement, **callbacks: Body) -> Program:
    """A program. A callback that is not given makes one call, which has the callback's name, and waits for it."""
    named = {s.body: sync(s.body) for body in (main, *callbacks.values()) for s in body if isinstance(s, Then)}
    return {**named, **callbacks, "main": main}


def attached(*futures: str, to: str = "a") -> Body:
    """Attach the callbacks `futures` to the future `to`, then wait for the futures that this returns."""
    return *(Then(to, body, f"{body} of {to}") for body in futures), *(Wait(f"{body} of {to}") for body in futures)


_A, _B, _D = Call("a"), Call("b"), Call("d")
_WAIT_B = Wait("b")

PROGRAMS: dict[str, Program] = {
    "a slow callback": program(_A, Then("a", "x", "fx"), _B, _WAIT_B, Wait("fx")),
    "a late callback": program(_A, _B, Then("a", "x", "fx"), _WAIT_B, Wait("fx")),
    "PowerSGD": program(
        _A,
        Then("a", "p", "fp"),
        Then("fp", "q", "fq"),
        _B,
        Then("b", "r", "fr"),
        Then("fr", "s", "fs"),
        Wait("fq"),
        Wait("fs"),
    ),
    "two callbacks, a chained one attached between": program(
        _A, Then("a", "x", "fx"), Then("fx", "y", "fy"), Then("a", "z", "fz"), Wait("fy"), Wait("fz")
    ),
    "two callbacks, a chained one attached after": program(
        _A, Then("a", "x", "fx"), Then("a", "z", "fz"), Then("fx", "y", "fy"), Wait("fy"), Wait("fz")
    ),
    "a callback waits for a later call": program(
        _A, _B, Then("a", "x", "fx"), _D, Wait("fx"), Wait("d"), x=(_WAIT_B, *sync("x"))
    ),
    "collect_all": program(
        _A,
        _B,
        All(("a", "b"), "ab"),
        Then("ab", "x", "fx"),
        Then("a", "y", "fy"),
        _D,
        Wait("fx"),
        Wait("fy"),
        Wait("d"),
    ),
    "nested callbacks": program(
        _A, Then("a", "x", "fx"), _B, Wait("fx"), _WAIT_B, x=(Call("x"), Then("x", "y", "fy"), Wait("fy"))
    ),
    "asynchronous calls in callbacks": program(
        _A, Then("a", "x", "fx"), _B, Then("b", "y", "fy"), x=(Call("x1"), Call("x2")), y=(Call("y1"), Call("y2"))
    ),
    "three callbacks": program(_A, *attached("x", "y", "z")),
    "two lines attach to one future": program(
        _A, _B, Then("a", "w", "fw"), Then("b", "y", "fy"), Wait("fw"), Wait("fy"), w=attached("x", to="b")
    ),
    "destroy in a callback": program(_A, Then("a", "x", "fx"), Wait("fx"), x=(Destroy(),)),
}


def on_all(name: str, want: str, scenario: str, rules: Rules = KEPT, ranks: int = 2) -> Case:
    return Case(f"{scenario}: {name}", want, (PROGRAMS[scenario],) * ranks, {"g": tuple(range(ranks))}, rules)


def part_of_the_ranks(rules: Rules = KEPT, want: str = SAFE, name: str = "in every order") -> Case:
    """A callback makes a call in another group before a call in its own group, on the ranks that belong to both."""
    groups: Groups = {"g": (0, 1), "part": (0,)}
    programs = tuple(program(_A, *attached("x"), x=part + sync("c")) for part in (sync("p", "part"), ()))
    return Case(f"a callback calls a part of the ranks: {name}", want, programs, groups, rules)


def two_levels() -> Case:
    """all_reduce in each node, among the leaders (ranks 0 and 2) in its callback, then in each node again."""
    groups: Groups = {"node 0": (0, 1), "node 1": (2,), "leaders": (0, 2)}
    programs = tuple(
        program(Call("a", node), *attached("x"), x=(sync("l", "leaders") if leads else ()) + sync("c", node))
        for node, leads in (("node 0", True), ("node 0", False), ("node 1", True))
    )
    return Case("a callback calls a group of which not all ranks belong to its own", MISMATCH, programs, groups)


def two_parents(rules: Rules = KEPT, want: str = SAFE, name: str = "in every order") -> Case:
    """Callbacks of two groups' calls call a third group; rank 1 belongs to one more group than rank 0."""
    groups: Groups = {"A": (0, 1), "C": (0, 1), "one more": (1,), "B": (0, 1)}
    each = program(
        Call("a", "A"),
        Call("c", "C"),
        Then("a", "x", "fx"),
        Then("c", "y", "fy"),
        Wait("fx"),
        Wait("fy"),
        x=sync("x", "B"),
        y=sync("y", "B"),
    )
    return Case(f"callbacks of two groups call a third: {name}", want, (each, each), groups, rules)


def kept() -> Iterator[Case]:
    for scenario in PROGRAMS:
        yield on_all("in every order", SAFE, scenario)
    for scenario in ("a slow callback", "a late callback", "a callback waits for a later call"):
        yield on_all("three ranks", SAFE, scenario, ranks=3)
    yield part_of_the_ranks()
    yield two_parents()


def taken_away() -> Iterator[Case]:
    slow, late, chain, power = "a slow callback", "a late callback", list(PROGRAMS)[3], "PowerSGD"
    after, later, lines = list(PROGRAMS)[4], list(PROGRAMS)[5], "two lines attach to one future"
    yield on_all("calls are numbered in the order of arrival", WRONG, slow, Rules(numbers="arrival"))
    yield on_all("a late callback's calls are the program's", WRONG, slow, Rules(late="attacher"))
    yield on_all("a late callback's calls are the program's", MISMATCH, late, Rules(late="attacher"))
    gives_up = Rules(begins="gives up", late="attacher")
    yield on_all("the next call waits for callbacks for a time", WRONG, slow, gives_up)
    yield on_all("the next call waits for callbacks for a time", WRONG, late, gives_up)
    yield on_all("the next call waits for callbacks for a time", WRONG, power, gives_up)
    yield on_all("the next call waits for callbacks", DEADLOCK, later, Rules(begins="callbacks first"))
    yield on_all("places are counted when callbacks run", WRONG, chain, Rules(places="run"))
    yield on_all("places are counted for all lines together", WRONG, lines, Rules(places="all"))
    yield on_all("one line for all callbacks of a call", DEADLOCK, chain, Rules(lines="call"))
    yield on_all("one line for all callbacks of a group", DEADLOCK, power, Rules(lines="group"))
    yield on_all("one thread for the callbacks of a call", DEADLOCK, after, Rules(threads="call"))
    yield on_all("one thread for the callbacks of a call", DEADLOCK, lines, Rules(threads="call"))
    yield on_all("one thread for all callbacks", DEADLOCK, power, Rules(threads="one"))
    yield on_all("chained futures are not tracked", WRONG, power, Rules(chained=False))
    yield on_all("collect_all is not tracked", WRONG, "collect_all", Rules(collected=False))
    yield on_all("matched by the group's tag", WRONG, slow, Rules(match="group"))
    yield on_all("matched by the group's tag, and compared", MISMATCH, slow, Rules(match="records"))
    yield on_all("one call runs at once", DEADLOCK, late, Rules(workers=1))
    yield on_all("two calls run at once", DEADLOCK, "three callbacks", Rules(workers=2))
    yield on_all("destroy waits for callbacks", DEADLOCK, "destroy in a callback", Rules(leaves="after callbacks"))
    yield part_of_the_ranks(
        Rules(counted="callback"), MISMATCH, name="a callback counts the calls of all groups together"
    )
    yield two_parents(Rules(parents="none"), WRONG, "identities do not name the parent's group")
    yield two_parents(Rules(parents="difference"), WRONG, "parents are named by the groups made since")


def limits() -> Iterator[Case]:
    """Programs that the rules do not cover. They raise a documented error, except for messages."""
    yield two_levels()
    inner = program(_A, Call("p", "part"), Then("p", "w", "fw"), Wait("fw"), w=attached("x"))
    outer = program(_A, *attached("x"))
    name = "a callback of a part of the ranks attaches one to a call of all"
    yield Case(name, MISMATCH, (inner, outer), {"g": (0, 1), "part": (0,)})
    right = PROGRAMS["a slow callback"]
    logs = program(Call("a"), *attached("log", "x"), log=())
    yield Case("rank 0 alone attaches one more callback", MISMATCH, (logs, right), {"g": (0, 1)})
    yield Case("rank 1 does not attach the callback", MISMATCH, (right, program(*sync("a"), *sync("b"))), {"g": (0, 1)})
    gone = program(Call("a"), Then("a", "x", "fx"), *sync("b"), Wait("fx"), x=(Destroy(),))
    yield Case("a callback destroys the group before a call", MISMATCH, (gone, gone), {"g": (0, 1)})
    for tag, want in ((0, WRONG), (1, SAFE)):
        sent = program(
            Call("a"), Then("a", "x", "fx"), Call("m", tag=0), Wait("m"), Wait("fx"), x=(Call("x", tag=tag), Wait("x"))
        )
        name = f"a message in a callback, with {'its own tag' if tag else 'the tag of another one'}"
        yield Case(name, want, (sent, sent), {"g": (0, 1)})
