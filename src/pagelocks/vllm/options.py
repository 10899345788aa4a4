"""What a user asked of LOCKS: the `locks` part of vLLM's `--additional-config`, checked."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any

from ..config import LocksConfig, reject
from ..selectors import SELECTORS

if TYPE_CHECKING:
    from vllm.config import VllmConfig

PAGE_SIZE = 16
"""Tokens in a page under vLLM, whatever its block size."""


GPU_DENSE_BELOW = 6144
"""`dense_below` on a GPU, where none is given: on an H200 attending all of one sequence of GLM-4-9B's shape takes less
time than choosing pages at 4,096 tokens, and more at 8,192 (docs/performance.md)."""


@dataclass(frozen=True)
class Options:
    """Settings of one engine.

    Attributes
    ----------
    config : LocksConfig
    selector : str
        What ranks the pages: "locks", or for experiments one of `pagelocks.selectors`.
    trace : str or None
        A file that gets one JSON line for each sparse row and layer: which pages it read.  Slow; for study.
    allow_untested_vllm : bool
        Start on a release of vLLM that pagelocks was not tested with.
    """

    config: LocksConfig = field(default_factory=LocksConfig)
    selector: str = "locks"
    trace: str | None = None
    allow_untested_vllm: bool = False

    @classmethod
    def parse(cls, given: object) -> Options:
        """Options from the value of "locks" in `--additional-config`.

        Raises
        ------
        ValueError
            For an unknown key or a bad value: the value, what is allowed, the remedy.
        """
        if not isinstance(given, Mapping):
            raise reject("locks", given, "an object of options", 'Write, say, {"locks": {"budget": 2048}}.')
        ours = [each.name for each in fields(cls) if each.name != "config"]
        core = [each.name for each in fields(LocksConfig)]
        for key in given:
            if key not in ours + core:
                raise reject("locks", key, f"the options are {', '.join(core + ours)}", "Correct or remove it.")
        if given.get("page_size", PAGE_SIZE) != PAGE_SIZE:
            allowed = f"pages hold {PAGE_SIZE} tokens in vLLM, whatever the block size"
            raise reject("page_size", given["page_size"], allowed, "Leave it out.")
        options = cls(
            config=LocksConfig(**{key: value for key, value in given.items() if key in core}),
            **{key: value for key, value in given.items() if key in ours},
        )
        if options.selector not in SELECTORS:
            raise reject("selector", options.selector, f"one of {', '.join(SELECTORS)}", "Leave it out for LOCKS.")
        if not isinstance(options.trace, str | None):
            raise reject("trace", options.trace, "the path of a file", "Leave it out unless you study selections.")
        if not isinstance(options.allow_untested_vllm, bool):
            raise reject("allow_untested_vllm", options.allow_untested_vllm, "true or false", "Leave it out.")
        return options


def requested(vllm_config: VllmConfig) -> bool:
    """Whether this engine asked for LOCKS, by `--attention-backend CUSTOM`.

    Raises
    ------
    ValueError
        If it gives options for LOCKS without asking for the backend, or the backend belongs to another plugin.
    """
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    from . import ENTRY

    custom = AttentionBackendEnum.CUSTOM
    attention = vllm_config.attention_config
    asked = attention.backend == custom
    if custom in (getattr(attention, "backend_per_kind", None) or {}).values():
        allowed = "LOCKS is asked for by --attention-backend, and leaves sliding layers to stock attention by itself"
        raise reject("backend_per_kind", "CUSTOM", allowed, "Use --attention-backend CUSTOM.")
    given = given_options(vllm_config)
    owner = custom.get_path() if custom.is_overridden() else None
    if asked and owner is not None and not owner.startswith(ENTRY):
        if given is None:
            return False
        remedy = "Uninstall one of the two plugins, or name the one you want in VLLM_PLUGINS."
        raise reject("--attention-backend", "CUSTOM", f"another plugin has taken it ({owner})", remedy)
    if given is not None and not asked:
        found = attention.backend.name if attention.backend else None
        allowed = 'options for LOCKS ("locks" in --additional-config) need --attention-backend CUSTOM'
        raise reject("--attention-backend", found, allowed, "Add it, or remove the options.")
    return asked


def given_options(vllm_config: VllmConfig) -> Any:
    """The value of "locks" in `--additional-config`, None if there is none."""
    additional = vllm_config.additional_config
    return additional.get("locks") if isinstance(additional, dict) else None


def options_of(vllm_config: VllmConfig) -> Options:
    """The options of an engine that asked for LOCKS; the defaults of its device for what it did not give."""
    from vllm.platforms import current_platform

    given = given_options(vllm_config)
    options = Options() if given is None else Options.parse(given)
    if current_platform.is_cuda() and "dense_below" not in (given or {}):
        options = replace(options, config=replace(options.config, dense_below=GPU_DENSE_BELOW))
    return options
