"""Selection, tuning tables and times of a communicator: its public methods."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from tricomm.core.entry_guard import guarded
from tricomm.core.launcher import Launcher
from tricomm.core.planner import Planner
from tricomm.core.symmetric import Symmetric
from tricomm.policy.selection import Choice
from tricomm.policy.tuning_tables import TableRow


class TuningMethods:
    """Selection, tables, times."""

    _launcher: Launcher
    _planner: Planner

    @guarded
    def synchronize(self, timeout: float | None = None) -> None:
        """Wait for the calls on the current stream; raises the group's fault, or `CollectiveTimeout`.

        `timeout` is in seconds (default: the communicator's).
        """
        return self._launcher.synchronize(timeout)

    @guarded
    def explain(
        self,
        collective: str,
        nbytes: int | Symmetric,
        dtype: torch.dtype | None = None,
        op: Any = "sum",
        *,
        algorithm: str | None = None,
        protocol: str | None = None,
        mode: str = "eager",
        hidden: int | None = None,
        quantize: str | None = None,
        out: Symmetric | torch.Tensor | None = None,
    ) -> Choice:
        """The backend and the kernel of a call with `nbytes` bytes of input, and why. Pure: asks no other rank.

        `nbytes` is one rank's input, the root's if there is one; `dtype` is float32 by default; `mode` is eager, or
        graph for a captured call; `hidden` and `quantize` are those of an all_reduce_rms_norm. A symmetric handle
        instead of `nbytes` means a call that reads it in place; `out` is the output if it is not that handle. Whether
        NCCL can be used is known only after the first call that needs it. Raises `InvalidArgument` for a bad argument.
        """
        return self._planner.explain(
            collective,
            nbytes,
            dtype,
            op,
            algorithm=algorithm,
            protocol=protocol,
            mode=mode,
            hidden=hidden,
            quantize=quantize,
            out=out,
        )

    @guarded
    def use_table(self, rows: Sequence[TableRow], name: str) -> None:
        """From now on choose by `rows`, and by the shipped tables beyond them. Called by all ranks together.

        For tuners. `explain` calls them `name`. Raises `InvalidArgument` for anything but rows, and on all ranks if
        their rows differ; then nothing has changed.
        """
        return self._planner.use_table(rows, name)

    @guarded
    def time_calls(self, every: int) -> None:
        """Time every `every`th call of each shape from now on; 0: none. Each rank may have its own.

        On a GPU a call is timed by events on its stream, at the cost of recording them. Calls in a CUDA graph are not
        timed. Call this before calls are warmed up for a capture: it forgets what they have prepared. Raises
        `InvalidArgument` for a negative number.
        """
        return self._planner.time_calls(every)
