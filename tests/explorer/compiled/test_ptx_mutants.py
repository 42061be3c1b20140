"""Changes to the PTX of shipped kernels: those that the memory model forbids are noticed, and each rule is needed.

`devtools/notes/mutants.md` lists the harmless ones and the reasons.
"""

import functools
from dataclasses import dataclass

import numpy as np
import pytest

from tests.explorer.compiled import ptx_mutants
from tests.explorer.compiled.ptx_mutants import Key, changed, explore, options
from tests.explorer.mutants import MUTANTS
from tests.explorer.mutation import Edit, loaded
from tests.explorer.ptx.mutations import Mutation
from tests.marks import odd, some
from tricomm.explorer.compiled import race_checks, thread_clocks, thread_detector, unit_machine
from tricomm.explorer.compiled.thread_clocks import Clocks
from tricomm.explorer.compiled.thread_shadow import ThreadShadow
from tricomm.explorer.memory_model.access_kinds import scope_of
from tricomm.kernels import layout
from tricomm.kernels.collectives import registry
from tricomm.kernels.wide_words import why_not

S: Key = ("all_reduce", "one_shot", "simple")
L: Key = ("all_reduce", "one_shot", "ll")
W: Key = ("all_reduce", "one_shot", "ll128")
T: Key = ("all_reduce", "two_shot", "simple")
B: Key = ("barrier", "one_shot", "simple")
WIDE = why_not(90) is None  # this Triton compiles wide words
_ALL = ("order", "scope", "strength", "width", "sequence", "atomicity")


@dataclass(frozen=True)
class Group:
    """All mutations of some kinds, in the instructions of one Python function, of a shipped kernel.

    function    its name; with `innermost` without the functions that it calls.
    holds       words in the name of each mutation, apart from its line.
    least       the least number of mutations, under every Triton version.
    harmless    the numbers of harmless mutations before and after them.
    """

    key: Key
    function: str
    kinds: tuple[str, ...]
    least: int
    holds: str = ""
    blocks: int = 1
    schedules: int = 4
    sizes: tuple[int, ...] = ptx_mutants.SIZES
    first_epoch: int = 1
    innermost: bool = False
    harmless: tuple[int, int] = (0, 0)

    @property
    def name(self) -> str:
        return f"{'_'.join(self.key[1:])}-{self.function}-{self.holds or 'all'}"

    @functools.cached_property
    def text(self) -> str:
        """The PTX that is changed, from the call of the first size."""
        return ptx_mutants.text_of(self.key, blocks=self.blocks, sizes=self.sizes)

    @functools.cached_property
    def mutations(self) -> list[Mutation]:
        name = registry.find(*self.key).function.__name__
        result = ptx_mutants.chosen(self.text, name, self.function, self.kinds, self.holds, self.innermost)
        before, behind = self.harmless
        return result[before : len(result) - behind]

    def kinds_found(self, mutation: Mutation) -> set[str]:
        name = registry.find(*self.key).function.__name__
        with changed(mutation.name, lambda text: mutation.apply(text) if text == self.text else text, name):
            report = explore(
                self.key,
                self.schedules,
                sizes=self.sizes,
                options=options(2, self.blocks, first_epoch=self.first_epoch),
            )
        return {f.kind for f in report.findings}


FORBIDDEN = (
    Group(S, "signal", _ALL, 4, "st.release"),
    Group(S, "acquire", _ALL, 4, "ld.acquire"),
    Group(S, "enter", ("barrier",), 1, "removed", innermost=True),
    Group(S, "finish", ("barrier",), 1, "removed", innermost=True),
    # The first of the two pushes writes this rank's mailbox, which the block reads after a barrier.
    Group(L, "push_to_all", ("scope", "strength", "width"), 3, "st.relaxed", sizes=(520, 300), harmless=(3, 0)),
    Group(L, "poll_planes", ("strength", "width"), 2, "v2.b64"),
    # Each has a quarter of the words of two calls: most schedules pass over the moment between the two loads.
    Group(L, "poll_planes", ("sequence",), 2, "second load", schedules=20, sizes=(1024, 1020)),
    *(
        Group(W, "push_to_all", ("scope", "strength"), 4, "b128", sizes=(520, 300), harmless=(4, 0)),
        Group(W, "poll_planes", ("scope", "strength"), 8, "b128"),
    )
    * WIDE,
    # The first is of `synchronize`, which this kernel calls at an epoch that clears.
    Group(L, "acquire", ("scope", "strength", "width", "sequence"), 3, "ld.acquire", harmless=(3, 0)),
    Group(L, "announce", ("strength", "width"), 2, "st.relaxed"),
    Group(T, "signal", _ALL, 8, "st.release"),
    Group(T, "acquire", _ALL, 8, "ld.acquire"),
    # The reduction over the fingerprints after the acquire has barriers as well.
    Group(S, "barrier", ("barrier",), 1, "removed", innermost=True, harmless=(1, 0)),
    Group(S, "wait_sequence", ("barrier",), 4, "bar.sync"),
    Group(B, "signal", ("scope", "strength", "width"), 3, "st.release"),
    Group(B, "acquire", ("scope", "strength", "width"), 3, "ld.acquire"),
)


_SECOND_LOAD = next(group for group in FORBIDDEN if group.holds == "second load")


@pytest.mark.parametrize("group", [*FORBIDDEN[:2], _SECOND_LOAD], ids=lambda group: group.name)
def test_a_mutant_is_noticed(group):
    mutation = group.mutations[0]
    assert group.kinds_found(mutation) & mutation.expected, mutation.name


@pytest.mark.parametrize(
    "group", some(FORBIDDEN, lambda number, group: group.function == "finish", odd), ids=lambda group: group.name
)
def test_all_forbidden_mutations_are_noticed(group):
    assert len(group.mutations) >= group.least
    missed = [m.name for m in group.mutations if not group.kinds_found(m) & m.expected]
    assert not missed


def test_there_are_at_least_forty():
    assert sum(group.least for group in FORBIDDEN) >= 40


@pytest.mark.parametrize("weaker", ["st.relaxed.gpu.global.b64", "st.global.b64"])
def test_a_weaker_header_of_ll_is_noticed(weaker):
    """Changed in the source, because some places in the PTX are harmless."""
    with loaded([Edit("kernels/primitives.py", "st.relaxed.sys.global.b64", weaker)]):
        report = explore(L)
    assert {f.kind for f in report.findings} & {"race", "scope"}, report


def test_a_poll_that_reads_another_blocks_epoch_is_noticed():
    """In lanes without a header, under a mask that the interpreter heeds and the PTX does not."""
    with loaded([Edit("kernels/device/arrival.py", "place, EPOCHS + tl.program_id(0))", "place, EPOCHS)")]):
        report = explore(L, blocks=2)
    assert "race" in {f.kind for f in report.findings}, report


@pytest.mark.exhaustive
@pytest.mark.parametrize(("name", "key"), [("M12", L), ("M13", S)])
def test_a_mistake_in_messages_of_several_chunks_is_noticed(name, key):
    memory = layout.plan(2, options(2).arena_bytes)
    chunk = memory.ll_buffer // 16 if key is L else memory.simple_buffer // 4  # both ranks' buffers are one stage
    with loaded(MUTANTS[name].edits):
        report = explore(key, 2, sizes=(chunk * 3 // 2,) * 2 if key is L else (chunk * 5 // 2,))
    assert {f.kind for f in report.findings} & MUTANTS[name].expect, report


# Each rule is needed: without it a mutant is passed.


def every_access_releases_and_acquires(patch: pytest.MonkeyPatch) -> None:
    publish, observe = Clocks.publish, Clocks.observe
    patch.setattr(Clocks, "publish", lambda self, team, slot, sem, *rest: publish(self, team, slot, "acq_rel", *rest))
    patch.setattr(
        Clocks, "observe", lambda self, team, slots, ns, sem, scope: observe(self, team, slots, ns, "acq_rel", scope)
    )
    patch.setattr(thread_detector, "RELEASES", ("release", "acq_rel", "relaxed", "volatile"))


def every_scope_is_the_system(patch: pytest.MonkeyPatch) -> None:
    wide = dict.fromkeys(thread_clocks.SCOPES, thread_clocks.SYS)
    for module in (thread_detector, unit_machine):
        patch.setattr(module, "SCOPES", wide)


def a_block_is_one_thread(patch: pytest.MonkeyPatch) -> None:
    row, learn, known = Clocks.row, Clocks.learn, Clocks.known

    def all_of_it(self, team, thread=0):
        result = row(self, team, thread)
        result[:, team.slots] = self.time[team.slots] - (np.arange(len(team.slots)) == thread)
        return result

    def known_to_it(self, team, slots, others, apart=None):
        return np.where(self.block[others] == team.number, self.time[others], known(self, team, slots, others, apart))

    patch.setattr(Clocks, "row", all_of_it)
    patch.setattr(Clocks, "learn", lambda self, team, ts, k: learn(self, team, np.arange(len(team.slots)), k))
    patch.setattr(Clocks, "known", known_to_it)


def writes_are_forgotten(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(ThreadShadow, "unordered_write", lambda self, team, pieces, *rest: np.zeros(len(pieces), bool))


def all_strong_accesses_are_morally_strong(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(ThreadShadow, "fits", lambda self, kind, slots: lambda kinds, others, mine: scope_of(kinds) > 0)


_RULES = [
    (every_access_releases_and_acquires, S, "signal", "order", "st.release"),
    (every_access_releases_and_acquires, S, "acquire", "order", "ld.acquire"),
    (every_scope_is_the_system, S, "signal", "scope", "st.release"),
    (every_scope_is_the_system, S, "acquire", "scope", "ld.acquire"),
    (all_strong_accesses_are_morally_strong, L, "acquire", "scope", "ld.acquire"),
    (a_block_is_one_thread, S, "barrier", "barrier", "removed"),
    (writes_are_forgotten, S, "signal", "order", "st.release"),
]


@pytest.mark.parametrize(("rule", "key", "function", "kind", "holds"), some(_RULES, 7))
def test_each_rule_is_needed(rule, key, function, kind, holds, monkeypatch):
    """Without the rule there is no finding under the schedules that show the mutant."""
    group = Group(key, function, (kind,), 1, holds)
    mutation = next(m for m in group.mutations if group.kinds_found(m))
    rule(monkeypatch)
    assert not group.kinds_found(mutation)


@pytest.mark.parametrize(("name", "says"), [("M05", "LL word overwritten"), ("M09", "zero of a clearing")])
def test_the_rule_of_words_is_needed(name, says, monkeypatch):
    """Mailboxes that do not rotate; a header after a clearing that releases nothing."""
    mutant = MUTANTS[name]
    sizes = (36, 1, 40) if name == "M05" else (1, 520)
    given = options(2, first_epoch=mutant.first_epoch)

    def findings():
        with loaded(mutant.edits):
            return explore(L, sizes=sizes, options=given).findings

    assert any(says in finding.text for finding in findings())
    monkeypatch.setattr(race_checks.RaceChecks, "overwritten", lambda *given: None)
    assert not any(says in finding.text for finding in findings())


def test_late_stores_and_early_loads_are_no_race_by_themselves():
    assert explore(L, 8, faults=("delay",)).ok
