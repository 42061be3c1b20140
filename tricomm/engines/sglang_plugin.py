"""SGLang's entry point: with SGLANG_TRICOMM=1 tricomm replaces its custom all-reduce, otherwise nothing changes.

SGLang loads it in every process whenever tricomm is installed, so it imports nothing before the variable is checked.
"""

from __future__ import annotations

import logging
from typing import Any

from tricomm import env
from tricomm.engines.versions import VersionRange

TESTED = VersionRange((0, 5, 23), (0, 5, 23))
PLACES = {
    "dispatch_custom_allreduce": "sglang.srt.distributed.device_communicators.custom_all_reduce",
    "flashinfer_allreduce_residual_rmsnorm": "sglang.srt.layers.flashinfer_comm_fusion",
    "resolve_fusion_group": "sglang.srt.layers.flashinfer_comm_fusion",
}

# A class of the scheduler, by name, which SGLang resolves when it applies the hooks: it is too much to import here.
MEMORY = "sglang.srt.managers.scheduler_components.weight_updater.SchedulerWeightUpdaterManager"


def register() -> None:
    """Hook SGLang's choice of a custom all-reduce, its fused all-reduce with a norm, and its release of memory.

    If this SGLang is not supported, a warning in its log gives the reason, and nothing changes. Raises
    `InvalidArgument` if SGLANG_TRICOMM is neither on nor off.
    """
    if not env.flag("SGLANG_TRICOMM"):
        return
    import sglang

    log = logging.getLogger("sglang.srt.tricomm")
    why = TESTED.refusal("SGLang", sglang.__version__) or _hook(log)
    if why is not None:
        log.warning("SGLANG_TRICOMM=1 has no effect: %s", why)


def functions() -> dict[str, Any]:
    """SGLang's functions that the adapter uses, by name. Raises `ImportError` or `AttributeError` if one is gone."""
    from importlib import import_module

    return {name: getattr(import_module(module), name) for name, module in PLACES.items()}


def _hook(log: logging.Logger) -> str | None:
    """Register the hooks, which SGLang applies when all plugins are loaded. Returns the reason if that fails."""
    from sglang.srt.environ import envs
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    from tricomm.engines import sglang_all_reduce
    from tricomm.engines.engine_group import Engine

    try:
        originals = functions()
    except (ImportError, AttributeError) as error:
        return str(error)
    wrong = sglang_all_reduce.misfits(originals)
    if wrong:
        return "; ".join(wrong)

    def engine() -> Engine:  # when a group is made: SGLang sets the variable after it has loaded its plugins
        return Engine("SGLang", log, bool(envs.SGLANG_ENABLE_DETERMINISTIC_INFERENCE.get()), ("all_reduce",))

    hooks = {
        "dispatch_custom_allreduce": sglang_all_reduce.dispatched(engine),
        "flashinfer_allreduce_residual_rmsnorm": sglang_all_reduce.fused(originals["resolve_fusion_group"]),
    }
    for name, hook in hooks.items():
        HookRegistry.register(f"{PLACES[name]}.{name}", hook, HookType.AROUND)
    HookRegistry.register(f"{MEMORY}.release_memory_occupation", sglang_all_reduce.released, HookType.AROUND)
    HookRegistry.register(f"{MEMORY}.resume_memory_occupation", sglang_all_reduce.taken_again, HookType.AROUND)
    return None
