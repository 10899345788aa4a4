"""What vLLM's registry points at: stock classes, or LOCKS' where an engine asked for it.

The registry holds paths, resolved while a model is built, with that engine's configuration at hand.  Each path names
an attribute of this module, made on demand, so that off means vLLM's own class object and not a subclass of it.
"""

from __future__ import annotations

from typing import Any

STOCK = {
    "CPU_ATTN": "vllm.v1.attention.backends.cpu_attn.CPUAttentionBackend",
    "CPU_MLA": "vllm.v1.attention.backends.mla.cpu_mla.CPUMLABackend",
    "AMX_MLA": "vllm.v1.attention.backends.mla.amx_mla.AMXMLABackend",
}


def __getattr__(name: str) -> Any:
    if name != "CUSTOM" and name not in STOCK:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from vllm.config import get_current_vllm_config_or_none
    from vllm.utils.import_utils import resolve_obj_by_qualname

    from .options import options_of, requested
    from .support import Unsupported, refuse_version

    config = get_current_vllm_config_or_none()
    if name in STOCK and (config is None or not requested(config)):
        return resolve_obj_by_qualname(STOCK[name])
    if config is not None:
        refuse_version(options_of(config).allow_untested_vllm)  # before what may not import on another release
    if name == "CPU_ATTN":
        from .cpu import LocksCPUBackend

        return LocksCPUBackend
    if name == "CUSTOM":
        from vllm.platforms import current_platform

        if not current_platform.is_cuda():
            device = current_platform.device_name or "this device"
            raise Unsupported(device, "there are kernels for CUDA and a backend for CPU", "Use another backend")
        from .gpu import LocksCUDABackend

        return LocksCUDABackend
    raise Unsupported("MLA", "its cache holds latents, not keys", "Serve this model without --attention-backend CUSTOM")
