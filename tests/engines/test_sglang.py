"""SGLang's own GroupCoordinator and norm layer over tricomm, with the real package: make engines."""

from __future__ import annotations

import ast
import inspect
import re
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests import ranks

pytestmark = pytest.mark.engines
if find_spec("sglang") is None:
    pytest.skip("SGLang is not installed", allow_module_level=True)

from tests.engines.bodies import sglang_bodies as bodies  # noqa: E402
from tricomm.engines import sglang_all_reduce, sglang_plugin  # noqa: E402


@pytest.fixture(scope="module", autouse=True)
def preloaded():
    """SGLang takes seconds to import: the fork server does it once."""
    ranks.CONTEXT.set_forkserver_preload(["tests.preloaded", "tests.ranks", "tests.engines.bodies.sglang_bodies"])


@pytest.mark.parametrize("world_size", [2, 4])
def test_all_reduce_and_fused_calls_are_exact_and_run_by_the_kernels(url, world_size):
    for wrong, calls in ranks.run(world_size, bodies.exact, url, timeout=400):
        assert wrong == []
        assert calls >= 4 * len(bodies.DTYPES) * len(bodies.SHAPES)


@pytest.mark.parametrize("how", ["size", "unset", "gloo", "version"])
def test_sglang_runs_calls_that_the_kernels_do_not_take(url, how, capfd):
    assert ranks.run(2, bodies.left_alone, url, how, timeout=200) == [3.0, 3.0]


def test_this_version_is_in_the_tested_range():
    import sglang

    assert sglang_plugin.TESTED.refusal("SGLang", sglang.__version__) is None


SIGNATURES = {
    "dispatch_custom_allreduce": "group, device",
    "flashinfer_allreduce_residual_rmsnorm": "input_tensor, residual, weight, eps=1e-06, max_token_num=2048, "
    "use_oneshot=None, trigger_completion_at_end=False, fp32_acc=True, use_attn_tp_group=True",
    "resolve_fusion_group": "use_attn_tp_group",
}
# Members of any custom all-reduce that SGLang uses.
ASKED = {"capture", "disabled", "should_custom_ar", "custom_all_reduce", "fused_allreduce_rmsnorm"}
# Members that SGLang uses only if they exist, or only on ROCm.
OPTIONAL = {
    "fused_ar_rms",
    "custom_fused_ar_rms",
    "custom_fused_ar_rms_per_group_quant",
    "reduce_scatter",
    "should_custom_ag",
    "all_gather_reg",
    "all_gather_unreg",
}


def test_sglangs_functions_have_the_signatures_that_the_adapter_uses():
    functions = sglang_plugin.functions()
    assert sglang_all_reduce.misfits(functions) == []
    results = {
        name: ", ".join(
            str(p.replace(annotation=p.empty, kind=p.POSITIONAL_OR_KEYWORD))
            for p in inspect.signature(function).parameters.values()
        )
        for name, function in functions.items()
    }
    assert results == SIGNATURES


def test_the_scheduler_releases_memory_as_the_adapter_expects():
    """Parse the source, because importing it needs packages of a GPU installation."""
    module, name = sglang_plugin.MEMORY.rsplit(".", 1)
    package = find_spec(module.rpartition(".")[0])
    source = Path(package.origin).with_name(f"{module.rpartition('.')[2]}.py").read_text()
    result = next(node for node in ast.parse(source).body if isinstance(node, ast.ClassDef) and node.name == name)
    methods = {node.name: node for node in result.body if isinstance(node, ast.FunctionDef)}
    for method in ("release_memory_occupation", "resume_memory_occupation"):
        assert [argument.arg for argument in methods[method].args.args] == ["self", "recv_req"]
        assert "self.offload_tags" in ast.unparse(methods[method])


def test_the_adapter_has_the_members_that_the_coordinator_uses():
    coordinator = bodies.parallel_state.GroupCoordinator
    asked = set(re.findall(r"\bca_comm\.([a-z]\w*)", inspect.getsource(coordinator)))
    assert asked - OPTIONAL == ASKED
    assert all(hasattr(sglang_all_reduce.SglangAllReduce, name) for name in ASKED)
    text = inspect.signature(coordinator.fused_allreduce_rmsnorm).parameters
    assert list(text) == ["self", "input_", "residual_inp_", "weight_", "eps"]
