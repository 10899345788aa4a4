"""The attention and the mask that Transformers calls for `attn_implementation="locks"`."""

from __future__ import annotations

import threading
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention.bias import causal_lower_right
from torch.nn.functional import scaled_dot_product_attention

from ..config import reject
from .session import SeenMask, Session, session_of

_ONE_AT_A_TIME = threading.Lock()
"""Threads that generate with one model share its session, whose rows' keys are compared with the step's in any case."""


MASKLESS = {"cuda"}
"""Devices whose kernels leave the future out without reading a mask."""


def register() -> None:
    """Make "locks" a known attention implementation; done when `pagelocks.hf` is imported, and harmless again."""
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register("locks", locks_attention)
    AttentionMaskInterface.register("locks", locks_mask)


def locks_mask(*, q_length: int, allow_is_causal_skip: bool = True, **kwargs: Any) -> Tensor | None:
    """bool (batch, 1, q_length, kv_length), SDPA's, or None for a causal prompt without padding.

    For single tokens it is never left out: a cache may be longer than what it holds.
    """
    from transformers.masking_utils import sdpa_mask

    skip = allow_is_causal_skip and q_length > 1
    mask: Tensor | None = sdpa_mask(q_length=q_length, allow_is_causal_skip=skip, **kwargs)
    return mask


def locks_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Dense attention for several tokens and for layers with a sliding window, else LOCKS: rows of one length together.

    Parameters
    ----------
    query : (batch, kv_heads * G, n, head_dim);  key, value : (batch, kv_heads, tokens, head_dim)
    attention_mask : bool (batch, 1, n, tokens), or None
    scaling : float

    Returns
    -------
    (batch, n, kv_heads * G, head_dim), None

    Raises
    ------
    ValueError
        For what LOCKS would silently do wrong: soft caps, attention sinks, biases, dropout, rows with holes.
    """
    _refuse(module, dropout, kwargs)
    if _window(module, kwargs):
        return _dense(module, query, key, value, attention_mask, scaling, kwargs), None
    session, layer = session_of(module), int(module.layer_idx)  # type: ignore[arg-type]
    scale = query.shape[-1] ** -0.5 if scaling is None else float(scaling)
    grouped = torch.unflatten(query, 1, (key.shape[1], -1))  # (batch, kv_heads, G, n, head_dim)
    with _ONE_AT_A_TIME:
        spans, causal = _look(session, layer, attention_mask, query.shape[0], key.shape[2], query.shape[2])
        attended = _attend(session, layer, grouped, key, value, spans, scale)
    whole = tuple(range(query.shape[0]))
    if len(attended) == 1 and attended[0][0] == whole:
        return attended[0][1].unsqueeze(1), None
    if causal:
        dense = causal_attention(query, key, value, scale)
    else:
        dense = _dense(module, query, key, value, attention_mask, scaling, kwargs)
    for rows, output in attended:
        dense[rows[0] : rows[-1] + 1, 0] = output
    return dense, None


def _attend(
    session: Session,
    layer: int,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    spans: list[tuple[int, int]],
    scale: float,
) -> list[tuple[tuple[int, ...], Tensor]]:
    """Rows that were sparse, with their (rows, heads, head_dim); query is (batch, kv_heads, G, n, head_dim)."""
    steps = query.shape[3]
    if spans[0][1] - spans[0][0] <= steps:
        session.begin(layer)
    whole = tuple(range(len(spans)))
    attended: list[tuple[tuple[int, ...], Tensor]] = []
    for rows in [whole] if len(set(spans)) == 1 else [(row,) for row in whole]:
        first, last = spans[rows[0]]
        if last == first:  # padding alone
            continue
        keys, values = (x[rows[0] : rows[-1] + 1, :, first:last] for x in (key, value))
        queries = query[rows[0] : rows[-1] + 1]
        if steps == 1:
            output = session.attend(layer, rows, queries[..., 0, :], keys, values, scale)
            if output is not None:
                attended.append((rows, output.flatten(1, 2)))
        else:  # tokens ahead of the rows' first are padding
            session.observe(layer, queries[..., max(0, steps - (last - first)) :, :], keys, scale)
    return attended


def causal_attention(query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
    """The last n tokens' dense attention to all, on a GPU without a mask in memory, which takes several times as long.

    Parameters
    ----------
    query : (batch, kv_heads * G, n, head_dim);  key, value : (batch, kv_heads, tokens, head_dim)

    Returns
    -------
    (batch, n, kv_heads * G, head_dim)
    """
    group = query.shape[1] // key.shape[1]
    key, value = (x.repeat_interleave(group, 1) if group > 1 else x for x in (key, value))
    bias = causal_lower_right(query.shape[2], key.shape[2])
    return scaled_dot_product_attention(query, key, value, bias, scale=scale).transpose(1, 2).contiguous()


def _dense(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    scaling: float | None,
    kwargs: dict[str, Any],
) -> Tensor:
    """(batch, n, heads, head_dim)."""
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    output: Tensor = sdpa_attention_forward(module, query, key, value, mask, scaling=scaling, **kwargs)[0]
    return output


def _look(
    session: Session, layer: int, mask: Tensor | None, rows: int, length: int, steps: int
) -> tuple[list[tuple[int, int]], bool]:
    """`SeenMask.spans` and `causal`.  A mask's numbers are waited for, so it is asked once for all layers of a pass."""
    seen, sizes = session.mask_seen, (rows, length, steps)
    if seen is None or seen.mask is not mask or layer <= seen.layer or seen.sizes != sizes:
        spans, causal = _tokens(mask, rows, length, steps), _is_causal(mask, length, steps)
    else:
        spans, causal = seen.spans, seen.causal
    session.mask_seen = None if mask is None else SeenMask(mask, layer, sizes, spans, causal)
    return spans, causal


def _is_causal(mask: Tensor | None, length: int, steps: int) -> bool:
    if mask is None or steps == 1 or mask.device.type not in MASKLESS:
        return False
    past = torch.ones(steps, length, dtype=torch.bool, device=mask.device).tril(length - steps)
    return bool((mask == past).all())


def _tokens(mask: Tensor | None, rows: int, length: int, steps: int) -> list[tuple[int, int]]:
    """Each row's own tokens, (first, one after the last), of those that the last token of the step may attend."""
    if mask is None:  # several tokens are then a whole prompt, though a static cache has room for more
        return [(0, length if steps == 1 else steps)] * rows
    if mask.dtype != torch.bool:
        remedy = "Pass attention_mask as (batch, tokens) of 0 and 1, as tokenizers give it."
        raise reject("attention_mask.dtype", mask.dtype, "LOCKS takes a mask, not a bias", remedy)
    if mask.shape[1] != 1 or mask.shape[0] not in (1, rows):
        allowed = f"({rows}, 1, n, tokens): one mask for all heads"
        raise reject("attention_mask.shape", tuple(mask.shape), allowed, "Pass attention_mask as (batch, tokens).")
    seen = mask[:, 0, -1].int().expand(rows, -1)
    counts, firsts = seen.sum(-1).tolist(), seen.argmax(-1).tolist()
    lasts = (length - seen.flip(-1).argmax(-1)).tolist()
    spans = []
    for count, first, last in zip(counts, firsts, lasts, strict=True):
        if count and last - first != count:
            found = f"{last - first - count} of a row's tokens masked out in between"
            raise reject("attention_mask", found, "a row's tokens must lie together", "Pad on the left.")
        spans.append((first, last) if count else (0, 0))
    return spans


def _window(module: nn.Module, kwargs: dict[str, Any]) -> bool:
    return (kwargs.get("sliding_window") or getattr(module, "sliding_window", None)) is not None


def _refuse(module: nn.Module, dropout: float, kwargs: dict[str, Any]) -> None:
    for name in ("softcap", "s_aux", "position_bias", "head_mask"):
        if kwargs.get(name) is not None:
            raise reject(name, type(kwargs[name]).__name__, "LOCKS has no such term", 'Use attn_implementation="sdpa".')
    if dropout:
        raise reject("dropout", dropout, "LOCKS is for inference", "Call model.eval().")
    if not getattr(module, "is_causal", True):
        remedy = 'Use attn_implementation="sdpa".'
        raise reject("is_causal", False, "LOCKS is for causal self-attention", remedy)
    if getattr(module, "layer_idx", None) is None:
        raise reject("layer_idx", None, "LOCKS must know its layer", "Use a decoder model of Transformers.")
