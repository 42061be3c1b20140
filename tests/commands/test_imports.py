"""A process imports only the modules that it uses; the backend is registered in any order of imports."""

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
assert {*watches} <= {"torch._dynamo", "torch._inductor.lowering"} and len(watches) <= 2
dist.destroy_process_group()
"""

_RANKS = """
import os, sys, tempfile, torch, torch.distributed as dist, tricomm
url = "file://" + tempfile.mkdtemp() + "/m"
child = os.fork()
{ranks}
if child:
    ours = [name for name in sys.modules if name.partition(".")[0] == "tricomm"]
    print(len(ours), *sorted(name for name in ours if name.count(".") == 1))
    os.waitpid(child, 0)
"""
_COMMUNICATOR = """
with tricomm.init(url, rank=int(child == 0), world_size=2, device="cpu") as comm:
    comm.barrier()
"""
_DIST = """
dist.init_process_group("tricomm", init_method=url, rank=int(child == 0), world_size=2)
dist.barrier()
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


def test_the_package_has_exactly_its_public_names() -> None:
    assert set(tricomm.__all__) <= set(dir(tricomm)) and tricomm.__all__ == sorted(tricomm.__all__)
    assert all(getattr(tricomm, name) is not None for name in tricomm.__all__)
    with pytest.raises(AttributeError, match="no attribute 'all_reduse'"):
        tricomm.all_reduse  # noqa: B018


@pytest.mark.parametrize(("ranks", "most"), [(_COMMUNICATOR, 130), (_DIST, 160)], ids=["communicator", "dist"])
def test_a_process_imports_only_the_modules_that_it_uses(
    ranks: str, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRICOMM_CPU", "kernels")
    done = _python(_RANKS.format(ranks=ranks))
    assert done.returncode == 0, done.stderr
    number, *folders = done.stdout.split()
    assert int(number) <= most, done.stdout
    assert not {"tricomm.cli", "tricomm.commands", "tricomm.engines", "tricomm.explorer", "tricomm.perf"} & set(folders)
    assert ("tricomm.c10d" in folders) is (ranks is _DIST)


def test_importing_tricomm_imports_no_torch() -> None:
    code = "import sys, tricomm; print(*(m for m in sys.modules if m.startswith(('torch', 'triton', 'tricomm'))))"
    done = _python(code)
    assert set(done.stdout.split()) == {"tricomm", "tricomm.torch_hook"}, done.stdout + done.stderr
