"""The two attention operators of SGLang's ``intel_amx`` backend, in plain fp32 torch.

Sliding windows count keys, the query's own included; 0 means none.
"""

from __future__ import annotations

import torch
from torch import Tensor

_DECODE = (
    "decode_attention_cpu(Tensor query, Tensor(b!) k_cache, Tensor(c!) v_cache, "
    "float k_scale, float v_scale, Tensor(a!) output, Tensor? key, Tensor? value, "
    "Tensor loc, Tensor attn_logits, Tensor req_to_token, Tensor req_pool_indices, "
    "Tensor seq_lens, float sm_scale, float logit_cap, bool is_cross_attn, "
    "int sliding_window, Tensor? encoder_lens, Tensor? sinks) -> ()"
)
_EXTEND = (
    "extend_attention_cpu(Tensor q_extend, Tensor? k_extend, Tensor? v_extend, "
    "Tensor(a!) o_extend, Tensor k_buffer, Tensor v_buffer, float k_scale, "
    "float v_scale, Tensor req_to_token, Tensor req_pool_indices, Tensor seq_lens, "
    "Tensor extend_seq_lens, Tensor extend_start_loc, int max_len_extend, "
    "float sm_scale, float logit_cap, bool is_cross_attn, int sliding_window, "
    "Tensor? encoder_lens, Tensor? sinks, Tensor? tree_mask, bool is_causal) -> ()"
)
_LIBRARY = torch.library.Library("sgl_kernel", "FRAGMENT")


def register() -> None:
    """Declare and define ``torch.ops.sgl_kernel.{decode,extend}_attention_cpu``."""
    for schema, function in ((_DECODE, _decode), (_EXTEND, _extend)):
        _LIBRARY.define(schema)
        _LIBRARY.impl(schema.partition("(")[0], function, "CPU")


def _decode(
    query: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k_scale: float,
    v_scale: float,
    output: Tensor,
    key: Tensor | None,
    value: Tensor | None,
    loc: Tensor,
    attn_logits: Tensor,
    req_to_token: Tensor,
    req_pool_indices: Tensor,
    seq_lens: Tensor,
    sm_scale: float,
    logit_cap: float,
    is_cross_attn: bool,
    sliding_window: int,
    encoder_lens: Tensor | None,
    sinks: Tensor | None,
) -> None:
    """Attend with one query per request.

    Args:
        query: [requests, heads, width].
        k_cache: [slots, kv_heads, width]; gets ``key`` at ``loc`` first.
        v_cache: [slots, kv_heads, value width]; gets ``value`` at ``loc`` first.
        k_scale, v_scale: scales of a quantised cache; only 1 is supported.
        output: [requests, heads, value width], written.
        key: [requests, kv_heads, width] or None if already in the cache.
        value: the same for values.
        loc: [requests], slots of ``key`` and ``value``.
        attn_logits: work space of the real kernel, unused.
        req_to_token: [rows, positions], slots.
        req_pool_indices: [requests], rows of ``req_to_token``.
        seq_lens: [requests], keys that each query sees.
        sm_scale: factor on the scores.
        logit_cap: soft cap on the scores, 0 for none.
        is_cross_attn: unsupported.
        sliding_window: keys in the window, 0 for all.
        encoder_lens: unsupported.
        sinks: [heads] or None; an extra score that takes weight and adds nothing.

    Raises:
        NotImplementedError: cross attention, scaled cache.
    """
    _supported(is_cross_attn, encoder_lens, k_scale, v_scale)
    if key is not None and value is not None:
        k_cache[loc] = key.view(-1, *k_cache.shape[1:]).to(k_cache.dtype)
        v_cache[loc] = value.view(-1, *v_cache.shape[1:]).to(v_cache.dtype)
    requests = zip(req_pool_indices.tolist(), seq_lens.tolist(), strict=True)
    for i, (row, length) in enumerate(requests):
        slots = req_to_token[row, :length].long()
        visible = torch.ones(1, length, dtype=torch.bool)
        if sliding_window > 0:
            visible[:, : max(0, length - sliding_window)] = False
        output[i : i + 1] = attend(
            query[i : i + 1],
            k_cache[slots],
            v_cache[slots],
            visible,
            sm_scale,
            logit_cap,
            sinks,
        ).to(output.dtype)


def _extend(
    q_extend: Tensor,
    k_extend: Tensor | None,
    v_extend: Tensor | None,
    o_extend: Tensor,
    k_buffer: Tensor,
    v_buffer: Tensor,
    k_scale: float,
    v_scale: float,
    req_to_token: Tensor,
    req_pool_indices: Tensor,
    seq_lens: Tensor,
    extend_seq_lens: Tensor,
    extend_start_loc: Tensor,
    max_len_extend: int,
    sm_scale: float,
    logit_cap: float,
    is_cross_attn: bool,
    sliding_window: int,
    encoder_lens: Tensor | None,
    sinks: Tensor | None,
    tree_mask: Tensor | None,
    is_causal: bool,
) -> None:
    """Attend with the last ``extend_seq_lens`` tokens of each request.

    The buffers already hold the keys and values of those tokens. ``seq_lens``
    counts prefix and new tokens; ``tree_mask`` is flat, one [new, new] block per
    request, and replaces causality among the new tokens. The rest is as in
    ``_decode``.
    """
    _supported(is_cross_attn, encoder_lens, k_scale, v_scale)
    at = 0
    for row, length, new, start in zip(
        req_pool_indices.tolist(),
        seq_lens.tolist(),
        extend_seq_lens.tolist(),
        extend_start_loc.tolist(),
        strict=True,
    ):
        slots = req_to_token[row, :length].long()
        query_at = torch.arange(length - new, length).unsqueeze(1)
        key_at = torch.arange(length).unsqueeze(0)
        visible = torch.ones(new, length, dtype=torch.bool)
        if tree_mask is not None:
            block = tree_mask.view(-1)[at : at + new * new]
            visible[:, length - new :] = block.view(new, new)
            at += new * new
        elif is_causal:
            visible &= key_at <= query_at
        if sliding_window > 0:
            visible &= key_at > query_at - sliding_window
        o_extend[start : start + new] = attend(
            q_extend[start : start + new],
            k_buffer[slots],
            v_buffer[slots],
            visible,
            sm_scale,
            logit_cap,
            sinks,
        ).to(o_extend.dtype)


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    visible: Tensor,
    scale: float,
    cap: float,
    sinks: Tensor | None,
) -> Tensor:
    """Softmax attention: [m, heads, width] over [n, kv_heads, width], in fp32."""
    group = query.shape[1] // key.shape[1]
    key = key.float().repeat_interleave(group, dim=1)
    value = value.float().repeat_interleave(group, dim=1)
    score = torch.einsum("mhd,nhd->hmn", query.float(), key) * scale
    if cap > 0:
        score = cap * torch.tanh(score / cap)
    score = score.masked_fill(~visible, float("-inf"))
    if sinks is not None:
        sink = sinks.float().view(-1, 1, 1).expand(-1, score.shape[1], 1)
        score = torch.cat([score, sink], -1)
    weight = torch.softmax(score, -1)[..., : key.shape[0]]
    return torch.einsum("hmn,nhd->mhd", weight, value)


def _supported(
    cross: bool, encoder_lens: Tensor | None, k_scale: float, v_scale: float
) -> None:
    if cross or encoder_lens is not None:
        raise NotImplementedError("cross attention")
    if k_scale != 1.0 or v_scale != 1.0:
        raise NotImplementedError("scaled KV cache")
