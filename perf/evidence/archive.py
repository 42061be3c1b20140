"""What a run leaves: one archive with everything, and one page to read."""

from __future__ import annotations

import json
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tricomm.perf.evidence import journal, stage_workers, summary
from tricomm.perf.evidence.stage import Stage

NAME = "evidence.zip"


def write(folder: Path, stages: Sequence[Stage], results: Sequence[dict[str, Any]]) -> Path:
    """The summary, and an archive of it, of a result per stage, of the journal, and of what processes printed."""
    page = summary.write(folder, stages, results)
    path, partial = folder / NAME, folder / f"{NAME}.part"
    with zipfile.ZipFile(partial, "w", zipfile.ZIP_DEFLATED) as archive:
        for result in results:
            archive.writestr(f"{result['stage']}.json", json.dumps(result, indent=1) + "\n")
        for name in (page.name, journal.NAME, stage_workers.LOG):
            if (folder / name).exists():
                archive.write(folder / name, name)
    partial.replace(path)
    return path
