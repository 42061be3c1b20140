"""Run once in a fork server, for all processes that it starts: imports, and kernels rewritten for the interpreter."""

from __future__ import annotations

import gc
import pkgutil
from importlib import import_module

import pytest  # noqa: F401  a rank imports the test that it is of
import torch
import torch._dynamo  # DDP imports it at its first use

import tricomm.c10d
import tricomm.communicator  # noqa: F401
from tests.core.bodies import common_bodies  # noqa: F401
from tricomm import kernels
from tricomm.kernels.launch import triton_adapter

for _module in pkgutil.walk_packages(kernels.__path__, "tricomm.kernels."):
    for _value in list(vars(import_module(_module.name)).values()):
        if triton_adapter.is_kernel(_value):
            triton_adapter.python(_value)
triton_adapter.implicit(torch.ones(1))  # imports a part of Triton at its first use
triton_adapter.patch()
triton_adapter.restore()
gc.collect()
gc.freeze()  # a collection in a process would copy all of this, and take a second
