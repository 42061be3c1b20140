"""All-reduces over torch's symmetric memory, like public ones: a barrier by signal pads in inline PTX, and launches
through Triton. They do not use tricomm."""

import functools

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symm_mem
import triton
import triton.language as tl

_buffers = {}


@triton.jit
def send(word, SEM: tl.constexpr):
    tl.inline_asm_elementwise(
        f"""
        {{
            .reg .u32 %before;
            .reg .pred %sent;
            again:
                atom.global.{SEM}.sys.cas.b32 %before, [$1], 0, 1;
                setp.eq.u32 %sent, %before, 0;
                @!%sent bra again;
        }}
        """,
        "=r, l",
        [word],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def receive(word, SEM: tl.constexpr):
    tl.inline_asm_elementwise(
        f"""
        {{
            .reg .u32 %before;
            .reg .pred %there;
            again:
                atom.global.{SEM}.sys.cas.b32 %before, [$1], 1, 0;
                setp.eq.u32 %there, %before, 1;
                @!%there bra again;
        }}
        """,
        "=r, l",
        [word],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def thread():
    return tl.inline_asm_elementwise("mov.u32 $0, %tid.x;", "=r", [], dtype=tl.uint32, is_pure=True, pack=1)


@triton.jit
def barrier(pads, RANK: tl.constexpr, WORLD_SIZE: tl.constexpr, AFTER: tl.constexpr, BEFORE: tl.constexpr):
    """AFTER: earlier accesses of the block are visible to the peers; BEFORE: later ones see theirs."""
    block = tl.program_id(0) * WORLD_SIZE
    pads = pads.to(tl.pointer_type(tl.uint64))
    peers = tl.arange(0, WORLD_SIZE)
    theirs = tl.load(pads + peers).to(tl.pointer_type(tl.uint32)) + block + RANK
    mine = tl.load(pads + RANK).to(tl.pointer_type(tl.uint32)) + block + peers
    if AFTER:
        tl.debug_barrier()
    if thread() < WORLD_SIZE:
        send(theirs, "release" if AFTER else "relaxed")
        receive(mine, "acquire" if BEFORE else "relaxed")
    if BEFORE:
        tl.debug_barrier()


@triton.jit
def two_shot_kernel(buffers, pads, x, out, count, RANK: tl.constexpr, WORLD_SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """Copies x to this rank's buffer, reduces this rank's share of each part into all buffers, and copies it out."""
    buffers = buffers.to(tl.pointer_type(tl.uint64))
    own = tl.load(buffers + RANK).to(tl.pointer_type(tl.float32))
    part = tl.program_id(0) * BLOCK * WORLD_SIZE + tl.arange(0, BLOCK * WORLD_SIZE)
    tl.store(own + part, tl.load(x + part, mask=part < count), mask=part < count)
    barrier(pads, RANK, WORLD_SIZE, True, True)  # 1
    share = tl.program_id(0) * BLOCK * WORLD_SIZE + RANK * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float32)
    for peer in range(WORLD_SIZE):
        theirs = tl.load(buffers + peer).to(tl.pointer_type(tl.float32))
        total += tl.load(theirs + share, mask=share < count, other=0.0)
    for peer in range(WORLD_SIZE):
        theirs = tl.load(buffers + peer).to(tl.pointer_type(tl.float32))
        tl.store(theirs + share, total, mask=share < count)
    barrier(pads, RANK, WORLD_SIZE, True, True)  # 2
    tl.store(out + part, tl.load(own + part, mask=part < count), mask=part < count)


def two_shot(x):
    """The sum of all ranks' x. The buffer is kept from call to call."""
    key = x.device, x.numel()
    if key not in _buffers:
        _buffers[key] = symm_mem.empty(x.numel(), dtype=torch.float32, device=x.device)
    handle = symm_mem.rendezvous(_buffers[key], dist.group.WORLD)
    out = torch.empty_like(x)
    grid = lambda given: (triton.cdiv(x.numel(), given["BLOCK"] * handle.world_size),)  # noqa: E731
    two_shot_kernel[grid](
        handle.buffer_ptrs_dev,
        handle.signal_pad_ptrs_dev,
        x,
        out,
        count=x.numel(),
        RANK=handle.rank,
        WORLD_SIZE=handle.world_size,
        BLOCK=64,
        num_warps=2,
    )
    return out


@triton.autotune([triton.Config({"BLOCK": 128}, num_warps=2), triton.Config({"BLOCK": 64}, num_warps=1)], key=["count"])
@triton.jit
def one_shot_kernel(peers, pads, out, count, RANK: tl.constexpr, WORLD_SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """Sums what is in all ranks' memory at the start."""
    barrier(pads, RANK, WORLD_SIZE, False, True)  # 1
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float32)
    for peer in tl.static_range(WORLD_SIZE):
        total += tl.load(peers[peer] + at, mask=at < count, other=0.0)
    tl.store(out + at, total, mask=at < count)
    barrier(pads, RANK, WORLD_SIZE, True, False)  # 2


@functools.cache
def symmetric(count):
    return symm_mem.empty(count, dtype=torch.float32, device="cuda")


def one_shot(value, count=150):
    """The sum of all ranks' `value`, `count` times."""
    x = symmetric(count).fill_(value)
    handle = symm_mem.rendezvous(x, dist.group.WORLD.group_name)
    peers = tuple(handle.get_buffer(rank, (count,), x.dtype) for rank in range(handle.world_size))
    out = torch.empty(count, device="cuda")
    grid = lambda given: (triton.cdiv(given["count"], given["BLOCK"]),)  # noqa: E731
    one_shot_kernel[grid](peers, handle.signal_pad_ptrs_dev, out, count, handle.rank, handle.world_size)
    return out
