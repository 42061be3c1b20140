"""Prebuilt cubins load on a machine without a compiler, and only if they match the kernel that would be compiled."""

from __future__ import annotations

import itertools
import json
import logging
import os
import re
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import triton

from tests.core import compiles
from tests.kernels.fake_launch import FakeGpu, Result
from tricomm.core import cubins, machine_code
from tricomm.core.cubins import Metadata
from tricomm.errors import ResourceError
from tricomm.kernels import layout
from tricomm.kernels.launch import compiler, cuda_launcher
from tricomm.perf.machine_code import prebuild
from tricomm.perf.machine_code.prebuild import Order
from tricomm.store import files

BARRIER = Order("sm_90", 2, "ddp", ("barrier",))
CUBIN = b"\x7fELF" + bytes(range(256)) * 8
KEY, OTHER = "ab" * 32, "cd" * 32
_names = itertools.count()


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """One kernel of `tricomm compile --world-size 2 --for ddp --collective barrier`; on a machine without a compiler,
    the one in TRICOMM_CUBINS."""
    if (given := os.environ.get(cubins.VARIABLE)) is not None:
        return given
    out = tmp_path_factory.mktemp("cubins")
    assert prebuild.build(BARRIER, 0, out)[1]
    return str(out)


@pytest.fixture
def no_compiler(monkeypatch):
    def refuse(*args, **keywords):
        raise FileNotFoundError("ptxas: it is not on this machine")

    monkeypatch.setattr(triton, "compile", refuse)
    monkeypatch.setattr("triton.backends.nvidia.compiler.get_ptxas", refuse)
    for known in ("_compiled", "_loaded"):
        monkeypatch.setattr(cuda_launcher, known, {})


@pytest.fixture
def said(monkeypatch, caplog):
    """The logged warnings; each is logged once a process, which this fixture resets."""
    monkeypatch.setattr(cubins, "_said", set())
    caplog.set_level(logging.WARNING, "tricomm")
    return lambda: [record.getMessage() for record in caplog.records]


@pytest.fixture
def saved(tmp_path, monkeypatch):
    """A directory with one kernel, and the path of its file."""
    directory = tmp_path / "cubins"
    compiled = SimpleNamespace(asm={"cubin": CUBIN}, metadata=Metadata("entry", 8, 64))
    cubins.save(directory, "entry", KEY, 90, compiled)
    monkeypatch.setenv(cubins.VARIABLE, str(directory))
    (path,) = directory.glob("*/*.json")
    return directory, path


def launched(by=machine_code.get, failures=None):
    """Launch a barrier of two ranks through the whole launch path of a GPU; return the driver's module."""
    _, variant = prebuild.ordered(BARRIER)[0]
    device, group = FakeGpu(f"fake {next(_names)}", failures=failures or {}), torch.zeros(512, dtype=torch.int64)
    words = layout.group_argument(group, group.tolist(), 2)
    what = variant.kernel, variant.constexprs, variant.bits, variant.aligned
    cuda_launcher.code_of(*what, device.capability, by)
    run = cuda_launcher.make_launcher(*variant, words, device)
    run(group, group, 0, 7)
    return device


@pytest.mark.without_compiler
def test_prebuilt_code_is_launched_without_a_compiler(built, no_compiler, monkeypatch):
    monkeypatch.setenv(cubins.VARIABLE, built)
    device = launched()
    (launch,) = device.launches
    assert launch.function == "barrier" and 7 in launch.words and launch.threads == (256, 1, 1)
    assert device.calls.count("cuFuncLoad") == 1


@pytest.mark.without_compiler
def test_without_prebuilt_code_the_compiler_is_missed(no_compiler, monkeypatch, tmp_path):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.delenv(cubins.VARIABLE, raising=False)
    with pytest.raises(ResourceError, match="Triton cannot compile barrier for sm_90: FileNotFoundError: ptxas"):
        launched()


def test_prebuilt_code_is_the_code_that_would_be_compiled(built):
    key, variant = prebuild.ordered(BARRIER)[0]
    compiled = compiler.compile_kernel(variant.kernel, variant.constexprs, variant.bits, variant.aligned, 90)
    found = cubins._read(cubins._path(Path(built) / cubins.folder_name(90), "barrier", key), key, trusted=False)
    assert found.asm["cubin"] == compiled.asm["cubin"]
    assert [getattr(compiled.metadata, name) for name in Metadata._fields] == list(found.metadata)


def test_a_saved_file_loads_as_the_same_code(saved, said):
    found = cubins.find("entry", KEY, 90)
    assert found is not None and found.asm == {"cubin": CUBIN} and found.metadata == Metadata("entry", 8, 64)
    assert said() == []


def test_several_directories_are_searched(saved, said, monkeypatch, tmp_path):
    empty = tmp_path / "empty"
    empty.mkdir()
    monkeypatch.setenv(cubins.VARIABLE, f"{tmp_path / 'none'}:{empty}::{saved[0]}")
    assert cubins.find("entry", KEY, 90) is not None
    assert len(said()) == 2 and "No such file" in said()[0] and "empty has no machine code" in said()[1]


def test_a_package_is_found_without_a_variable(saved, said, monkeypatch, tmp_path):
    package = tmp_path / "site" / cubins.PACKAGE
    package.parent.mkdir()
    saved[0].rename(package)
    monkeypatch.delenv(cubins.VARIABLE)
    monkeypatch.syspath_prepend(str(package.parent))
    assert cubins.find("entry", KEY, 90) is None, "a folder of that name is no package"
    (package / "__init__.py").touch()
    assert cubins.find("entry", KEY, 90) is not None and said() == []


def _flip(path):
    record = json.loads(path.read_text())
    record["shared"] += 1
    path.write_text(json.dumps(record))


def _rename(path):
    path.rename(cubins._path(path.parent, "entry", OTHER))


def _link(path):
    path.rename(path.with_suffix(".moved"))
    path.symlink_to(path.with_suffix(".moved"))


def _fifo(path):
    path.unlink()
    os.mkfifo(path)


BROKEN = {
    "a changed number": (_flip, "it is broken, or of another kernel"),
    "a changed byte": (lambda p: p.write_bytes(p.read_bytes().replace(b': "eN', b': "eO')), "it is broken"),
    "cut": (lambda p: p.write_bytes(p.read_bytes()[:-9]), "[Uu]nterminated|column"),
    "empty": (lambda p: p.write_bytes(b""), "Expecting value"),
    "a list": (lambda p: p.write_text("[]"), "an object is needed"),
    "another key": (_rename, "it is broken, or of another kernel"),
    "a link": (_link, "symbolic link"),
    "a pipe": (_fifo, "no regular file"),
    "writable directory": (lambda p: p.parent.parent.chmod(0o777), "other users than uid"),
    "writable folder": (lambda p: p.parent.chmod(0o770), "other users than uid"),
    "a file that its group can write": (lambda p: p.chmod(0o664), r"can write it \(uid \d+, mode 664\)"),
    "a file that all can write": (lambda p: p.chmod(0o646), "can write it"),
    "a directory": (lambda p: (p.unlink(), p.mkdir()), "no regular file"),
}
if os.geteuid() == 0:
    BROKEN["another user's file"] = (lambda p: os.chown(p, 12345, -1), "belongs to another user")
    BROKEN["another user's directory"] = (lambda p: os.chown(p.parent.parent, 12345, -1), "other users than uid")


@pytest.mark.parametrize("kind", BROKEN)
def test_broken_or_untrusted_code_is_compiled_instead_with_one_warning(kind, saved, said):
    breaks, words = BROKEN[kind]
    breaks(saved[1])
    key = OTHER if kind == "another key" else KEY
    assert cubins.find("entry", key, 90) is None and cubins.find("entry", key, 90) is None
    (message,) = said()
    assert message.endswith("a kernel that is not found elsewhere has to be compiled") and str(saved[0]) in message
    assert re.search(words, message)


def test_without_the_check_of_directories_others_can_replace_the_code(saved, said, monkeypatch):
    saved[0].chmod(0o777)
    monkeypatch.setattr(files, "check_directory", lambda path: None)
    assert cubins.find("entry", KEY, 90) is not None


def test_without_the_digest_a_changed_file_is_loaded(saved, said, monkeypatch):
    _flip(saved[1])
    monkeypatch.setattr(cubins._File, "digest", lambda self: self.sha256)
    found = cubins.find("entry", KEY, 90)
    assert found is not None and found.metadata.shared == 65


def test_without_the_check_of_files_others_can_have_changed_the_code(saved, said, monkeypatch):
    saved[1].chmod(0o666)
    monkeypatch.setattr(files, "read", lambda path, most, **checks: path.read_bytes())
    assert cubins.find("entry", KEY, 90) is not None


@pytest.mark.parametrize("error", [ValueError("tricomm_cubins.__spec__ is None"), ModuleNotFoundError("no parent")])
def test_a_package_whose_lookup_fails_is_ignored(error, saved, said, monkeypatch):
    def fail(name):
        raise error

    monkeypatch.setattr(cubins.importlib.util, "find_spec", fail)
    assert cubins.find("entry", KEY, 90) is not None
    assert said() == [
        f"prebuilt machine code: package tricomm_cubins: {error}; "
        "a kernel that is not found elsewhere has to be compiled"
    ]


def test_sources_that_cannot_be_read_raise_nothing(saved, said, monkeypatch):
    def fail(capability):
        raise PermissionError(1, "Operation not permitted", "/kernels/one.py")

    monkeypatch.setattr(cubins, "folder_name", fail)
    assert cubins.find("entry", KEY, 90) is None
    assert "/kernels/one.py: Operation not permitted" in said()[0]


@pytest.mark.parametrize("change", ["override", "hook"])
def test_code_that_the_user_alters_is_not_replaced_by_prebuilt_code(change, built, no_compiler, monkeypatch, tmp_path):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv(cubins.VARIABLE, built)
    if change == "override":
        monkeypatch.setenv("TRITON_KERNEL_OVERRIDE", "1")
    else:
        monkeypatch.setattr(triton.knobs.runtime, "add_stages_inspection_hook", lambda *stages: ("", ""))
    with pytest.raises(ResourceError, match="Triton cannot compile barrier"):
        launched()
    with pytest.raises(ResourceError, match="TRITON_KERNEL_OVERRIDE is set|a hook changes"):
        prebuild.ordered.__wrapped__(BARRIER)


def refuses_prebuilt_code(built, monkeypatch, refused=""):
    """A barrier on a driver that refuses its first module; return the names of the compiled kernels."""
    monkeypatch.setenv(cubins.VARIABLE, built)
    names = compiles.counted(monkeypatch)
    failures = {("cuModuleLoadData", 1): Result.CUDA_ERROR_NOT_SUPPORTED}
    return names, lambda: launched(partial(machine_code.get, refused=refused), failures)


def test_prebuilt_code_that_the_driver_refuses_is_compiled_with_one_warning(built, said, monkeypatch):
    names, launch = refuses_prebuilt_code(built, monkeypatch)
    device = launch()
    assert names == ["barrier"] and len(device.launches) == 1 and device.calls.count("cuModuleLoadData") == 2
    (message,) = said()
    assert "barrier: cuModuleLoadData on" in message and "CUDA_ERROR_NOT_SUPPORTED" in message
    launched()
    assert names == ["barrier"] and len(said()) == 1, "another device gets the compiled kernel"


def test_without_a_replacement_the_call_raises_the_drivers_refusal(built, said, monkeypatch):
    names, launch = refuses_prebuilt_code(built, monkeypatch)
    monkeypatch.setattr(cuda_launcher, "_instead_of", lambda *given: None)
    with pytest.raises(ResourceError, match="cuModuleLoadData on .* failed: CUDA_ERROR_NOT_SUPPORTED"):
        launch()
    assert names == []


def test_no_replacement_is_compiled_if_compiling_is_refused(built, said, monkeypatch):
    names, launch = refuses_prebuilt_code(built, monkeypatch, "not now")
    with pytest.raises(ResourceError, match=r"compiled \(the driver refuses what was prebuilt\), and not now"):
        launch()
    assert names == [] and cuda_launcher._compiled == {}


@pytest.mark.parametrize("change", ["sources", "Triton", "architecture"])
def test_code_of_other_sources_or_another_triton_is_refused_by_name_once(change, saved, said, monkeypatch):
    there, capability = saved[1].parent.name, 90
    if change == "architecture":
        capability = 100
    else:
        other = there.replace("triton", "triton4." if change == "Triton" else "triton") + "0" * (change == "sources")
        monkeypatch.setattr(cubins, "folder_name", lambda capability: other)
    assert cubins.find("entry", KEY, capability) is None and cubins.find("entry", KEY, capability) is None
    (message,) = said()
    assert f"has machine code for {there} alone; this process needs {cubins.folder_name(capability)}" in message


def test_several_missing_entries_are_logged_once(saved, said):
    for key in (OTHER, "ef" * 32):
        assert cubins.find("entry", key, 90) is None
    assert len(said()) == 1 and "has no entry for some calls" in said()[0]


def test_the_folder_follows_the_sources_the_triton_and_the_architecture(monkeypatch, tmp_path):
    name = cubins.folder_name.__wrapped__
    plain = name(90)
    assert plain.startswith(f"sm_90-triton{triton.__version__}-") and name(100) != plain
    monkeypatch.setattr(cubins.triton, "__version__", "9.9.9")
    assert name(90).startswith("sm_90-triton9.9.9-")
    (tmp_path / "one.py").write_text("a = 1\n")
    monkeypatch.setattr(cubins.kernels, "__file__", str(tmp_path / "__init__.py"))
    own = name(90)
    (tmp_path / "one.py").write_text("a = 2\n")
    assert name(90) != own


def test_a_file_is_written_atomically_and_only_to_a_directory_that_others_cannot_write(tmp_path, monkeypatch):
    compiled = SimpleNamespace(asm={"cubin": CUBIN}, metadata=Metadata("entry", 8, 64))
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o777)
    with pytest.raises(PermissionError, match="other users than uid"):
        cubins.save(shared, "entry", KEY, 90, compiled)
    monkeypatch.setattr(os, "replace", lambda *paths: (_ for _ in ()).throw(OSError("the disk is full")))
    with pytest.raises(OSError, match="full"):
        cubins.save(tmp_path / "own", "entry", KEY, 90, compiled)
    assert list(tmp_path.rglob("*.json*")) == [] and cubins.saved(tmp_path / "own", "entry", KEY, 90) == 0


def test_code_that_wants_scratch_memory_is_not_saved(tmp_path):
    compiled = SimpleNamespace(asm={"cubin": CUBIN}, metadata=Metadata("entry", 8, 64, profile_scratch_size=64))
    with pytest.raises(ResourceError, match="entry: Triton wants scratch memory"):
        cubins.save(tmp_path, "entry", KEY, 90, compiled)
