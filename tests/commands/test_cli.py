"""Every command has help with examples, exit codes and completion, and reports a mistake without a traceback."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator

import click
import pytest
from click.testing import CliRunner

import tricomm
from tests import forked
from tricomm import cli as main_module
from tricomm.cli import cli
from tricomm.commands import common
from tricomm.errors import InvalidArgument, PeerDied, ResourceError


def _commands(group: click.Group = cli, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], click.Command]]:
    yield path, group
    for name, command in group.commands.items():
        if isinstance(command, click.Group):
            yield from _commands(command, (*path, name))
        else:
            yield (*path, name), command


ALL = dict(_commands())


def _examples(command: click.Command) -> list[list[str]]:
    """The arguments of each line of the help that is a command line of ours."""
    lines = [line.strip() for line in (command.help or "").splitlines()]
    lines = [line.split("$(")[-1].split(")")[0] if line.startswith("eval") else line for line in lines]
    words = [shlex.split(line, comments=True) for line in lines if line.startswith("tricomm ")]
    return [list(part)[1:] for part in (w[: w.index(">")] if ">" in w else w for w in words)]


@pytest.mark.parametrize("path", ALL, ids=lambda path: " ".join(path) or "tricomm")
def test_help_has_examples_that_the_parser_takes(path: tuple[str, ...]) -> None:
    examples = _examples(ALL[path])
    assert examples, f"tricomm {' '.join(path)} --help shows no example"
    for words in examples:
        command: click.Command = cli
        context = click.Context(cli, info_name="tricomm")
        while isinstance(command, click.Group) and words and words[0] in command.commands:
            command, words = command.commands[words[0]], words[1:]
            context = click.Context(command, context)
        files = [w for w in words if w.endswith((".json", ".py:body"))]
        known = [w for w in words if w not in files]
        rest = [f for f in files if f.endswith(".json")]
        if any(isinstance(p, click.Argument) and p.nargs == -1 for p in command.params) or rest:
            continue  # its files do not exist here
        command.make_context("x", known, parent=context)
    done = CliRunner().invoke(cli, [*path, "--help"])
    assert done.exit_code == 0 and "tricomm" in done.output


def test_every_option_has_a_help_text() -> None:
    silent = [
        (path, option.name)
        for path, command in ALL.items()
        for option in command.params
        if isinstance(option, click.Option) and not option.help and not isinstance(option.type, click.Choice)
    ]
    assert [s for s in silent if s[1] != "seed"] == []


def test_version_and_exit_codes_from_outside() -> None:
    version = [sys.executable, "-m", "tricomm", "--version"]
    done = subprocess.run(version, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout) == (0, f"tricomm, version {tricomm.__version__}\n")
    done = forked.command("bench", "--dtype", "flot32")
    assert done.returncode == 2 and "Traceback" not in done.stderr and "float32" in done.stderr
    done = forked.command("bench", "--no-history", env={**os.environ, "TRICOMM_STATS": "often"})
    assert done.returncode == 1 and "TRICOMM_STATS='often'" in done.stderr and "Traceback" not in done.stderr


@pytest.mark.parametrize("arguments", [["bnch"], ["bench", "--size", "1"], ["completion", "csh"]], ids=" ".join)
def test_a_mistake_in_the_command_line_ends_with_2(
    arguments: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["tricomm", *arguments])
    with pytest.raises(SystemExit) as ended:
        main_module.main()
    told = capsys.readouterr().err
    assert ended.value.code == 2 and told and "Traceback" not in told


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (InvalidArgument("a bad argument"), 2),
        (ResourceError("no memory"), 3),
        (PeerDied("rank 1"), 1),
        (PermissionError(13, "Permission denied", "/x"), 1),
        (KeyboardInterrupt(), 130),
    ],
)
def test_an_error_that_a_command_does_not_handle_is_printed_without_a_traceback(
    error: BaseException, code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(**options: object) -> None:
        raise error

    monkeypatch.setattr(main_module, "cli", broken)
    with pytest.raises(SystemExit) as ended:
        main_module.main()
    told = capsys.readouterr().err
    assert ended.value.code == code and "Traceback" not in told and told.count("\n") == 1


def test_an_internal_error_keeps_its_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(**options: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(main_module, "cli", broken)
    with pytest.raises(ZeroDivisionError):
        main_module.main()


def test_a_closed_output_pipe_is_no_error() -> None:
    command = f"{shlex.quote(sys.executable)} -m tricomm dashboard --grafana | head -c 10"
    done = subprocess.run(command, shell=True, capture_output=True, text=True, timeout=120)
    assert done.stdout == '{\n "title"' and done.stderr == ""


def test_the_shell_completes_commands_and_options() -> None:
    for shell in ("bash", "zsh", "fish"):
        done = CliRunner().invoke(cli, ["completion", shell])
        assert done.exit_code == 0 and "_TRICOMM_COMPLETE" in done.output
    for words, wanted in (("tricomm da", "dashboard"), ("tricomm dashboard --pro", "--prometheus")):
        asked = {"_TRICOMM_COMPLETE": "bash_complete", "COMP_WORDS": words, "COMP_CWORD": str(words.count(" "))}
        code = "import sys; sys.argv = ['tricomm']; from tricomm.cli import main; main()"
        done_ = subprocess.run(
            [sys.executable, "-c", code], env={**os.environ, **asked}, capture_output=True, text=True, timeout=120
        )
        assert wanted in done_.stdout, done_.stderr


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("info", "--topology", "--table"), "--table would not be looked at"),
        (("check", "--strategy", "pct", "--preemptions", "1"), "--preemptions is the bound of --strategy exhaustive"),
        (
            ("check", "--replay", __file__, "--schedules", "3", "--world-size", "4"),
            "so --world-size, --schedules would have no effect",
        ),
        (("check", "--report", "-"), "a file is needed here"),
        (("dashboard", "--html", "-"), "a file is needed here"),
    ],
)
def test_options_without_an_effect_are_refused(words: tuple[str, ...], said: str) -> None:
    done = CliRunner().invoke(cli, words)
    assert done.exit_code == 2 and said in " ".join(done.output.split()), done.output


_SWALLOWS = """
import os, signal, sys
from tricomm.commands import common
with common.ends_at_once(){without}:
    try:
        os.kill(os.getpid(), signal.SIGINT)
        print("not here")
    except BaseException:
        pass
print("went on")
"""


@pytest.mark.parametrize(
    ("without", "code", "said"), [("", 130, ""), (" if False else open(os.devnull)", 0, "went on")]
)
def test_an_interrupt_during_imports_that_swallow_it_ends_the_command(without: str, code: int, said: str) -> None:
    """Without the protection the command continues."""
    script = _SWALLOWS.replace("{without}", without)
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout.strip()) == (code, said), done.stderr
    assert done.stderr == ("interrupted\n" if code else "")


_SWALLOWED_BY_TORCH = """
import os, signal, sys

class Finder:
    def find_spec(self, name, *rest):
        if name == "torch":
            try:
                signal.raise_signal(signal.SIGINT)
            except BaseException:
                os._exit(77)

sys.meta_path.insert(0, Finder())
from tricomm.cli import main
main()
"""
_LOADING = ("bench", "check", "compare", "dashboard --html x.html", "dashboard --changes", "doctor", "info", "kernels")


@pytest.mark.parametrize("line", [*_LOADING, "predict", "tune --simulated"])
def test_an_interrupt_while_torch_is_loaded_ends_every_command(line: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", _SWALLOWED_BY_TORCH, *line.split()], capture_output=True, text=True, timeout=120
    )
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "interrupted\n")


def test_an_interrupt_while_the_command_line_is_loaded_is_no_traceback() -> None:
    script = _SWALLOWED_BY_TORCH.replace('"torch"', '"click"').replace("os._exit(77)", "raise")
    script = script.replace("tricomm.cli", "tricomm.__main__")
    done = subprocess.run([sys.executable, "-c", script, "info"], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "interrupted\n")


def test_an_interrupt_after_the_imports_is_raised() -> None:
    with common.ends_at_once():
        assert signal.getsignal(signal.SIGINT) is not signal.default_int_handler
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)


def test_progress_is_printed_to_a_pipe(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(common, "SECONDS", 0.01)
    told = threading.Event()

    def text() -> str:
        told.set()
        return "half"

    with common.told_every(text):
        assert told.wait(30)
    assert capsys.readouterr().err.startswith("  half\n")
    with common.told_every(text, silent=True):
        pass
    assert capsys.readouterr().err == ""
