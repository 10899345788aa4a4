"""The support matrix: what works is run, what is refused is refused at start-up, by name and with the remedy."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any
from unittest.mock import PropertyMock, patch

import pytest
from harness import ChildError, counters_of, engine, in_child, in_new_child, layers_of

from pagelocks.vllm.options import Options
from pagelocks.vllm.support import REFUSALS, TESTED_VLLM, Unsupported, refuse_engine, refuse_layer, refuse_version

engines = pytest.mark.engine


def tokens_of(llm: Any, lengths: tuple[int, ...] = (100, 333, 700)) -> list[list[int]]:
    """Eight greedy tokens for random prompts of these lengths, generated together."""
    from vllm import SamplingParams

    source = random.Random(0)
    prompts = [{"prompt_token_ids": [source.randrange(3, 512) for _ in range(length)]} for length in lengths]
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, detokenize=False)
    return [list(output.outputs[0].token_ids) for output in llm.generate(prompts, params, use_tqdm=False)]


def run(model: str, locks: dict[str, Any] | None, options: dict[str, Any]) -> Any:
    """Tokens, counters and LOCKS layers of an engine."""
    llm = engine(model, locks, **options)
    tokens = tokens_of(llm)
    return tokens, None if locks is None else counters_of(llm), list(layers_of(llm))


def message_of(model: str, locks: dict[str, Any], **options: Any) -> str:
    """The error that an engine refuses to start with."""
    with pytest.raises(ChildError) as caught:
        in_child(run, model, locks, options)
    return caught.value.message


# Works


@engines
@pytest.mark.parametrize(
    "options",
    [
        pytest.param({}, id="bf16"),
        pytest.param({"dtype": "float16"}, id="fp16"),
        pytest.param({"max_num_batched_tokens": 64, "max_num_seqs": 8, "block_size": 32}, id="chunked prefill"),
        pytest.param({"block_size": 64}, id="blocks of 64"),
    ],
)
def test_a_covering_budget_gives_stock_tokens(tiny_llama: str, options: dict[str, Any]) -> None:
    """The same schedule with and without LOCKS, every page listed: the same greedy tokens."""
    stock, _, none = in_child(run, tiny_llama, None, options)
    locks, counters, layers = in_child(run, tiny_llama, {"budget": 1024}, options)
    assert none == [] and len(layers) == 2
    assert counters["rows_sparse"] >= 21 and counters["pages_skipped"] == 0
    assert locks == stock


def run_async(model: str, asynchronous: bool) -> Any:
    """vLLM's CPU platform switches async scheduling off; switch it on again after it did."""
    from vllm.platforms.cpu import CpuPlatform

    check = CpuPlatform.check_and_update_config.__func__  # type: ignore[attr-defined]

    def checked(platform: Any, config: Any) -> None:
        check(platform, config)
        config.scheduler_config.async_scheduling = asynchronous

    with patch.object(CpuPlatform, "check_and_update_config", classmethod(checked)):
        llm = engine(model, {"budget": 64}, async_scheduling=True)
    scheduler = type(llm.llm_engine.engine_core.engine_core.scheduler).__name__
    return scheduler, tokens_of(llm), counters_of(llm)


@engines
def test_async_scheduling(tiny_llama: str) -> None:
    (name, tokens, counters), (stock_name, *stock) = (in_child(run_async, tiny_llama, on) for on in (True, False))
    assert (name, stock_name) == ("AsyncScheduler", "Scheduler")
    assert [tokens, counters] == stock and counters["pages_skipped"] > 0


@engines
def test_hybrid_models_work_in_one_group(tiny_gemma3: str) -> None:
    """Only full layers run LOCKS; with every page listed the tokens are stock vLLM's."""
    options = {"disable_hybrid_kv_cache_manager": True}
    stock, _, _ = in_child(run, tiny_gemma3, None, options)
    locks, counters, layers = in_child(run, tiny_gemma3, {"budget": 1024}, options)
    assert locks == stock
    assert layers == ["model.layers.1.self_attn.attn", "model.layers.3.self_attn.attn"]
    _, counters, _ = in_child(run, tiny_gemma3, {"budget": 64}, options)
    assert counters["rows_sparse"] == 21 and counters["pages_skipped"] > 0


@engines
def test_hybrid_models_are_refused_where_summaries_would_lie_apart(tiny_gemma3: str) -> None:
    message = message_of(tiny_gemma3, {"budget": 64})
    assert "KV-cache groups" in message and "padded to" in message and "--disable-hybrid-kv-cache-manager" in message


def run_renamed(model: str, locks: dict[str, Any] | None, share: bool) -> Any:
    """A model whose layers are called "locks.blocks", and whose second layer shares the first one's K and V."""
    from vllm.model_executor.models import llama

    attention = llama.Attention

    def renamed(*args: Any, prefix: str, **options: Any) -> Any:
        if share and ".1." in prefix:
            options["kv_sharing_target_layer_name"] = "locks.blocks.0.self_attn.attn"
        return attention(*args, prefix=prefix.replace("model.layers", "locks.blocks"), **options)

    with patch.object(llama, "Attention", renamed):
        llm = engine(model, locks)
    layers = layers_of(llm)
    tokens = tokens_of(llm)
    caches = {name: id(layer.impl.summaries) for name, layer in layers.items()}
    return tokens, locks is not None and counters_of(llm), caches


@engines
def test_layers_are_told_apart_whatever_their_names(tiny_llama: str) -> None:
    """Names with "locks" and "blocks" in them fool nothing; each layer has summaries of its own."""
    stock, *_ = in_child(run_renamed, tiny_llama, None, False)
    locks, _, _ = in_child(run_renamed, tiny_llama, {"budget": 1024}, False)
    assert locks == stock
    _, counters, caches = in_child(run_renamed, tiny_llama, {"budget": 64}, False)
    assert list(caches) == ["locks.blocks.0.self_attn.attn", "locks.blocks.1.self_attn.attn"]
    assert len(set(caches.values())) == 2 and counters["pages_skipped"] > 0
    assert counters["summaries_built"] == 2 * 2 * sum((n + 7) // 16 for n in (100, 333, 700))


@engines
def test_layers_that_share_k_and_v_stop_the_start(tiny_llama: str) -> None:
    """Stock vLLM runs the same model."""
    assert len(in_child(run_renamed, tiny_llama, None, True)[0]) == 3
    with pytest.raises(ChildError) as caught:
        in_child(run_renamed, tiny_llama, {"budget": 64}, True)
    assert "layers that share K and V" in caught.value.message


# Refused


def config_of(model: str, **options: Any) -> Any:
    from vllm.engine.arg_utils import EngineArgs

    return EngineArgs(model, skip_tokenizer_init=True, **options).create_engine_config()


CHANGES = {
    "a quantised KV cache": ("cache_config", "cache_dtype", "fp8"),
    "speculative decoding": ("", "speculative_config", object()),
    "LoRA": ("", "lora_config", object()),
    "tensor parallelism": ("parallel_config", "tensor_parallel_size", 2),
    "pipeline parallelism": ("parallel_config", "pipeline_parallel_size", 2),
    "context parallelism": ("parallel_config", "decode_context_parallel_size", 2),
    "data parallelism": ("parallel_config", "data_parallel_size", 2),
    "dual-batch overlap": ("parallel_config", "enable_dbo", True),
    "KV connectors": ("", "kv_transfer_config", object()),
    "sleep mode": ("model_config", "enable_sleep_mode", True),
    "MLA": ("model_config", "use_mla", True),
    "reference sliding windows (R-SWA)": ("model_config", "rswa_window", 64),
    "bidirectional prefixes": ("attention_config", "use_non_causal", True),
    "KV-sharing fast prefill": ("cache_config", "kv_sharing_fast_prefill", True),
}


def refusals(model: str) -> dict[str, str]:
    """Each feature's message on a real configuration that uses it, and "" for the configuration alone."""
    config = config_of(model)
    refuse_engine(config)
    messages = {}
    for feature, (part, name, value) in CHANGES.items():
        owner = getattr(config, part) if part else config
        if isinstance(getattr(type(owner), name, None), property):
            change: Any = patch.object(type(owner), name, new_callable=PropertyMock, return_value=value)
        else:
            change = patch.object(owner, name, value)
        with change:
            try:
                refuse_engine(config)
            except Unsupported as error:
                messages[feature] = str(error)
    return messages


def test_every_refused_feature_is_refused_by_name(tiny_llama: str) -> None:
    messages = in_child(refusals, tiny_llama)
    assert set(CHANGES) == {refusal.feature for refusal in REFUSALS}
    for refusal in REFUSALS:
        assert messages[refusal.feature] == (
            f"LOCKS does not support {refusal.feature}: {refusal.reason}. {refusal.remedy}."
        )


@pytest.mark.parametrize(
    ("argument", "value", "name"),
    [
        ("attn_type", "encoder_only", "encoder-only attention"),
        ("attn_type", "encoder_decoder", "encoder-decoder attention"),
        ("attn_type", "encoder", "encoder attention"),
        ("alibi_slopes", [0.5, 0.25], "ALiBi"),
        ("logits_soft_cap", 30.0, "logit softcapping"),
        ("sinks", [0.0], "attention sinks"),
        ("kv_cache_dtype", "fp8", "a quantised KV cache"),
    ],
)
def test_what_a_layer_may_ask_is_refused_by_name(argument: str, value: Any, name: str) -> None:
    plain: dict[str, Any] = {
        "attn_type": "decoder",
        "alibi_slopes": None,
        "logits_soft_cap": None,
        "sinks": None,
        "kv_cache_dtype": "auto",
    }
    refuse_layer(**plain)
    with pytest.raises(Unsupported, match=name):
        refuse_layer(**{**plain, argument: value})


@engines
def test_an_fp8_cache_stops_the_start(tiny_llama: str) -> None:
    message = message_of(tiny_llama, {"budget": 64}, kv_cache_dtype="fp8")
    assert "a quantised KV cache" in message and "Remove --kv-cache-dtype" in message


FLAGS = {
    "backend_per_kind": {"attention_config": {"backend_per_kind": {"full_attention": "CUSTOM"}}},
    "LoRA": {"enable_lora": True},
    "KV connectors": {"kv_offloading_size": 1.0},
    "speculative decoding": {
        "speculative_config": {"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_max": 3}
    },
}


def messages(model: str) -> dict[str, str]:
    """How an engine with each of `FLAGS` fails to start."""
    found = {}
    for feature, options in FLAGS.items():
        try:
            engine(model, {"budget": 64}, **options)
        except Exception as error:
            found[feature] = str(error)
    return found


@engines
def test_vllms_own_flags_stop_the_start(tiny_llama: str) -> None:
    """In a process of their own: what some of them import stays."""
    found = in_new_child(messages, tiny_llama)
    assert list(found) == list(FLAGS)
    assert all(feature in message for feature, message in found.items()), found


@engines
def test_softcapping_stops_the_start(tmp_path: Path) -> None:
    from transformers import Gemma2Config

    Gemma2Config(
        vocab_size=512,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        layer_types=["full_attention"] * 2,
        architectures=["Gemma2ForCausalLM"],
        dtype="bfloat16",
    ).save_pretrained(tmp_path)
    message = message_of(str(tmp_path), {"budget": 64}, load_format="dummy")
    assert "logit softcapping" in message


@engines
def test_mla_stops_the_start(tmp_path: Path) -> None:
    from transformers import DeepseekV2Config

    DeepseekV2Config(
        vocab_size=512,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        n_routed_experts=4,
        first_k_dense_replace=2,
        kv_lora_rank=512,
        q_lora_rank=None,
        qk_rope_head_dim=64,
        qk_nope_head_dim=128,
        v_head_dim=128,
        architectures=["DeepseekV2ForCausalLM"],
        dtype="bfloat16",
    ).save_pretrained(tmp_path)
    message = message_of(str(tmp_path), {"budget": 64}, load_format="dummy", max_model_len=1024)
    assert "LOCKS does not support MLA" in message


@engines
def test_a_model_with_sliding_layers_only_stops_the_start(tiny_gemma3: str, tmp_path: Path) -> None:
    config = json.loads((Path(tiny_gemma3) / "config.json").read_text())
    config["layer_types"] = ["sliding_attention"] * 4
    (tmp_path / "config.json").write_text(json.dumps(config))
    message = message_of(str(tmp_path), {"budget": 64}, load_format="dummy")
    assert "no layer of it has full attention" in message


@engines
@pytest.mark.parametrize(
    ("locks", "parts"),
    [
        ({"bugdet": 64}, ("'bugdet'", "budget, rank", "Correct or remove it")),
        ({"budget": 100}, ("budget=100", "a multiple of page_size = 16", "Use 112")),
        ({"rank": 16}, ("rank=16", "1 to page_size - 1 = 15", "Use 8")),
    ],
)
def test_bad_options_stop_the_start(tiny_llama: str, locks: dict[str, Any], parts: tuple[str, ...]) -> None:
    message = message_of(tiny_llama, locks)
    assert all(part in message for part in parts), message


def test_bad_options_are_named() -> None:
    for given, part in (
        ([], "an object of options"),
        ({"page_size": 32}, "whatever the block size"),
        ({"selector": "best"}, "one of locks"),
        ({"trace": 1}, "the path of a file"),
        ({"allow_untested_vllm": "yes"}, "true or false"),
    ):
        with pytest.raises(ValueError, match=part):
            Options.parse(given)
    assert Options.parse({"page_size": 16, "rank": 4}).config.rank == 4


def test_an_untested_vllm_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    import vllm

    refuse_version(False)
    monkeypatch.setattr(vllm, "__version__", "0.99.1")
    with pytest.raises(Unsupported, match=r"vLLM 0\.99\.1.*" + TESTED_VLLM[0]):
        refuse_version(False)
    refuse_version(True)


def started(model: str) -> list[str]:
    """What LOCKS logs when an engine starts, and then while it works."""
    import logging

    from pagelocks.vllm import state

    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("vllm.plugins.pagelocks")
    logger.addHandler(handler)
    level = logger.level
    logger.setLevel(logging.INFO)
    llm = engine(model, {"budget": 128, "dense_below": 40}, num_gpu_blocks_override=48)
    with patch.object(state, "LOG_INTERVAL_S", 0.0):
        tokens_of(llm, (300, 20))
    logger.removeHandler(handler)
    logger.setLevel(level)
    lines.append(str(sum(layer.impl.summaries.kv_cache.numel() for layer in layers_of(llm).values())))
    return lines


@engines
def test_the_start_is_logged(tiny_llama: str) -> None:
    """Budget in tokens and pages, what is always kept, dense_below, bytes a page, memory for summaries; counters."""
    line, *progress, held = in_child(started, tiny_llama)
    for part in (
        "2 layers",
        "budget 128 tokens = 8 pages of 16 a KV head",
        "1 sink and 1 recent pages always kept",
        "dense_below 40 tokens",
        "a summary of 352 bytes beside 2048 bytes of K and V a page (17.2%)",
        f"{int(held) / 2**20:.1f} MiB for summaries",
    ):
        assert part in line, (part, line)
    assert int(held) == 2 * 48 * 2 * 8 * 352
    # The line comes while a step is planned: seven of the eight steps are counted, six of them after the prefill.
    assert "LOCKS: 7 steps, rows 6 sparse and 8 dense, pages 192 read and " in progress[-1], progress[-1]
