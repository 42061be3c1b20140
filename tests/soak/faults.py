"""The soak's faults: the errors that each rank must get, the time limits, and a pure function that judges reports."""

from __future__ import annotations

from dataclasses import dataclass, field

from tests.soak.worker import Report

STALL = 5.0  # the stall limit of every group
PAUSE = 1.5  # seconds for which a rank may be stopped without a fault
TIMEOUT = 20.0  # the limit of a call


@dataclass(frozen=True)
class Fault:
    """`survivors`: the errors that the other ranks may get, at least one of them the first; empty: they get none.

    `victim` likewise, for the rank itself; None: it is dead. `within`: seconds, for a communicator and for c10d.
    """

    name: str
    survivors: tuple[str, ...]
    victim: tuple[str, ...] | None
    within: tuple[float, float]


# One rank notices the cause; the others may only notice that this rank aborts the group or leaves it.
LEFT = ("PeerDied", "GroupAborted")
FAULTS = {
    fault.name: fault
    for fault in (
        Fault("kill", LEFT, None, (2.0, 10.0)),
        Fault("pause", (), (), (0.0, 0.0)),
        Fault(
            "stop",
            ("PeerStalled", "GroupAborted", "CollectiveTimeout", "PeerDied"),
            ("GroupAborted", "PeerStalled", "PeerDied", "CollectiveTimeout"),
            (STALL + 1.0, TIMEOUT + 5.0),
        ),
        Fault("raise", ("GroupAborted", "PeerDied"), ("Injected",), (2.0, 10.0)),
        Fault("interrupt", ("GroupAborted", "PeerDied"), ("KeyboardInterrupt",), (2.0, 10.0)),
        Fault("leave", LEFT, (), (2.0, 10.0)),
        Fault("wrong", ("CollectiveMismatch",), ("CollectiveMismatch",), (1.0, 10.0)),
    )
}
_QUOTES = "Cannot extract tensors from value"
_REPLACES = (
    "expected a sequence of integers or a single integer"  # NumPy raises this for an interrupt while it reads a shape
)
UNCERTAIN = ("raise", "interrupt", "leave")  # the cause that the others see depends on the moment


@dataclass
class Outcome:
    """One round as the supervisor saw it; reports by rank, None for a process that ended."""

    route: str
    fault: str | None
    victim: int
    at: float | None
    reports: list[Report | None]
    problems: list[tuple[str, str]] = field(default_factory=list)
    codes: dict[int, int | None] = field(default_factory=dict)  # exit codes of the processes that ended


def judge(outcome: Outcome, slack: float) -> list[tuple[str, str]]:
    """The errors of a round: pairs of a kind (wrong, unnamed, unexpected, late, lost) and a text."""
    results: list[tuple[str, str]] = []
    fault = FAULTS.get(outcome.fault or "")
    first_seen = False
    for rank, report in enumerate(outcome.reports):
        who = f"{outcome.route}, {outcome.fault or 'no fault'} of rank {outcome.victim}: rank {rank}"
        struck = fault is not None and rank == outcome.victim
        if report is None:
            if not (struck and fault and fault.victim is None):
                results.append(("lost", f"{who}'s process ended, exit code {outcome.codes.get(rank)}"))
            continue
        results += [("wrong", text) for text in report.wrong]
        allowed = () if fault is None else fault.victim if struck else fault.survivors
        results += _judge_error(who, report, allowed or (), struck)
        if report.error is not None and fault is not None and not struck:
            first_seen |= report.error[0] in fault.survivors[:1]
            if outcome.at is not None and report.error[3] >= outcome.at:
                seconds = report.error[3] - outcome.at
                limit = fault.within[outcome.route != "communicator"]
                if fault.survivors and seconds > limit + slack:
                    results.append(
                        ("late", f"{who} got {report.error[0]} after {seconds:.1f} s, promised {limit:.0f} s")
                    )
    errors = [r.error for r in outcome.reports if r is not None and r.error is not None]
    if fault is not None and errors and fault.survivors and not first_seen and fault.name not in (*UNCERTAIN, "stop"):
        results.append(("unexpected", f"{outcome.route}, {fault.name}: no rank got {fault.survivors[0]}"))
    return results


def _judge_error(who: str, report: Report, allowed: tuple[str, ...], struck: bool) -> list[tuple[str, str]]:
    if report.error is None:
        return [("unexpected", f"{who} got no error, instead of {', '.join(allowed)}")] if allowed else []
    kind, named, text, _ = report.error
    # Python that torch's C++ calls: an exception there becomes a RuntimeError that quotes it.
    quoted = struck and kind == "RuntimeError" and text.startswith(tuple(f"{_QUOTES}: {name}" for name in allowed))
    replaced = struck and kind == "TypeError" and text.startswith(_REPLACES)
    if kind in allowed or quoted or replaced:
        return []
    if not named and not (struck and kind in ("Injected", "KeyboardInterrupt")):
        return [("unnamed", f"{who} got {kind}: {text}")]
    return [("unexpected", f"{who} got {kind}, instead of {', '.join(allowed) or 'none'}: {text}")]
