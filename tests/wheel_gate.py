"""Checks a wheel: `python -m tests.wheel_gate content WHEEL`, and `imports SITE` where it was installed."""

from __future__ import annotations

import importlib
import pkgutil
import sys
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
ROOMS = ("explorer", "kernels", "store", "perf")


def expected() -> set[str]:
    """Names in the wheel of everything that the checkout says belongs to the package."""
    files = {p for p in (ROOT / "tricomm").rglob("*.py")} | {p for p in (ROOT / "tricomm" / "tables").glob("*.json")}
    names = {str(p.relative_to(ROOT)) for p in files} | {"tricomm/py.typed"}
    names |= {f"tricomm/{p.relative_to(ROOT)}" for p in (ROOT / "perf" / "dashboard" / "page").iterdir()}
    for room in ROOMS:
        names |= {f"tricomm/{p.relative_to(ROOT)}" for p in (ROOT / room).rglob("*.py")}
    return names


def content(wheel: Path) -> list[str]:
    """The files that `wheel` lacks, and those that it would install outside the package."""
    with zipfile.ZipFile(wheel) as archive:
        names = {n for n in archive.namelist() if not n.endswith("/")}
    wrong = [f"{name} is not in the wheel" for name in sorted(expected() - names)]
    if not any(n.startswith("tricomm/tables/") and n.endswith(".json") for n in names):
        wrong.append("no table is in the wheel")
    wrong += [
        f"{name} would land in site-packages"
        for name in sorted(names)
        if name.split("/")[0] != "tricomm" and not name.split("/")[0].endswith(".dist-info")
    ]
    return wrong


def imports(site: Path) -> list[str]:
    """The modules of the package installed in `site` that fail to import or are imported from another directory."""
    package = importlib.import_module("tricomm")
    wrong, seen = [], set()
    for module in pkgutil.walk_packages(package.__path__, "tricomm."):
        seen.add(module.name)
        if module.name == "tricomm.__main__":
            continue  # importing it is harmless, but it is a command, not a module
        try:
            result = importlib.import_module(module.name)
        except Exception as error:
            wrong.append(f"{module.name}: {type(error).__name__}: {error}")
            continue
        if not Path(result.__file__ or "").resolve().is_relative_to(site.resolve()):
            wrong.append(f"{module.name} came from {result.__file__}")
    wrong += [f"tricomm.{room} was not found" for room in ROOMS if f"tricomm.{room}" not in seen]
    for name in ("py.typed", "tables/default.json"):
        if not (site / "tricomm" / name).is_file():
            wrong.append(f"{name} is not installed")
    return wrong


def main(arguments: list[str]) -> int:
    check, path = arguments
    wrong = {"content": content, "imports": imports}[check](Path(path))
    print("\n".join(wrong) or f"wheel gate, {check}: ok")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
