"""Runs all ranks in one process, under any schedule, and finds races without a GPU."""

try:
    import greenlet as _greenlet  # noqa: F401  first, for a word that helps: a bare checkout has no need of it
except ModuleNotFoundError as error:
    raise ImportError(
        "tricomm.check, tricomm.simulate and all of tricomm.explorer need greenlet, which is not installed: "
        "pip install 'tricomm[explorer]'",
        name="greenlet",
    ) from error

from tricomm.explorer.campaign import check, replay
from tricomm.explorer.decorator import checked
from tricomm.explorer.report.findings import Finding
from tricomm.explorer.report.report import Report
from tricomm.explorer.simulation import simulate

__all__ = ["Finding", "Report", "check", "checked", "replay", "simulate"]
