"""Off means off, and the backend's slot is shared with other plugins without stealing it."""

from __future__ import annotations

from typing import Any

import pytest
from harness import ChildError, engine, in_child, in_new_child
from test_support import run, tokens_of

pytestmark = pytest.mark.engine


def stock_facts(model: str) -> Any:
    """What an engine without LOCKS is made of, and what it says."""
    llm = engine(model)
    context = llm.llm_engine.vllm_config.compilation_config.static_forward_context
    kinds = {
        name: (type(layer.impl).__qualname__, layer.attn_backend.full_cls_name()) for name, layer in context.items()
    }
    runner = llm.llm_engine.model_executor.driver_worker.worker.model_runner
    builders = [type(group.metadata_builders[0]).__qualname__ for groups in runner.attn_groups for group in groups]
    return kinds, builders, llm.llm_engine.vllm_config.cache_config.num_gpu_blocks, tokens_of(llm)


def test_off_means_off(tiny_llama: str) -> None:
    """With the plugin loaded and with VLLM_PLUGINS keeping it out: the same classes, block count and tokens."""
    installed = in_child(stock_facts, tiny_llama)
    kept_out = in_new_child(stock_facts, tiny_llama, VLLM_PLUGINS="none")
    assert installed == kept_out
    assert {kind for kind, _ in installed[0].values()} == {"CPUAttentionBackendImpl"}


def test_options_without_the_backend_stop_the_start(tiny_llama: str) -> None:
    with pytest.raises(ChildError) as caught:
        in_new_child(run, tiny_llama, None, {"additional_config": {"locks": {"budget": 64}}})
    assert "need --attention-backend CUSTOM" in caught.value.message


def test_other_additional_config_is_left_alone(tiny_llama: str) -> None:
    tokens, _, layers = in_child(run, tiny_llama, None, {"additional_config": {"other": 1}})
    assert layers == [] and len(tokens) == 3


def taken_by_another(model: str, locks: dict[str, Any] | None) -> Any:
    """Another plugin holds CUSTOM when ours loads."""
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    register_backend(AttentionBackendEnum.CUSTOM, "another.plugin.Backend")
    extra = {} if locks is None else {"additional_config": {"locks": locks}}
    return tokens_of(engine(model, attention_backend="CUSTOM", **extra))


def test_custom_taken_by_another_plugin_is_an_error_that_names_it(tiny_llama: str) -> None:
    with pytest.raises(ChildError) as caught:
        in_new_child(taken_by_another, tiny_llama, {"budget": 64})
    assert "another.plugin.Backend" in caught.value.message
    assert len(in_new_child(taken_by_another, tiny_llama, None)) == 3  # and is none of our business otherwise


def test_registering_again_changes_nothing() -> None:
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    from pagelocks.vllm import register

    register()
    before = {name: AttentionBackendEnum[name].get_path() for name in ("CUSTOM", "CPU_ATTN", "CPU_MLA", "AMX_MLA")}
    register()
    assert before == {name: f"pagelocks.vllm.entry.{name}" for name in before}
