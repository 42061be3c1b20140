"""Run every rank in one process, under any schedule, and find races without a GPU."""

from tricomm.explorer.campaign import check, replay
from tricomm.explorer.findings import Finding
from tricomm.explorer.report import Report
from tricomm.explorer.simulation import simulate

__all__ = ["Finding", "Report", "check", "replay", "simulate"]
