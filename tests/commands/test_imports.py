"""torch is imported when a command needs it, and the backend is registered in whatever order torch and tricomm come."""

from __future__ import annotations

import subprocess
import sys

import pytest

import tricomm
from tests.marks import some

_HELP = (
    "import sys; sys.argv = ['tricomm', {words}]\nfrom tricomm.cli import main\ntry: main()\nexcept SystemExit: pass"
)
_HEAVY = "import sys; assert not {'torch', 'triton', 'numpy', 'rich', 'sqlite3'} & set(sys.modules)"
_GROUP = """
import torch, torch.distributed as dist
from torch._C._distributed_c10d import HashStore
dist.init_process_group("tricomm", store=HashStore(), rank=0, world_size=1)
x = torch.arange(4.0)
dist.all_reduce(x)
assert x.tolist() == [0, 1, 2, 3] and torch.ops.tricomm.all_reduce
import sys, tricomm
assert callable(tricomm.local) and callable(tricomm.wrap) and tricomm.c10d.group_over
watches = [finder._module for finder in sys.meta_path if type(finder).__module__.startswith("tricomm")]
assert watches in ([], ["torch._dynamo"])
dist.destroy_process_group()
"""


def _python(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, timeout=120)


@pytest.mark.parametrize(
    "code", ["import tricomm.cli", *(_HELP.format(words=words) for words in ("'--help'", "'bench', '--help'"))]
)
def test_help_needs_no_torch(code: str) -> None:
    done = _python(f"{code}\n{_HEAVY}")
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    "order", some(["import tricomm, torch", "import torch, tricomm", "from tricomm.kernels import layout"], 2)
)
def test_the_backend_is_registered_in_any_order(order: str) -> None:
    done = _python(f"{order}\n{_GROUP}")
    assert done.returncode == 0, done.stderr


def test_without_the_hook_a_later_torch_has_no_backend() -> None:
    code = "import sys, tricomm; sys.meta_path.pop(0); import torch.distributed as dist\n"
    done = _python(f"{code}assert not hasattr(dist.Backend, 'TRICOMM')")
    assert done.returncode == 0, done.stderr


def test_a_backend_that_cannot_be_imported_does_not_break_the_import_of_torch() -> None:
    code = "import sys, tricomm, warnings; warnings.simplefilter('always'); sys.modules['tricomm.torch_backend'] = None"
    done = _python(f"{code}\nimport torch")
    assert done.returncode == 0 and "torch.distributed has no backend tricomm" in done.stderr, done.stderr


def test_operators_exist_before_the_first_group() -> None:
    code = "import torch, tricomm, sys; assert 'tricomm.c10d' not in sys.modules\n"
    code += "assert callable(torch.ops.tricomm.all_reduce.default) and 'tricomm.c10d' in sys.modules\n"
    done = _python(f"{code}assert not hasattr(torch.ops.tricomm, 'all_reduse')")
    assert done.returncode == 0, done.stderr


def test_every_public_name_is_there_and_others_are_not() -> None:
    assert set(tricomm.__all__) <= set(dir(tricomm)) and tricomm.__all__ == sorted(tricomm.__all__)
    assert all(getattr(tricomm, name) is not None for name in tricomm.__all__)
    with pytest.raises(AttributeError, match="no attribute 'all_reduse'"):
        tricomm.all_reduse  # noqa: B018
