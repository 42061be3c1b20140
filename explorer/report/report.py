"""The report of a campaign, in memory and in a file."""

from __future__ import annotations

import hashlib
import json
import platform
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import triton

from tricomm import notebook
from tricomm.errors import InvalidArgument
from tricomm.explorer.report import sarif
from tricomm.explorer.report.findings import Finding, Subject, checked
from tricomm.options import Options, Tuning

SCHEMA = 1
_ALSO_COMPILED = (
    "With --compiled a race may not show, because a version of Triton adds a barrier that the source lacks and that "
    "the next version need not add."
)


@dataclass(frozen=True)
class CampaignPlan:
    """The parameters of a campaign, as `check` takes them."""

    schedules: int | None
    strategy: str
    preemptions: int
    seed: int
    faults: tuple[str, ...]
    identical: bool | None
    keep_going: bool
    epochs: tuple[int, ...]
    ignore: frozenset[str] = frozenset()


@dataclass
class Report:
    """The outcome of `tricomm.check`.

    ok        True if no schedule showed a finding
    findings  in the order in which they were found
    ran       schedules that were run, `earlier` of them in earlier calls; `complete`: all requested ones were run
    steps     accesses to symmetric memory in all schedules; `seconds` that they took
    ended     where the budget ended, if it did
    subject   what was checked, for `tricomm check --replay`
    compiled  the architecture whose compiled kernels were run; None for Triton's interpreter
    """

    world_size: int
    strategy: str
    schedules: int | None
    preemptions: int
    seed: int
    faults: tuple[str, ...]
    residency: int | None
    options: dict[str, Any]
    subject: dict[str, Any]
    findings: list[Finding] = field(default_factory=list)
    ran: int = 0
    steps: int = 0
    seconds: float = 0.0
    complete: bool = False
    identical: bool | None = None
    compiled: str | None = None
    earlier: int = 0
    ended: str = ""

    @classmethod
    def of(cls, subject: Subject, plan: CampaignPlan) -> Report:
        fn = subject.fn
        code = getattr(fn, "__code__", None)
        file = getattr(code, "co_filename", None)
        name = {"file": file, "function": getattr(fn, "__qualname__", repr(fn)), "sha256": digest(file)}
        name = getattr(fn, "subject", name)
        return cls(
            subject.world_size,
            plan.strategy,
            plan.schedules,
            plan.preemptions,
            plan.seed,
            plan.faults,
            subject.residency,
            asdict(subject.options),
            name,
            identical=plan.identical,
            compiled=subject.compiled,
        )

    @property
    def ok(self) -> bool:
        return not self.findings

    def save(self, path: str | Path) -> None:
        """Write the report as JSON, or as SARIF if this is the suffix."""
        save([self], path)

    def as_json(self) -> dict[str, Any]:
        versions = {"python": platform.python_version(), "triton": triton.__version__}
        values = {**asdict(self), "findings": [f.as_json() for f in self.findings]}
        return {
            "schema": SCHEMA,
            "tool": "tricomm check",
            "simulated": True,
            "versions": versions,
            "ok": self.ok,
            **values,
        }

    @classmethod
    def load(cls, path: str | Path) -> Report:
        """Read a report that `save` wrote. Raises `InvalidArgument` for any other file."""
        try:
            values = json.loads(Path(path).read_text())
            if values["schema"] != SCHEMA or values["tool"] != "tricomm check":
                raise ValueError(f"schema {values['schema']!r} of {values['tool']!r}")
            world_size, subject = checked(values["world_size"], int), checked(values["subject"], dict)
            findings = [Finding.from_json(f) for f in checked(values["findings"], list)]
            for fault in [f.execution.fault for f in findings if f.execution.fault is not None]:
                checked(fault[1], int, range(world_size))
            options_of(values["options"])
            for name in ("file", "function", "sha256", "kernel", "arguments"):
                if subject.get(name) is not None:
                    checked(subject[name], str)
            for size in checked(subject["sizes"], list) if "kernel" in subject else ():
                checked(int(size), int, range(1 << 30))
            for name in ("ran", "steps"):
                checked(values[name], int)
            checked(values["seconds"], float)
            values = {"compiled": None, "earlier": 0, "ended": "", **values}
            fields = {n: values[n] for n in cls.__dataclass_fields__ if n not in ("findings", "faults")}
            return cls(**fields, findings=findings, faults=tuple(values["faults"]))
        except (OSError, ArithmeticError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
            raise InvalidArgument(f"{path}: no report of tricomm check ({type(error).__name__}: {error})") from None

    def __str__(self) -> str:
        ran = f"{self.ran} schedules ({self.strategy}), {self.steps} steps, {self.seconds:.1f} s, simulated"
        ran += f", compiled for {self.compiled}" if self.compiled is not None else ""
        ran += f", {self.earlier} of them in earlier runs" if self.earlier else ""
        ran += f"; {self.ended}" if self.ended else ""
        if self.ok:
            all_of_them = ", all there are" if self.strategy == "exhaustive" and self.complete else ""
            return f"no finding in {ran}{all_of_them}"
        lines = [f"{len(self.findings)} finding(s) in {ran}"]
        for n, f in enumerate(self.findings, 1):
            lines += [f"{n}. {f}", f"   ranks {sorted(set(f.ranks))}, schedule {f.schedule}, seed {f.seed}"]
            lines += [f"   {f.effect}"] * bool(f.effect) + [f"   {_choices(f)}"]
        if self.compiled is None and any(f.kind in ("race", "scope") for f in self.findings):
            lines.append(_ALSO_COMPILED)
        return "\n".join(lines)

    _repr_html_ = notebook.preformatted


def save(reports: Sequence[Report], path: str | Path) -> None:
    """Write the findings of all `reports` if the suffix is SARIF's. Otherwise write the first report with findings as
    JSON, for `--replay`."""
    if Path(path).suffix.lower() == ".sarif":
        values = sarif.log((finding, report.subject.get("file")) for report in reports for finding in report.findings)
    else:
        values = next((r for r in reports if not r.ok), reports[0]).as_json()
    Path(path).write_text(json.dumps(values, indent=1) + "\n")


def nothing_examined(report: Report) -> str:
    """Why a report without accesses shows nothing, and the remedy."""
    return (
        f"nothing was examined: in {report.ran} schedules of {report.world_size} rank(s) no kernel accessed symmetric "
        "memory; call a collective, or launch a kernel over `comm.symmetric` or torch's symmetric memory, on 2 ranks "
        "or more"
    )


def options_of(values: dict[str, Any]) -> Options:
    """The options of which `asdict` returned these values."""
    return Options(**{**values, "_tuning": Tuning(**values.get("_tuning", {}))})


def digest(file: str | None) -> str | None:
    """A hash of the file; None if it cannot be read."""
    try:
        return hashlib.sha256(Path(file).read_bytes()).hexdigest() if file else None
    except OSError:
        return None


def _choices(finding: Finding) -> str:
    choices = finding.execution.choices
    if not choices:
        return "no choice needed: every block runs on for as long as it can"
    shown = ", ".join(f"{step}: {task}" for step, task in choices[:12])
    return f"choices (step: task) {shown}" + (f", ... {len(choices)} in all" if len(choices) > 12 else "")
