"""docs/api.md names every public name and member, with its signature, and none that does not exist."""

from __future__ import annotations

import dataclasses
import inspect
import re
from typing import Any

import pytest
import torch

import tricomm
from tests.wheel_gate import ROOT

ENTRY = re.compile(r"^- `(\w+)(\(.*?\)|=[^`]*)?`", re.MULTILINE)
MEMBERS = {"Communicator": tricomm.Communicator, "Symmetric": tricomm.Symmetric, "Work": tricomm.Work}
RESULTS = {cls.__name__: cls for cls in (tricomm.Choice, tricomm.Statistics, tricomm.Report, tricomm.Finding)}


def sections() -> dict[str, str]:
    parts = re.split(r"^## (.*)\n", (ROOT / "docs" / "api.md").read_text(), flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


def entries(section: str) -> dict[str, str]:
    """The entries of a section by name, with their signature or default if they have one."""
    found = ENTRY.findall(sections()[section])
    assert len({name for name, _ in found}) == len(found)
    return dict(found)


def signature(function: Any) -> str:
    """The signature as the page writes it: without `self` and without types."""
    given = inspect.signature(function)
    plain = [p.replace(annotation=inspect.Parameter.empty) for p in given.parameters.values() if p.name != "self"]
    return str(given.replace(parameters=plain, return_annotation=inspect.Signature.empty)).replace("'", '"')


def members(cls: type, made: object) -> dict[str, str]:
    """The public names of `cls` and of its object `made`: with a method's signature."""
    names = {name for name in (*dir(cls), *vars(made)) if not name.startswith("_")}
    values = {name: inspect.getattr_static(cls, name, None) for name in names}
    return {name: signature(value) if callable(value) else "" for name, value in values.items()}


def test_every_name_of_the_package_is_on_the_page() -> None:
    names = set(re.findall(r"`(\w+)", (ROOT / "docs" / "api.md").read_text()))
    assert set(tricomm.__all__) <= names


def test_functions_have_their_signatures() -> None:
    functions = {name: getattr(tricomm, name) for name in tricomm.__all__}
    functions = {name: signature(value) for name, value in functions.items() if inspect.isfunction(value)}
    assert entries("Functions") == functions


@pytest.mark.parametrize("name", MEMBERS)
def test_members_have_their_signatures(name: str) -> None:
    def body(comm: tricomm.Communicator) -> dict[str, object]:
        handle = comm.symmetric((2,), torch.float32)
        work = comm.all_reduce(torch.ones(2), async_op=True)
        return {"Communicator": comm, "Symmetric": handle, "Work": work}

    made = tricomm.simulate(body, 1)[0][name]
    expected = members(MEMBERS[name], made)
    if name == "Communicator":
        expected[name] = signature(tricomm.Communicator)
    assert entries(name) == expected


def test_options_have_their_defaults() -> None:
    public = [field for field in dataclasses.fields(tricomm.Options) if not field.name.startswith("_")]
    assert entries("Options") == {field.name: f"={field.default}" for field in public}
    methods = [name for name in dir(tricomm.Options) if not name.startswith("_")]
    assert set(methods) == {field.name for field in public}


@pytest.mark.parametrize("name", RESULTS)
def test_results_have_their_fields(name: str) -> None:
    [line] = re.findall(rf"^- `{name}`: fields (.*)$", sections()["Results"], re.MULTILINE)
    named = set(re.findall(r"`(\w+)`", line.partition(", with the arguments")[0]))
    fields = {field.name for field in dataclasses.fields(RESULTS[name])}
    assert named <= fields if name == "Report" else named == fields
    assert set(entries("Results")) == set(RESULTS)


def test_every_error_is_described() -> None:
    errors = {name for name in tricomm.__all__ if isinstance(getattr(tricomm, name), type)}
    errors = {name for name in errors if issubclass(getattr(tricomm, name), tricomm.TricommError)}
    assert set(entries("Errors")) == errors
