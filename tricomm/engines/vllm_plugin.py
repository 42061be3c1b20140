"""vLLM's entry point: with VLLM_TRICOMM=1 tricomm extends its communicators, otherwise nothing changes.

vLLM loads it in every process whenever tricomm is installed, so it imports only tricomm before the variable is checked.
"""

from __future__ import annotations

import logging

from tricomm import env
from tricomm.engines.versions import VersionRange

TESTED = VersionRange((0, 32), (0, 33))


def register() -> None:
    """Make `get_device_communicator_cls` of vLLM's platform name tricomm's class; may be called again.

    If this vLLM is not supported, a warning in its log gives the reason, and nothing changes. Raises `InvalidArgument`
    if VLLM_TRICOMM is neither on nor off.
    """
    if not env.flag("VLLM_TRICOMM"):
        return
    import vllm
    from vllm.logger import init_logger

    log = init_logger("vllm.tricomm")  # its handlers are those of vLLM
    why = TESTED.refusal("vLLM", vllm.__version__) or _patch(log)
    if why is not None:
        log.warning("VLLM_TRICOMM=1 has no effect: %s", why)


def _patch(log: logging.Logger) -> str | None:
    """Patch the platform. Returns the reason if that fails."""
    from vllm import envs
    from vllm.config import get_current_vllm_config_or_none
    from vllm.platforms import current_platform
    from vllm.utils.import_utils import resolve_obj_by_qualname

    from tricomm.engines import vllm_communicator
    from tricomm.engines.engine_group import Engine

    platform = type(current_platform)
    if not (current_platform.is_cuda() or current_platform.is_cpu()):
        return f"there are no kernels for the platform {platform.__name__}"
    own = platform.get_device_communicator_cls
    if getattr(own, "of_tricomm", False):
        return None
    base = resolve_obj_by_qualname(own())
    wrong = vllm_communicator.misfits(base)
    if wrong:
        return "; ".join(wrong)

    def refusal() -> str | None:
        config = get_current_vllm_config_or_none()
        if config is not None and config.parallel_config.use_ubatching:
            return "microbatches overlap their calls on two streams, and a communicator of tricomm has one"
        return None

    engine = Engine("vLLM", log, bool(envs.VLLM_BATCH_INVARIANT))
    name = vllm_communicator.communicator_class(base, engine, refusal)

    def get_device_communicator_cls(cls: type) -> str:
        return name

    get_device_communicator_cls.of_tricomm = True  # type: ignore[attr-defined]
    platform.get_device_communicator_cls = classmethod(get_device_communicator_cls)
    return None
