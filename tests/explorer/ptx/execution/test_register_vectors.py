"""`.reg .v4 .b32 %v`, as inline PTX of public kernels has it."""

import numpy as np
import pytest

from tests.explorer.ptx.execution.handwritten import kernel, run
from tricomm.errors import InvalidArgument
from tricomm.explorer.ptx.units import grid


def test_vectors_of_registers_are_their_elements():
    out = np.zeros(8, "u4")
    run(
        kernel(
            """{ .reg .b32 %other; .reg .v4 .b32 %acc; mov.v4.b32 %acc, 7; mov.b64 {%acc.y, %acc.z}, 0x500000003;
            { .reg .v4 .b32 %other; .reg .v2 .b32 %two;
            mov.v4.b32 %other, %acc; add.u32 %other.w, %other.w, %acc.y; mov.v2.b32 %two, {%acc.z, %acc.x};
            { .reg .v2 .b32 %acc; mov.v2.b32 %acc, 1; st.global.v2.b32 [%rd0+24], %acc; }
            st.global.v4.b32 [%rd0], %other; st.global.v2.b32 [%rd0+16], %two; } }"""
        ),
        [out],
        threads=1,
    )
    assert out.tolist() == [7, 3, 5, 10, 5, 7, 1, 1]


@pytest.mark.parametrize(
    "text", [".reg .v4 .b32 %v<3>;", ".reg .v2 .b32 %v; mov.v4.b32 %v, 0;", ".reg .v8 .b32 %v; mov.v8.b32 %v, 0;"]
)
def test_an_invalid_vector_of_registers_is_refused(text):
    with pytest.raises(InvalidArgument, match="%v"):
        grid.refuse_unknown(kernel(f"{{ {text} }}"))
