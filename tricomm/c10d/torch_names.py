"""torch's c10d classes, seen through `Any`: their stubs are not complete, and differ between versions."""

from __future__ import annotations

from typing import Any

from torch._C import _distributed_c10d

c10d: Any = _distributed_c10d
