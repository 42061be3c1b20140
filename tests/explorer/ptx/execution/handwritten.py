"""Small kernels as PTX text, run over numpy arrays."""

import struct

import numpy as np

from tests.explorer.ptx.execution import turns
from tricomm.explorer.ptx.global_memory import GlobalMemory
from tricomm.explorer.ptx.text.parser import parse
from tricomm.explorer.ptx.units import grid

HEADER = ".version 9.0\n.target sm_90a\n.address_size 64\n"
REGISTERS = (
    ".reg .pred %p<32>; .reg .b16 %rs<32>; .reg .b32 %r<64>; .reg .b64 %rd<64>; .reg .f32 %f<32>; .reg .f64 %fd<16>; "
    ".reg .b128 %rq<8>;"
)


def kernel(body: str, parameters: int = 1, variables: str = "", target: str = "sm_90a"):
    """A kernel of 64-bit parameters `p0`, `p1`, ...; `%rd0`, `%rd1`, ... hold them at the start."""
    declared = ", ".join(f".param .b64 p{n}" for n in range(parameters))
    loads = "\n".join(f"ld.param.b64 %rd{n}, [p{n}];" for n in range(parameters))
    header = HEADER.replace("sm_90a", target)
    text = f"{header}{variables}\n.visible .entry k({declared}) {{\n{REGISTERS}\n{loads}\n{body}\nret;\n}}\n"
    return parse(text)


def run(code, arguments, threads=32, blocks=1, unit="warp", shared=0, watched=False, steps=grid.STEPS):
    """Arrays are passed by address, numbers as they are. Returns the environments of all units if `watched`."""
    memory, words = GlobalMemory(), []
    for argument in arguments:
        if isinstance(argument, np.ndarray):
            memory.add(argument.ctypes.data, argument.nbytes, f"argument {len(words)}")
            words.append(argument.ctypes.data)
        else:
            words.append(argument & (1 << 64) - 1)
    loaded = grid.LoadedKernel(code, memory, watch_shared=watched, steps=steps)
    shape = threads if isinstance(threads, tuple) else (threads, 1, 1)
    size = blocks if isinstance(blocks, tuple) else (blocks, 1, 1)
    made = grid.launch(loaded, size, shape, shared, struct.pack(f"={len(words)}Q", *words), unit)
    around = turns.run([made], watched)
    return around if watched else []
