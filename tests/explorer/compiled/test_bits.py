"""Every kernel, type and operation, executed as it is compiled, gives the interpreter's bits."""

import pytest
import torch
import triton

from tests.explorer.compiled import bits
from tests.marks import compiles, odd, some
from tests.passed_record import PassedRecord


def test_one_bit_is_noticed_and_only_a_sums_nan_has_many_patterns():
    copies, sums = (next(c for c in bits.cases() if c.kernel.collective == name) for name in ("all_gather", "reduce"))
    one, other = torch.tensor([1.0, torch.nan]), torch.tensor([1.0, torch.nan])
    other.view(torch.int32)[1] ^= 1
    assert bits.difference(sums, [[one]], [[other]]) == ""
    assert "1 of 2 elements, the first is 1: nan" in bits.difference(copies, [[one]], [[other]])
    other.view(torch.int32)[0] ^= 1
    assert "1 of 2 elements, the first is 0: 1.0 (0x3f800000)" in bits.difference(sums, [[one]], [[other]])
    assert "torch.float32 [2] and torch.float64 [2]" in bits.difference(sums, [[one]], [[other.double()]])


# A product of fp8 takes ten seconds to compile.
@pytest.mark.parametrize(
    "case",
    some(bits.sample(), lambda number, case: number % 6 == 0 and case.op != "prod", odd),
    ids=lambda case: case.name,
)
def test_a_compiled_kernel_has_the_interpreters_bits(case):
    assert bits.difference(case, bits.through_machine(case), bits.through_interpreter(case)) == ""


def test_two_floats_that_all_threads_share_are_packed_as_any_others():
    """A sum of tiles that the compiler knows to be equal, so `cvt.rn.bf16x2.f32` has two uniform sources."""
    case = next(c for c in bits.cases() if c.name == "all_reduce_one_shot_ll-bfloat16-sum")
    assert bits.difference(case, bits.through_machine(case, "sm_90"), bits.through_interpreter(case)) == ""


@pytest.mark.soak
@pytest.mark.parametrize("kernel", list(dict.fromkeys(case.kernel.name for case in bits.cases())))
def test_every_kernel_type_and_operation_has_the_interpreters_bits(kernel, request):
    """`make soak` runs this under every Triton."""
    wrong, record = {}, PassedRecord(request.config.cache.mkdir("explored") / "bits.jsonl", bits.__file__)
    for case in bits.cases():
        if case.kernel.name == kernel:
            wanted = [f"sm_{a}" for a in (90, 80, 100) if compiles(case.kernel, a)]
            keys = {a: {"case": case.name, "architecture": a, "compiler": triton.__version__} for a in wanted}
            keys = {a: key for a, key in keys.items() if not record.has(**key)}
            interpreted = bits.through_interpreter(case) if keys else []
            for architecture, key in keys.items():
                said = bits.difference(case, bits.through_machine(case, architecture), interpreted)
                wrong |= {f"{case.name} on {architecture}": said} if said else {}
                if not said:
                    record.add(key)
    assert wrong == {}
