"""`tricomm compile`: it builds every kernel that calls can choose, and refuses what does not exist before any work."""

from __future__ import annotations

import base64
import csv
import hashlib
import random
import subprocess
import sys
import zipfile
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from click.testing import CliRunner

from tricomm.cli import cli
from tricomm.commands.common import UNSUPPORTED, USAGE
from tricomm.core import cubins, kernel_forms, launch_plan
from tricomm.core.planner import choose
from tricomm.errors import InvalidArgument, ResourceError
from tricomm.kernels import collective_specs
from tricomm.kernels.collectives import registry
from tricomm.kernels.launch import compiler
from tricomm.perf.machine_code import prebuild
from tricomm.perf.machine_code.prebuild import COLLECTIVES, ENGINES, Order

BARRIER = "--arch", "sm_80", "--world-size", "2", "--for", "ddp", "--collective", "barrier"


def refused(*words, out):
    return CliRunner().invoke(cli, ["compile", *words, "--out", str(out)])


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (("--arch", "sm_91"), "architecture 'sm_91' is unknown; there is sm_70"),
        (("--arch", "cpu"), "architecture 'cpu' is unknown"),
        (("--world-size", "17"), "world size 17: 1 to 16 ranks"),
        (("--world-size", "0"), "world size 0"),
        (("--for", "tgi"), "engine 'tgi' is unknown; there is vllm, sglang, ddp, all"),
        (("--collective", "all_reduc"), "did you mean all_reduce"),
        (("--dtype", "int3"), "dtype 'int3' is unknown"),
        (("--hidden", "7"), "a multiple of 8"),
        (("--hidden", "many"), "norm@many"),
        (("--for", "vllm", "--collective", "barrier"), "nothing is left: vllm makes no call of barrier"),
        (("--for", "sglang", "--collective", "all_reduce_rms_norm"), "all_reduce_rms_norm needs hidden sizes"),
    ],
)
def test_an_order_that_does_not_exist_is_a_usage_error_before_any_work(words, reason, tmp_path, monkeypatch):
    monkeypatch.setattr(prebuild, "ordered", lambda order: pytest.fail("it began"))
    done = refused(*words, out=tmp_path / "out")
    assert done.exit_code == USAGE and reason in done.output
    assert list(tmp_path.iterdir()) == []


def test_a_directory_that_others_can_write_is_refused_before_any_work(tmp_path, monkeypatch):
    monkeypatch.setattr(prebuild, "ordered", lambda order: pytest.fail("it began"))
    tmp_path.chmod(0o777)
    done = refused(*BARRIER, out=tmp_path)
    assert done.exit_code == USAGE and "other users than uid" in done.output


def test_it_builds_keeps_and_packs(tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    out = tmp_path / "out"
    done = refused(*BARRIER, out=out)
    assert done.exit_code == 0, done.output
    first, last = done.stdout.splitlines()
    (file,) = out.glob("sm_80-*/barrier-*.json")
    assert first == f"export TRICOMM_CUBINS={out}"
    assert last.startswith("1 kernel (1 new) for sm_80, 2 ranks: ")
    assert last.endswith(f" s, {file.stat().st_size} bytes in {out}")
    before = file.stat().st_mtime_ns
    done = refused(*BARRIER, "--wheel", out=out)
    (wheel,) = out.glob("*.whl")
    assert (
        f"pip install {wheel}" in done.stdout
        and "1 kernel (0 new)" in done.stdout
        and file.stat().st_mtime_ns == before
    )
    _check(wheel, file)
    file.write_text("{}")
    assert "1 kernel (1 new)" in refused(*BARRIER, out=out).stdout, "a broken file is built again"


def _check(wheel, file):
    """Check the wheel's RECORD as an installer does, and that the kernel is in the place where it is looked up."""
    with zipfile.ZipFile(wheel) as archive:
        (record,) = [name for name in archive.namelist() if name.endswith(".dist-info/RECORD")]
        rows = list(csv.reader(archive.read(record).decode().splitlines()))
        assert sorted(name for name, *_ in rows) == sorted(archive.namelist()) and [record, "", ""] in rows
        for name, digest, size in rows:
            data = archive.read(name)
            sha = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
            assert name == record or (digest, int(size)) == (f"sha256={sha}", len(data))
        assert archive.read(f"tricomm_cubins/{file.relative_to(wheel.parent)}") == file.read_bytes()
        site = wheel.parent / "site"
        archive.extractall(site)
    key = prebuild.ordered(Order("sm_80", 2, "ddp", ("barrier",)))[0][0]
    find = f"from tricomm.core import cubins; print(cubins.find('barrier', {key!r}, 80).metadata.name)"
    found = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path.append({str(site)!r}); {find}"],
        capture_output=True, text=True, timeout=120, cwd=Path(cubins.__file__).parents[2],
    )  # fmt: skip
    assert found.stdout == "barrier\n", (found.stderr, key, file)


def test_a_wheel_has_no_files_of_other_sources(tmp_path):
    for capability in (90, 100):
        save(tmp_path, capability)
    other = tmp_path / "sm_90-triton3.9.0-000000000000"
    other.mkdir()
    (other / "x.json").write_text("{}")
    with zipfile.ZipFile(prebuild.wheel(tmp_path)) as archive:
        folders = {Path(name).parent.name for name in archive.namelist() if name.endswith(".json")}
    assert folders == {cubins.folder_name(90), cubins.folder_name(100)}
    assert prebuild.wheel(tmp_path) == prebuild.wheel(tmp_path)


def save(out, capability):
    compiled = SimpleNamespace(asm={"cubin": b"\x7fELF"}, metadata=cubins.Metadata("entry", 8, 64))
    cubins.save(out, "entry", "ab" * 32, capability, compiled)
    (path,) = out.glob(f"sm_{capability}-*/*.json")
    return path


@pytest.mark.parametrize("kind", ["broken", "renamed", "writable", "in a writable folder", "a link"])
def test_a_wheel_has_no_files_that_others_can_have_changed(kind, tmp_path, caplog):
    good, bad = save(tmp_path, 90), save(tmp_path, 100)
    if kind == "broken":
        bad.write_text("{}")
    elif kind == "renamed":
        bad = bad.rename(bad.with_name("other-0123.json"))
    elif kind == "a link":
        bad.rename(tmp_path / "moved")
        bad.symlink_to(tmp_path / "moved")
    else:
        (bad if kind == "writable" else bad.parent).chmod(0o777)
    with zipfile.ZipFile(prebuild.wheel(tmp_path)) as archive:
        assert [Path(name).parent.name for name in archive.namelist() if name.endswith(".json")] == [good.parent.name]
    (record,) = caplog.records
    assert f"{bad} is left out of the wheel: " in record.getMessage()


@pytest.mark.parametrize(("error", "words"), [(ValueError("bad PTX"), "barrier for sm_80: ValueError: bad PTX")])
def test_a_kernel_that_cannot_be_compiled_is_named(error, words, tmp_path, monkeypatch):
    class Pool:
        def __init__(self, *given, **more):
            pass

        __enter__ = lambda self: self  # noqa: E731
        __exit__ = lambda self, *error: None  # noqa: E731

        def submit(self, function, *given):
            raised = Future()
            raised.set_exception(error)
            return raised

        def shutdown(self, **how):
            pass

    monkeypatch.setattr(prebuild, "ProcessPoolExecutor", Pool)
    done = refused(*BARRIER, out=tmp_path)
    assert done.exit_code == UNSUPPORTED and words in done.output


def test_a_missing_compiler_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(compiler, "refused", lambda: "TRITON_INTERPRET is set")
    with pytest.raises(ResourceError, match="TRITON_INTERPRET"):
        prebuild.ordered.__wrapped__(Order("sm_90", 2, "ddp", ("barrier",)))


def _form_of(site, request, nbytes, mode, aligned):
    kept = []
    choice = choose(site, request, nbytes, mode)
    make = launch_plan.make_fused if choice.fused else launch_plan.make
    make(site, choice, request, aligned, mode, lambda *given: kept.append(given))
    kernel, _, constexprs, bits, aligned, _ = kept[0]
    return kernel, tuple(sorted(constexprs.items())), bits, aligned


@pytest.mark.parametrize(("arch", "world_size"), [("sm_90", 8), ("sm_80", 3), ("sm_100", 2)])
def test_no_call_of_any_size_chooses_a_kernel_that_is_not_built(arch, world_size):
    order, chance = Order(arch, world_size, "all", hidden=(4096,)), random.Random(7)
    requests = [request for request in order.calls if request.dtype in (torch.bfloat16, None) and request.op != "avg"]
    for site in order.sites():
        if site.topology not in ("", "pcie"):
            continue
        for request in requests:
            made = kernel_forms.of_calls(site, request, partial(choose, site))
            known = {(v.kernel, tuple(sorted(v.constexprs.items())), v.bits, v.aligned) for v in made}
            assert len(known) == len(made)
            row = 2 if request.epilogue is None else 2 * request.epilogue.hidden
            for _ in range(50):
                nbytes = max(1, int(2 ** chance.uniform(0, 34)) // row) * row * (request.dtype is not None)
                sized = request if request.dtype is None else request.sized(request.dtype, nbytes // 2)
                mode, aligned = chance.choice(["eager", "graph"]), request.dtype is None or chance.random() < 0.5
                assert _form_of(site, sized, nbytes, mode, aligned) in known, (request, nbytes, mode)


def _not_built(facts):
    """The forms that calls of a group with these facts choose and that are not built."""
    order = Order("sm_90", 8, "all", ("all_reduce", "all_gather", "barrier"), ("bfloat16",))
    built, wanted = set(), set()
    for site in order.sites():
        for request in order.calls:
            for known, of in ((built, site), (wanted, replace(site, **facts))):
                made = kernel_forms.of_calls(of, request, partial(choose, of))
                known |= {(v.kernel, tuple(sorted(v.constexprs.items())), v.bits, v.aligned) for v in made}
    return wanted - built


@pytest.mark.parametrize("wire", registry.WIRES)
def test_calls_and_groups_that_quantise_find_their_kernels(wire, monkeypatch):
    """At any size, of both alignments; without the option none is built."""
    asked = Order("sm_90", 8, "vllm", ("all_reduce",), ("bfloat16",), wire=wire)
    algorithm, names = registry.algorithm_of(wire), []
    for order in (asked, replace(asked, wire="")):
        forms = [form for _, form in prebuild.ordered.__wrapped__(order)]
        names.append({form.kernel.fn.__name__ for form in forms})
    assert names[0] - names[1] == {"all_reduce_two_shot_quantized"}
    chance = random.Random(7)
    for site in asked.sites():
        plain, forced = asked.calls
        assert forced.algorithm == algorithm
        made = kernel_forms.of_calls(site, forced, partial(choose, site))
        known = {(v.kernel, tuple(sorted(v.constexprs.items())), v.bits, v.aligned) for v in made}
        for _ in range(50):
            nbytes, aligned = 2 * int(2 ** chance.uniform(0, 33)), chance.random() < 0.5
            assert _form_of(site, forced.sized(torch.bfloat16, nbytes // 2), nbytes, "eager", aligned) in known
            group = replace(site, wire=wire)
            form = _form_of(group, plain.sized(torch.bfloat16, nbytes // 2), nbytes, "graph", aligned)
            assert form in known or "quantized" not in form[0].fn.__name__, nbytes


@pytest.mark.parametrize("facts", [{"max_blocks": 48}, {"no_dependent_launch": "TRICOMM_DEPENDENT_LAUNCH=0"}])
def test_groups_of_few_blocks_and_without_dependent_launches_find_their_kernels(facts, monkeypatch):
    assert _not_built(facts) == set()
    sites = Order.sites
    monkeypatch.setattr(Order, "sites", lambda order: (s for s in sites(order) if not s.no_dependent_launch))
    missing = _not_built(facts)
    assert missing and all(dict(constexprs)["DEPENDENT"] is False for _, constexprs, *_ in missing)


def test_without_the_ends_of_table_rows_some_calls_would_not_be_built(monkeypatch):
    site = next(s for s in Order("sm_90", 8).sites() if not (s.topology or s.no_dependent_launch))
    request = next(r for r in Order("sm_90", 8, "vllm").calls if r.collective == "all_reduce")

    def built():
        return len(kernel_forms.of_calls(site, request, partial(choose, site)))

    everything = built()
    monkeypatch.setattr(kernel_forms, "_sizes", lambda *given: iter([1 << 10, 1 << 20, 1 << 30]))
    assert built() < everything


def test_the_calls_of_an_engine_exist():
    assert set(COLLECTIVES) <= {*collective_specs.COLLECTIVES, *collective_specs.FUSED}
    for engine in ENGINES:
        assert Order("sm_90", 8, engine, hidden=(4096,)).calls
    with pytest.raises(InvalidArgument, match="nothing is left"):
        Order("sm_90", 8, "sglang", ("broadcast",))
