"""The tree stays within the limits of `house_rules`, and each rule reports a violation."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from tests import house_rules
from tests.wheel_gate import ROOT

EVERYWHERE = (*house_rules.ROOMS, "devtools", "tests")


def test_no_file_is_too_long() -> None:
    assert house_rules.long_files(ROOT, EVERYWHERE) == []


def test_no_folder_is_crowded() -> None:
    assert house_rules.crowded_folders(house_rules.modules(ROOT, EVERYWHERE)) == []


@pytest.mark.parametrize(
    "rule",
    [
        house_rules.long_signatures,
        house_rules.repeated_classes,
        house_rules.repeated_modules,
        house_rules.import_circles,
    ],
)
def test_a_rule_is_kept(rule: Callable[[house_rules.Sources], list[str]]) -> None:
    assert rule(house_rules.sources(ROOT)) == []


def test_folders_import_each_other_in_one_direction() -> None:
    assert house_rules.folder_circles(house_rules.sources(ROOT)) == []


def _tree(root: Path, files: dict[str, str]) -> house_rules.Sources:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return house_rules.sources(root)


def test_a_long_file_and_a_crowded_folder_are_named(tmp_path: Path) -> None:
    crowd = {f"perf/m{number}.py": "" for number in range(house_rules.MODULES + 1)}
    sources = _tree(tmp_path, {**crowd, "store/long.py": "x = 1\n" * (house_rules.LINES + 1)})
    assert house_rules.long_files(tmp_path, house_rules.ROOMS) == ["store/long.py: 401 lines"]
    assert house_rules.crowded_folders(sources) == ["perf: 21 modules"]


@pytest.mark.parametrize(
    ("rule", "files", "complaint"),
    [
        (
            house_rules.long_signatures,
            {"store/a.py": "class A:\n    def f(self, a, b, c, d, e, f, *, g, h, i): ...\n"},
            "store/a.py:2 f: 9 parameters",
        ),
        (
            house_rules.long_signatures,
            {"kernels/a.py": f"@triton.jit\ndef k({', '.join(f'a{n}' for n in range(13))}): ...\n"},
            "kernels/a.py:2 k: 13 parameters",
        ),
        (
            house_rules.repeated_classes,
            {"store/a.py": "class A: ...\n", "perf/b.py": "class A: ...\n"},
            "class A: store/a.py, perf/b.py",
        ),
        (house_rules.repeated_modules, {"perf/x/a.py": "", "perf/y/a.py": ""}, "a: perf/x/a.py, perf/y/a.py"),
        (
            house_rules.import_circles,
            {
                "store/a.py": "from tricomm.store import b\n",
                "store/b.py": "if TYPE_CHECKING:\n    from tricomm.store.c import C\n",
                "store/c.py": "import tricomm.store.a\n",
            },
            "tricomm.store.a -> tricomm.store.b -> tricomm.store.c",
        ),
        (
            house_rules.folder_circles,
            {
                "store/a.py": "from tricomm.store.x.b import f\n",
                "store/x/b.py": "def f():\n    from tricomm.store import c\n",
                "store/c.py": "",
                "tricomm/errors.py": "",
                "tricomm/top.py": "import tricomm.store.c\n",
                "store/d.py": "from tricomm import errors\n",
            },
            "store -> store/x",
        ),
    ],
)
def test_a_broken_rule_is_named(
    tmp_path: Path, rule: Callable[[house_rules.Sources], list[str]], files: dict[str, str], complaint: str
) -> None:
    assert rule(_tree(tmp_path, files)) == [complaint]


def test_no_product_code_loads_a_pickle() -> None:
    """The flight recorder writes one, because torch's analyser reads no other format."""
    loads = re.compile(r"\bpickle\.(load|loads|Unpickler)\b|from pickle import|weights_only=False")
    files = [
        file for room in ("tricomm", "kernels", "store", "perf", "explorer") for file in (ROOT / room).rglob("*.py")
    ]
    assert len(files) > 300
    assert [file.name for file in files if loads.search(file.read_text())] == []
    assert loads.search("pickle.loads(data)") and not loads.search("pickle.dumps(data)")
