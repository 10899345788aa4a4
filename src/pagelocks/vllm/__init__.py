"""The plugin for vLLM: `--attention-backend CUSTOM` and `--additional-config '{"locks": {…}}'`.

vLLM calls `register` in every process it starts.  It only writes names into registries: nothing changes until an engine
asks for the CUSTOM backend.
"""

ENTRY = "pagelocks.vllm.entry"


def register() -> None:
    """Offer the backends to vLLM and the counters to `/metrics`; may be called any number of times."""
    from vllm.logger import init_logger
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    from .metrics import register_collector

    logger = init_logger("vllm.plugins.pagelocks")
    # On CPU vLLM's platform answers with its own entry whatever was asked for, so that entry is the one to stand in
    # for; `entry` hands out vLLM's own class unless LOCKS was asked for.
    for name in ("CUSTOM", "CPU_ATTN", "CPU_MLA", "AMX_MLA"):
        backend = AttentionBackendEnum.__members__.get(name)
        if backend is None:
            continue  # another release of vLLM; a start that asks for LOCKS is refused there
        if backend.is_overridden() and not backend.get_path().startswith(ENTRY):
            logger.warning("LOCKS is not available: another plugin has taken %s (%s).", name, backend.get_path())
            continue
        register_backend(backend, f"{ENTRY}.{name}")
    register_collector()
