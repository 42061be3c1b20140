"""Public kernels over symmetric memory, from checkouts in a folder: the calls and the expected findings.

`MUTANTS` are mistakes in kraken's all-reduces and their barrier, as changes to the text of its files.

None of their code is in this project. Each case is one command: `tricomm check FILE:FUNCTION --args ARGUMENTS`.

Not among them: Triton-distributed, whose kernels need its own compiler; Helion, whose examples compile C++ for CUDA
when they are imported; Iris, which needs an AMD GPU; torch's own examples, which call NVSHMEM. `tests/explorer/public`
has kernels in their shape.
"""

import re
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Case:
    """A function of a checkout, the finding that it has ("" for none), and the text of the lines that this names.

    real    it can happen on a GPU; False: PTX allows it, but no GPU does it today
    """

    file: str
    function: str
    arguments: str
    kind: str = ""
    lines: tuple[str, ...] = ()
    real: bool = True
    stubs: tuple[str, ...] = ()
    compiled: str = "sm_90"
    schedules: int = 20

    @property
    def title(self) -> str:
        finding = self.kind if self.real else f"formal-{self.kind}"
        return f"{self.file.partition('/')[0]}-{self.function}-{finding or 'right'}"


def _ones(*shape: int) -> str:
    return f"torch.ones({', '.join(map(str, shape))}, dtype=torch.bfloat16, device='cuda')"


def _symmetric(*shape: int) -> str:
    return f"symm_mem.empty({', '.join(map(str, shape))}, dtype=torch.bfloat16, device='cuda')"


def _kept(*shape: int) -> str:
    """A symmetric tensor that all calls of a rank use."""
    return f"globals().setdefault('kept', {_symmetric(*shape)})"


def _handle(tensor: str) -> str:
    return f"symm_mem.rendezvous({tensor}, dist.group.WORLD)"


def _kraken(file: str, *arguments: str, kind: str = "", lines: tuple[str, ...] = (), **more: object) -> Case:
    function = file.rpartition("/")[2].removesuffix("_fused").replace("copy_engine_all_gather", "all_gather_w_progress")
    return Case(f"kraken/kraken/{file}.py", function, ", ".join(arguments), kind, lines, **more)  # type: ignore[arg-type]


_ROWS = _kept(2, 64), _ones(2, 64), _ones(2, 64)
_TILE = "BLOCK_SIZE_M=32, BLOCK_SIZE_N=32, BLOCK_SIZE_K=32"
_GEMM_RACE = "tl.store(", "tl.load("
KRAKEN = (
    _kraken("comm/one_shot_all_reduce", f"{_kept(1000)}.fill_(rank)", "BLOCK_SIZE=512", "num_warps=4", schedules=60),
    _kraken("comm/two_shot_all_reduce", f"{_ones(512)} * rank", "BLOCK_SIZE=128", "num_warps=4", schedules=60),
    _kraken("comm/copy_engine_all_gather", f"{_symmetric(64)}.fill_(rank)"),
    _kraken("fused/one_shot_all_reduce_bias", _kept(64), _ones(64), _ones(64), _ones(64)),
    _kraken("fused/two_shot_all_reduce_bias", *_ROWS, _ones(2, 64)),
    _kraken("fused/one_shot_all_reduce_bias_rms_norm", *_ROWS, _ones(64), _ones(2, 64), schedules=5),
    _kraken("fused/two_shot_all_reduce_bias_rms_norm", *_ROWS, _ones(64), _ones(2, 64), schedules=3),
    _kraken(
        "fused/all_gather_matmul",
        f"{_symmetric(64, 64)}.fill_(rank)",
        f"{_ones(64, 64)}.T",
        "block_size_m=32, block_size_n=32, block_size_k=32, num_warps=4",
        compiled="sm_80",
        schedules=3,
    ),
    _kraken("fused/gemm_one_shot_all_reduce_fused", _ones(32, 32), _ones(32, 32), _TILE, kind="race", lines=_GEMM_RACE),
    _kraken("fused/gemm_reduce_scatter_fused", _ones(64, 32), _ones(32, 32), _TILE, kind="race", lines=_GEMM_RACE),
)

_COMM = "flashinfer/flashinfer/comm"
_QUANTIZED = f"{_COMM}/quantized_allreduce.py", "quantized_all_reduce"
_FP8 = "(torch.arange(256, device='cuda') / 7 + rank).bfloat16(), dist.group.WORLD, scale_group=32, block_size=64"
_FLASHINFER_STUBS = "flashinfer.utils", "flashinfer.api_logging"
_PADS = f"tuple({_handle(_kept(8))}.get_signal_pad(r, dtype=torch.int32) for r in range(world_size)), rank"
FLASHINFER = (
    Case(*_QUANTIZED, f"{_FP8}, num_warps=2", "rank_mismatch", stubs=_FLASHINFER_STUBS),
    Case(
        *_QUANTIZED, f"{_FP8}, num_warps=2, p2p_phase3=True", "race", ("tl.load(", "tl.store("), stubs=_FLASHINFER_STUBS
    ),
    Case(
        f"{_COMM}/all_gather_matmul/all_gather_matmul_triton.py",
        "barrier_triton",
        _PADS,
        "scope",
        ("tl.atomic_cas(deposit_pad + rank, 0, 1)", "tl.atomic_cas(withdraw_pad + peer, 1, 0)"),
        False,
    ),
)

_NVLS = "Megatron-LM/megatron/core/inference/communication/torch_symm_triton"
_MEGATRON_STUBS = ("megatron.core.utils",)
_GATHER = f"{_kept(2, 1024)}, {_ones(1024)} * rank, {_handle(_kept(2, 1024))}, num_warps=2, BLOCK_SIZE=64"
_SCATTER = f"{_ones(1024)}, {_kept(2, 1024)}.fill_(rank), {_handle(_kept(2, 1024))}, num_warps=2, BLOCK_SIZE=64"
_ROW = _ones(1024)
_FUSED = f"{_ones(1024)}, {_kept(2, 1024)}.fill_(rank), {_handle(_kept(2, 1024))}, {_ROW}, {_ROW}, 1e-5"
_COUNTS = "*torch.tensor([[4 * rank], [4]], dtype=torch.int32, device='cuda'), 2"
_LOAD = ("", "= ld_128(")
MEGATRON = tuple(
    Case(f"{_NVLS}/{file}.py", function, arguments, kind, lines, kind == "", _MEGATRON_STUBS)
    for file, function, arguments, kind, lines in (
        ("collectives", "multimem_all_gather", f"{_GATHER}, barrier_before=True", "", ()),
        ("collectives", "multimem_reduce_scatter", _SCATTER, "race", _LOAD),
        ("fused_collectives", "fused_multimem_rs_add_norm_ag", _FUSED, "race", _LOAD),
        (
            "variable_collectives",
            "multimem_all_gather_v",
            f"{_kept(8, 256)}, {_ones(4, 256)} * rank, {_handle(_kept(8, 256))}, {_COUNTS}",
            "",
            (),
        ),
        (
            "variable_collectives",
            "multimem_reduce_scatter_v",
            f"{_ones(4, 256)}, {_kept(8, 256)}.fill_(rank), {_handle(_kept(8, 256))}, {_COUNTS}",
            "race",
            _LOAD,
        ),
    )
)

_RECIPE = "symm-mem-recipes/symm_mem_recipes/triton_one_shot_all_reduce.py", "one_shot_all_reduce"
_RECIPE_STUBS = ("symm_mem_recipes.utils",)
_TITAN = "torchtitan/torchtitan/experiments/deepseek_v3/symm_mem_recipes/triton_on_device_all_to_all_v.py"
_ROWS_OF_EACH = "symm_mem.empty(2, dtype=torch.int64, device='cuda').fill_(2)"
_SHUFFLED = f"{_ones(4, 64)}, torch.empty(2, dtype=torch.int64, device='cuda'), {_symmetric(4, 64)}, {_ROWS_OF_EACH}"
_LINGHE = "linghe/linghe/experimental/demb.py", "triton_tp_embedding_lookup_forward"
_LOOKUP = f"torch.tensor([1, 3, 0, 2], device='cuda'), {_ones(2, 64)} * (rank + 1)"
OTHERS = (
    Case(*_RECIPE, f"{_symmetric(64)}.fill_(rank)", stubs=_RECIPE_STUBS),
    # Its blocks other than the first acquire the first one's words.
    Case(*_RECIPE, f"{_symmetric(8192)}.fill_(rank)", "race", ("", "%p0"), False, _RECIPE_STUBS),
    Case(*_RECIPE, f"{_kept(64)}.fill_(rank)", "race", ("", "%p0"), stubs=_RECIPE_STUBS),
    Case(
        _TITAN, "_on_device_all_to_all_v", f"{_SHUFFLED}, dist.group.WORLD, 1, 1, 64", "race", ("", "tl.load("), False
    ),
    Case(*_LINGHE, f"{_LOOKUP}, {_handle(_symmetric(256))}, dist.group.WORLD"),
    Case(*_LINGHE, f"{_LOOKUP}, {_handle(_kept(256))}, dist.group.WORLD", "race", ("tl.load(", "tl.store(")),
)
CASES = (*KRAKEN, *FLASHINFER, *MEGATRON, *OTHERS)

ONE, TWO, BARRIER = "comm/one_shot_all_reduce.py", "comm/two_shot_all_reduce.py", "_ptx_utils/symm_mem_barrier.py"
EARLY = "race uninitialised"
_CALL = r" *ptx_utils\.symm_mem_sync\([^()]*\)\n"


@dataclass(frozen=True)
class Mutant:
    """`number`: which place that `pattern` matches is changed, from 1. `of`: the all-reduce that is called."""

    of: str
    name: str
    file: str
    pattern: str
    number: int
    instead: str
    kinds: str

    def put(self, package: Path) -> None:
        """Change the file in this copy of the package."""
        file = package / self.file
        text = file.read_text()
        places = list(re.finditer(self.pattern, text))
        assert len(places) >= self.number, f"{file} has {len(places)} places that match {self.pattern!r}"
        start, end = places[self.number - 1].span()
        file.write_text(text[:start] + self.instead + text[end:])


def _of(file: str, *rows: tuple[str, str, int, str, str], of: str = TWO) -> tuple[Mutant, ...]:
    return tuple(Mutant(of, name, file, pattern, number, new, kinds) for name, pattern, number, new, kinds in rows)


_BEFORE, _AFTER = r"hasPreviousMemAccess=True", r"hasSubsequentMemAccess=True"
MUTANTS = (
    *_of(
        ONE,
        ("no first barrier", _CALL, 1, "", EARLY),
        ("no barrier before the memory is used again", _CALL, 2, "", "race"),
        ("the first barrier acquires nothing", _AFTER, 1, "hasSubsequentMemAccess=False", "race"),
        ("the last barrier releases nothing", _BEFORE, 1, "", "race"),
        ("elements past the end", r"offsets < numel", 1, "offsets <= numel", "out_of_bounds"),
        of=ONE,
    ),
    *_of(
        TWO,
        ("no first barrier", _CALL, 1, "", EARLY),
        ("no second barrier", _CALL, 2, "", "race"),
        ("the first barrier releases nothing", _BEFORE, 1, "hasPreviousMemAccess=False", EARLY),
        ("the first barrier acquires nothing", _AFTER, 1, "hasSubsequentMemAccess=False", EARLY),
        ("the second barrier releases nothing", _BEFORE, 2, "hasPreviousMemAccess=False", "race"),
        ("the second barrier acquires nothing", _AFTER, 2, "hasSubsequentMemAccess=False", "race"),
        ("each rank reduces the same share", r"rank \* BLOCK_SIZE \+", 1, "", "race"),
    ),
    *_of(
        BARRIER,
        ("a signal in the GPU's scope", r"\{sem\}\.sys\.cas", 1, "{sem}.gpu.cas", f"scope {EARLY}"),
        ("a wait in the GPU's scope", r"global\.sys\.", 1, "global.gpu.", f"scope {EARLY}"),
        ("a relaxed signal", r'"release" if hasPreviousMemAccess else ', 1, "", EARLY),
        ("a relaxed wait", r'"acquire" if hasSubsequentMemAccess else ', 1, "", EARLY),
        ("a signal before the block's other threads", r"tl\.debug_barrier\(\)", 1, "pass", EARLY),
        ("accesses before the first threads' wait", r"tl\.debug_barrier\(\)", 2, "pass", EARLY),
        ("a signal in a wrong word", r"world_size \+ rank\b", 1, "world_size", "deadlock"),
        ("a wait in a wrong word", r"world_size \+ remote_ranks", 1, "world_size + remote_ranks * 0", "deadlock"),
        (
            "a wait in another block's word",
            r"local_signal_pad_addr \+ block_id",
            1,
            "local_signal_pad_addr + 1",
            f"deadlock {EARLY}",
        ),
        ("signals without an epoch", r"\], 1, 0;", 1, "], 1, 1;", "deadlock"),
        ("only one thread signals", r"flat_tid < world_size", 1, "flat_tid < 1", f"deadlock {EARLY}"),
    ),
)
