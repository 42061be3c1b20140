"""The pass for torch.compile on a Llama of transformers, tensor-parallel on two CPU ranks: make engines."""

from __future__ import annotations

from importlib.util import find_spec

import pytest
import torch
import torch.distributed as dist

import tricomm
from tests import ranks
from tests.c10d.bodies.groups import default_group

pytestmark = pytest.mark.engines

LAYERS = 2


def _model(dtype):
    """The same on every rank, sharded by the model's own plan."""
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
    from transformers import LlamaConfig, LlamaModel

    torch.manual_seed(0)
    sizes = {"hidden_size": 40, "intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 4}
    config = LlamaConfig(vocab_size=64, num_hidden_layers=LAYERS, max_position_embeddings=32, use_cache=False, **sizes)
    model = LlamaModel(config).to(dtype).eval().requires_grad_(False)
    for parameter in model.parameters():
        parameter.mul_(8).add_(0.25 * torch.randn_like(parameter))
    styles = {"colwise": ColwiseParallel, "rowwise": RowwiseParallel}
    plan = {name: styles[style]() for name, style in config.base_model_tp_plan.items()}
    mesh = dist.device_mesh.init_device_mesh("cpu", (dist.get_world_size(),))
    return parallelize_module(model, mesh, plan)


def _with_our_norms(model):
    from transformers.models.llama.modeling_llama import LlamaRMSNorm

    first = model.layers[0].input_layernorm  # not after an all-reduce
    for norm in (module for module in model.modules() if isinstance(module, LlamaRMSNorm) and module is not first):
        weight, eps = norm.weight, norm.variance_epsilon
        norm.forward = lambda x, weight=weight, eps=eps: torch.ops.tricomm.rms_norm(x, None, weight, eps, 0.0)[0]
    return model


def _output(model, used):
    from torch._inductor import config

    torch._dynamo.reset()
    ids = torch.arange(12).view(2, 6)
    with config.patch(post_grad_custom_post_pass=used, fx_graph_cache=False), torch.no_grad():
        return torch.compile(model, fullgraph=True)(input_ids=ids, use_cache=False).last_hidden_state


def llama(rank, world_size, tell, url, dtype):
    torch.set_num_threads(1)
    with default_group(rank, world_size, url):
        mine, theirs = _with_our_norms(_model(dtype)), _model(dtype)
        exact, all_norms, left = (tricomm.compile_pass(exact=exact) for exact in (True, False, True))
        wanted = _output(mine, None)
        bits = [torch.equal(_output(model, used), wanted) for model, used in ((mine, exact), (theirs, all_norms))]
        bits.append(torch.equal(_output(theirs, left), _output(theirs, None)))
        return bits, [used.fused.total() for used in (exact, all_norms, left)], {one.reason for one in left.left}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_every_all_reduce_of_a_llama_is_fused(url, dtype):
    """Of its own norms none, unless `exact` is False: then its bits are those of the model with our norms."""
    if find_spec("transformers") is None:
        pytest.skip("transformers is not installed")
    for bits, fused, reasons in ranks.run(2, llama, url, dtype, timeout=500):
        assert bits == [True] * 3 and fused == [2 * LAYERS, 2 * LAYERS, 0]
        assert len(reasons) == 1 and "spelled in torch" in reasons.pop()
