"""Every kernel, type and operation, executed as it is compiled, gives the interpreter's bits."""

from __future__ import annotations

import pytest

from tests.explorer.compiled import bits


@pytest.mark.parametrize("case", bits.sample(), ids=lambda case: case.name)
def test_a_kernel_gives_the_interpreters_bits(case):
    assert bits.difference(case, bits.through_machine(case), bits.through_interpreter(case)) == ""


@pytest.mark.soak
@pytest.mark.parametrize("architecture", ["sm_80", "sm_90", "sm_100"])
@pytest.mark.parametrize("case", bits.cases(), ids=lambda case: case.name)
def test_every_kernel_type_and_operation_gives_the_interpreters_bits(case, architecture):
    machine = bits.through_machine(case, architecture)
    assert bits.difference(case, machine, bits.through_interpreter(case)) == ""
