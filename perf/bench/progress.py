"""What a benchmark prints while it runs: the table on standard output, a progress bar where that is a terminal."""

from __future__ import annotations

from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from tricomm.perf.bench import nccl_table
from tricomm.perf.bench.request import Settings
from tricomm.perf.bench.session import Results
from tricomm.perf.workers import WorkerMessage


class Output:
    """Prints rows as they come. `quiet`: nothing at all (a rank that is not rank 0); `joined`: ranks are not ours."""

    def __init__(self, settings: Settings, quiet: bool, joined: bool) -> None:
        self._console = Console(quiet=quiet, highlight=False, markup=False, soft_wrap=True)
        self._settings = settings
        self._collective = ""
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        hidden = quiet or not self._console.is_terminal
        self._progress = Progress(*columns, console=self._console, transient=True, disable=hidden)
        total = settings.rows
        self._task = self._progress.add_task("joining the ranks" if joined else "starting the ranks", total=total)

    def __enter__(self) -> Output:
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def stop(self) -> None:
        """Take the progress bar away. May be called twice."""
        self._progress.stop()

    def header(self, header: WorkerMessage) -> None:
        """Print the head of the table."""
        for text in nccl_table.heading(header, self._settings.to_json()):
            self._console.print(text)

    def row(self, row: WorkerMessage) -> None:
        """Print a row and move the bar on."""
        if row["collective"] != self._collective:
            self._collective = row["collective"]
            self._console.print(f"#\n# {self._collective}")
        self._console.print(nccl_table.line(row))
        names = f"{row['collective']} {row['algorithm']}/{row['protocol']}"
        self._progress.update(self._task, advance=1, description=names)

    def note(self, text: str) -> None:
        """Print what cannot be compared."""
        self._console.print(f"# {text}")

    def summary(self, results: Results) -> None:
        """Print the last line."""
        planned = self._settings.rows
        text = nccl_table.summary(results.header, results.rows, self._settings.check, results.wrong, planned)
        self._console.print(f"\n{text}")
