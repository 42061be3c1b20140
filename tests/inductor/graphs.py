"""Graphs as Inductor's last passes see them, and functions to make them of: f(x, residual, weight), over `group`."""

from __future__ import annotations

import random

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol

EPS = 1e-6


def summed(x, op="sum"):
    return funcol.all_reduce(x, op, dist.group.WORLD)


def norm(x, weight, residual=None):
    return torch.ops.tricomm.rms_norm(x, residual, weight, EPS, 0.0)


def compiled(function, used=None, is_inference=True, change=None):
    """`function` as Inductor's graph for it, changed by the pass `used`, and run as it is. `change`, of the graph,
    comes first."""
    from torch._functorch.aot_autograd import aot_function, make_boxed_func
    from torch._inductor.decomposition import select_decomp_table

    def compile(made, inputs):
        made.graph.eliminate_dead_code()
        if change is not None:
            change(made.graph)
        if used is not None:
            used(made.graph, is_inference)
        made.graph.lint()
        made.recompile()
        return make_boxed_func(made.forward)

    def run(*inputs):
        with torch.no_grad():
            return made(*inputs)

    made = aot_function(function, compile, decompositions=select_decomp_table(), keep_inference_input_mutations=True)
    return run


def flat(found):
    return [y for x in found for y in flat(x)] if isinstance(found, list | tuple) else [found]


def same(found, wanted):
    """Bit for bit, whatever the types."""
    pairs = list(zip(flat(found), flat(wanted), strict=True))
    return all(a.dtype == b.dtype and torch.equal(a.view(torch.uint8), b.view(torch.uint8)) for a, b in pairs)


def data(dtype=torch.bfloat16, hidden=20, rank=0, rows=4):
    """An input of this rank, and a residual and a weight of all ranks."""
    mine, common = torch.Generator().manual_seed(rank), torch.Generator().manual_seed(99)
    shapes = ((rows, hidden), mine), ((rows, hidden), common), ((hidden,), common)
    return tuple(torch.randn(shape, generator=seed).to(dtype) for shape, seed in shapes)


# Norms that are spelled in torch


def functional_norm(x, weight):
    return torch.nn.functional.rms_norm(x, weight.shape, weight, EPS)


def llama_norm(x, weight):
    wide = x.to(torch.float32)
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + EPS)
    return weight * wide.to(x.dtype)


def gemma_norm(x, weight):
    wide = x.float()
    wide = wide * torch.rsqrt((wide * wide).mean(-1, keepdim=True) + EPS)
    return (wide * (1.0 + weight.float())).type_as(x)


SPELLED = {"torch": (functional_norm, 0.0), "llama": (llama_norm, 0.0), "gemma": (gemma_norm, 1.0)}


def random_function(seed):
    """A program of all-reduces, additions, norms, views and products, of which some values are returned."""
    rng = random.Random(seed)
    steps = [(rng.choice("ssaaannrvm"), rng.random(), rng.random()) for _ in range(rng.randrange(6, 16))]
    kept = [rng.random() < 0.3 for _ in steps]

    def function(x, residual, weight):
        values = [x, residual]
        for kind, one, other in steps:
            a, b = values[-1 - int(one**3 * len(values))], values[-1 - int(other * len(values))]
            match kind:
                case "s":
                    made = summed(a)
                case "a":
                    made = a + b
                case "n":
                    made = norm(a, weight)[int(one * 2)]
                case "r":
                    made = norm(a, weight, b)[int(other * 2)]
                case "v":
                    made = a.view(2, 2, -1).view(4, -1)
                case "m":
                    made = a * 0.5
            values.append(made)
        return [value for value, keep in zip(values[2:], kept, strict=True) if keep] + values[-1:]

    return function
