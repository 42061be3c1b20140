"""Functions and models under torch.compile that call torch.distributed, with whole numbers only: equal on any route."""

from __future__ import annotations

from functools import partial

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import distributed_c10d as c10d
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode

from tests.c10d.bodies.groups import default_group, of

WORLD_SIZE = 2


def _peer():
    return 1 - dist.get_rank()


def _list(x):
    return [torch.zeros_like(x) for _ in range(WORLD_SIZE)]


def _in_place(call):
    """`call(y)` between two operations on `y`."""

    def run(x):
        y = x * 2
        call(y)
        return y + 1

    return run


def _out_of_place(make, call):
    """`call(out, y)` with a new output `make(y)`."""

    def run(x):
        y = x * 2
        out = make(y)
        call(out, y)
        return [o + 1 for o in out] if isinstance(out, list) else out + 1

    return run


def _waited(call):
    def run(x):
        y = x * 2
        call(y).wait()
        return y + 1

    return run


def _future(x):
    y = x * 2
    (value,) = dist.all_reduce(y, async_op=True).get_future().wait()
    return value + 1


def _then(x):
    y = x * 2
    return dist.all_reduce(y, async_op=True).get_future().then(lambda done: done.value()[0] + 1).wait()


def _rooted(x):
    rank = dist.get_rank()
    y = x * 2
    outs = _list(y) if rank == 0 else None
    dist.gather(y, outs, dst=0)
    parts = [y, y + 1] if rank == 1 else None
    out = torch.zeros_like(y)
    dist.scatter(out, parts, src=1)
    return [out, *(outs or [])]


def _batch(x):
    y = x * 2
    got = torch.zeros_like(y)
    for work in dist.batch_isend_irecv([dist.P2POp(dist.isend, y, _peer()), dist.P2POp(dist.irecv, got, _peer())]):
        work.wait()
    return got + 1


def _manager(x):
    y, z = x * 2, x * 3
    with c10d._coalescing_manager():
        dist.all_reduce(y)
        dist.all_reduce(z)
    return y + z


def _facts(x):
    group = dist.group.WORLD
    more = dist.get_rank(group) + dist.get_world_size(group) + group.size() + group.rank()
    return x * 2 + more if dist.is_initialized() else x


FUNCTIONS = {
    "all_reduce": _in_place(lambda y: dist.all_reduce(y)),
    "all_reduce async": _waited(lambda y: dist.all_reduce(y, async_op=True)),
    "get_future": _future,
    "then": _then,
    "broadcast": _in_place(lambda y: dist.broadcast(y, 1)),
    "all_gather_into_tensor": _out_of_place(lambda y: y.new_zeros(2 * len(y), 4), dist.all_gather_into_tensor),
    "all_to_all_single": _out_of_place(torch.zeros_like, dist.all_to_all_single),
    "gather and scatter": _rooted,
    "batch_isend_irecv": _batch,
    "coalescing manager": _manager,
    "facts": _facts,
    "barrier": _in_place(lambda y: dist.barrier()),
}


if torch.__version__ >= "2.13":  # Gloo of older versions has none
    FUNCTIONS["all_to_all"] = _out_of_place(
        lambda y: [*(y * 0).split(1)], lambda outs, y: dist.all_to_all(outs, [*y.split(1)])
    )


def _values(found):
    """Tensors as lists, which a pipe carries; of whole numbers, so nothing is lost."""
    return [_values(x) for x in found] if isinstance(found, list | tuple) else found.tolist()


def _network(last=()):
    """Two layers with whole numbers as their weights."""
    net = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 2), *last)
    for which, parameter in enumerate(net.parameters()):
        parameter.data.copy_(of(7, tuple(parameter.shape), call=which))
    return net


def _steps(call, net, rank):
    """Gradients and buffers after each of two passes, whose inputs are even: the mean over the ranks is exact."""
    found = []
    for step in (1, 2):
        net.zero_grad()
        call(2 * of(rank, (3, 4), call=step)).pow(2).sum().backward()
        grads = [p.grad for p in net.parameters() if p.grad is not None]  # FSDP1 shards them unevenly
        found += [_values(g.full_tensor() if hasattr(g, "full_tensor") else g) for g in grads]
        found += [_values(buffer) for buffer in net.buffers()]
    return found


dist._DEFAULT_FIRST_BUCKET_BYTES = 16  # so that there are several buckets


def _ddp(rank, compile, optimize="ddp_optimizer", inside=False, function=False, last=(), autograd=False, **options):
    from torch._dynamo import config

    net = _network(last)
    hook = options.pop("hook", None)
    with config.patch(optimize_ddp=optimize, compiled_autograd=autograd):
        wrapped = DistributedDataParallel(compile(net) if inside else net, bucket_cap_mb=64 / 2**20, **options)
        if hook is not None:
            wrapped.register_comm_hook(None, hook)
        call = compile(lambda x: wrapped(x) * 1) if function else wrapped if inside else compile(wrapped)
        return _steps(call, net, rank)


def _fsdp2(rank, compile, whole=False, layers=False, before=False):
    from torch.distributed.fsdp import fully_shard

    net = _network()
    mesh = dist.device_mesh.init_device_mesh("cpu", (WORLD_SIZE,))
    for layer in (net[0], net[2]):
        if layers and isinstance(compile, partial):
            layer.compile(backend=compile.keywords["backend"])
        fully_shard(layer, mesh=mesh)
    fully_shard(net, mesh=mesh)
    return _steps(compile(net) if whole else net, net, rank)


def _fsdp1(rank, compile):
    from torch.distributed.fsdp import FullyShardedDataParallel

    net = FullyShardedDataParallel(_network(), use_orig_params=True, device_id=torch.device("cpu"))
    return _steps(compile(net), net, rank)


def _tensor_parallel(rank, compile):
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    mesh = dist.device_mesh.init_device_mesh("cpu", (WORLD_SIZE,))
    net = parallelize_module(_network(), mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    return _steps(compile(net), net, 0)


def _hook(state, bucket):
    work = dist.all_reduce(bucket.buffer().div_(WORLD_SIZE), async_op=True)
    return work.get_future().then(lambda done: done.value()[0])


MODELS = {
    "ddp": _ddp,
    "ddp not optimised": partial(_ddp, optimize="no_optimization"),
    "ddp python_reducer": partial(_ddp, optimize="python_reducer", autograd=True),
    "ddp python_reducer, forward not compiled": partial(
        _ddp, optimize="python_reducer_without_compiled_forward", autograd=True
    ),
    "ddp inside": partial(_ddp, inside=True),
    "ddp in a function": partial(_ddp, function=True),
    "ddp with buffers": partial(_ddp, last=[nn.BatchNorm1d(2)]),
    "ddp, hook": partial(_ddp, hook=_hook),
    "fsdp1": _fsdp1,
    "tensor parallel": _tensor_parallel,
    "fsdp2": partial(_fsdp2, whole=True),
    "fsdp2, layers": partial(_fsdp2, layers=True),
}


def table(rank, world_size, tell, url, backend, route, compiler, only):
    """The result of each function and model on this rank; a function is called twice: traced, and from the cache."""
    torch.set_num_threads(1)
    compile = partial(torch.compile, backend=compiler) if compiler else lambda function: function
    said, caught = {}, Exception if compiler else ()
    with default_group(rank, world_size, url, route, backend):
        for name in only or [*FUNCTIONS, *MODELS]:
            torch._dynamo.reset()
            try:
                if name in MODELS:
                    said[name] = MODELS[name](rank, compile)
                else:
                    call = compile(FUNCTIONS[name])
                    said[name] = [_values(call(of(rank, (2, 4), call=number))) for number in (1, 2)]
            except caught as error:
                said[name] = f"{type(error).__name__}: {str(error)[:300]}"
    return said


def _caught(call):
    try:
        call()
    except Exception as error:
        return type(error).__name__
    return "nothing"


def _total():
    x = torch.full((4,), dist.get_rank() + 1.0)
    dist.all_reduce(x)
    return x.tolist()


def traced(rank, world_size, tell, url, backend, route):
    """A call into which Dynamo traces: its own error, and the next call's result."""
    from torch._dynamo import trace_rules

    trace_rules.SKIP_DIRS[:] = [folder for folder in trace_rules.SKIP_DIRS if "tricomm" not in folder]
    trace_rules._recompile_re()
    with default_group(rank, world_size, url, route, backend):
        return _caught(lambda: torch.compile(FUNCTIONS["barrier"], backend="eager")(torch.ones(2, 4))), _total()


class _Refuses(TorchDispatchMode):
    """A mode that fails at the first operation, as one for fake tensors does where real ones come."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        raise RuntimeError("not under this mode")


def _under_a_mode():
    xs = [torch.zeros(2), torch.zeros(2)]
    with _Refuses():
        dist.all_gather(xs, xs[0])


def _too_large():
    huge = torch.ones(1).expand(2**50)
    dist.all_gather([huge, huge], huge)


EARLY = {"a dispatch mode": _under_a_mode, "too large": _too_large}


def fails_early(rank, world_size, tell, url, backend, route):
    """Errors that are neither tricomm's nor a wrong argument, of both ranks or of one, and the next call's result."""
    found = {}
    with default_group(rank, world_size, url, route, backend):
        for name, call in EARLY.items():
            found[name] = _caught(call), _total()
        found["of one rank"] = _caught(_under_a_mode) if rank == 1 else "RuntimeError", _total()
    return found
