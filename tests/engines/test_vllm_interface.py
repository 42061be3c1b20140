"""The names and parameters of vLLM that the adapter uses; finds those that a newer vLLM has changed. make engines."""

from __future__ import annotations

import inspect

import pytest

pytestmark = pytest.mark.engines
vllm = pytest.importorskip("vllm")

from vllm.distributed.device_communicators.base_device_communicator import DeviceCommunicatorBase  # noqa: E402
from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator  # noqa: E402
from vllm.distributed.device_communicators.cuda_communicator import CudaCommunicator  # noqa: E402

from tricomm.engines import vllm_communicator, vllm_plugin  # noqa: E402


def _text(function):
    """The parameters without annotations, to which vLLM may add."""
    parameters = inspect.signature(function).parameters.values()
    return ", ".join(
        str(p.replace(annotation=p.empty)) for p in parameters if p.name != "self" and p.kind is not p.VAR_KEYWORD
    )


# The parameters, in the tested versions, of each method that the adapter overrides or calls.
SIGNATURES = {
    "all_reduce": "input_",
    "all_gather": "input_, dim=-1",
    "reduce_scatter": "input_, dim=-1",
    "suspend": "",
    "resume": "",
    "destroy": "",
}


def test_this_version_is_in_the_tested_range():
    assert vllm_plugin.TESTED.refusal("vLLM", vllm.__version__) is None


@pytest.mark.parametrize("base", [CpuCommunicator, CudaCommunicator, DeviceCommunicatorBase])
def test_vllms_communicators_have_the_members_that_the_adapter_uses(base):
    changed = {
        name: (expected, _text(getattr(base, name)))
        for name, expected in SIGNATURES.items()
        if _text(getattr(base, name)) != expected
    }
    assert changed == {}
    assert vllm_communicator.misfits(base) == []


@pytest.mark.parametrize("base", [CpuCommunicator, CudaCommunicator])
def test_no_method_of_the_adapter_hides_another_of_vllms(base):
    ours = {name for name in vars(vllm_communicator.VllmCollectives) if not name.startswith("__")}
    assert {name for name in ours if hasattr(base, name)} == set(SIGNATURES)


def test_the_names_around_the_communicators():
    from vllm import envs
    from vllm.config import ParallelConfig, get_current_vllm_config_or_none  # noqa: F401
    from vllm.distributed import parallel_state
    from vllm.platforms.interface import Platform
    from vllm.plugins import DEFAULT_PLUGINS_GROUP
    from vllm.utils.import_utils import resolve_obj_by_qualname

    assert DEFAULT_PLUGINS_GROUP == "vllm.general_plugins"
    assert isinstance(inspect.getattr_static(Platform, "get_device_communicator_cls"), classmethod)
    assert _text(Platform.get_device_communicator_cls) == ""
    assert isinstance(ParallelConfig.use_ubatching, property)
    assert isinstance(envs.VLLM_BATCH_INVARIANT, bool)
    assert resolve_obj_by_qualname("collections.Counter").__name__ == "Counter"
    made = inspect.getsource(parallel_state.GroupCoordinator.__init__)
    for argument in ("cpu_group=", "device=", "device_group=", "unique_name="):
        assert argument in made
    captured = inspect.getsource(parallel_state.GroupCoordinator.graph_capture)
    assert "CudaCommunicator" in captured and "isinstance" in captured  # so the adapter has to extend that class
