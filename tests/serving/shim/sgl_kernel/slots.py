"""Bookkeeping of KV-cache slots.

SGLang keeps one row of slot numbers per request, ``req_to_token[request, position]``;
keys and values of that position lie in those slots of each layer's buffers.
Argument names are SGLang's, which passes some of them by name.
"""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor


def assign_req_to_token_pool_cpu(
    req_pool_indices: Tensor,
    req_to_token: Tensor,
    start_offset: Tensor,
    end_offset: Tensor,
    out_cache_loc: Tensor,
    pool_len: int,
) -> None:
    """Write newly allocated slots into the rows of their requests.

    Args:
        req_pool_indices: [requests], rows of ``req_to_token``.
        req_to_token: [rows, pool_len], written at ``start:end`` of each request.
        start_offset: [requests], first position, inclusive.
        end_offset: [requests], last position, exclusive.
        out_cache_loc: [sum of end - start], the slots, request after request.
        pool_len: Row length; the tensor's own shape says it here.
    """
    at = 0
    for row, start, end in _rows(req_pool_indices, start_offset, end_offset):
        slots = out_cache_loc[at : at + end - start]
        req_to_token[row, start:end] = slots.to(req_to_token.dtype)
        at += end - start


def assign_extend_cache_locs_cpu(
    req_pool_indices: Tensor,
    req_to_token: Tensor,
    start_offset: Tensor,
    end_offset: Tensor,
    out_cache_loc: Tensor,
    pool_len: int,
) -> None:
    """Gather the slots of ``start:end`` of each request; arguments as above.

    ``out_cache_loc`` [sum of end - start] is written.
    """
    at = 0
    for row, start, end in _rows(req_pool_indices, start_offset, end_offset):
        slots = req_to_token[row, start:end]
        out_cache_loc[at : at + end - start] = slots.to(out_cache_loc.dtype)
        at += end - start


def assign_draft_cache_locs_contiguous_cpu(
    req_pool_indices: Tensor,
    req_to_token: Tensor,
    seq_lens: Tensor,
    out_cache_loc: Tensor,
    pool_len: int,
    topk: int,
    num_steps: int,
) -> None:
    """Gather the slots that lie behind each committed prefix, for drafting.

    Args:
        req_pool_indices: [requests].
        req_to_token: [rows, pool_len].
        seq_lens: [requests], committed tokens of each request.
        out_cache_loc: [requests * topk * num_steps], written.
        pool_len: Row length; the tensor's own shape says it here.
        topk: Branches of the draft tree.
        num_steps: Draft steps per branch.
    """
    count = topk * num_steps
    out = out_cache_loc.view(-1, count)
    for i, (row, length) in enumerate(_rows(req_pool_indices, seq_lens)):
        out[i] = req_to_token[row, length : length + count].to(out.dtype)


def build_draft_decode_metadata_cpu(
    req_to_token: Tensor,
    req_pool_indices: Tensor,
    seq_lens: Tensor,
    topk: int,
    num_steps: int,
    pool_len: int,
) -> Tensor:
    """Make one row of slots per branch: the prefix, then that branch's own slots.

    Returns:
        [requests * topk, pool_len]; entries behind prefix + num_steps mean nothing.
    """
    rows = []
    for row, length in _rows(req_pool_indices, seq_lens):
        for branch in range(topk):
            slots = req_to_token[row].clone()
            own = length + branch * num_steps
            slots[length : length + num_steps] = req_to_token[
                row, own : own + num_steps
            ]
            rows.append(slots)
    return torch.stack(rows)


def fill_accept_out_cache_loc_cpu(
    accept_index: Tensor, out_cache_loc: Tensor, accept_out_cache_loc: Tensor
) -> None:
    """Compact the slots of the accepted tokens.

    Args:
        accept_index: [requests, steps + 1], flat indices into ``out_cache_loc``;
            -1 where a token was not accepted.
        out_cache_loc: [draft tokens], slots.
        accept_out_cache_loc: [at least the accepted ones], its start is written.
    """
    index = accept_index.reshape(-1).long()
    kept = out_cache_loc[index[index > -1]]
    accept_out_cache_loc[: kept.numel()] = kept


def copy_all_layer_kv_cache_cpu(
    data_ptrs: Tensor, strides: Tensor, tgt_loc: Tensor, src_loc: Tensor
) -> None:
    """Copy slots ``src_loc`` onto ``tgt_loc`` in every key and value buffer.

    Args:
        data_ptrs: [buffers], addresses.
        strides: [buffers], bytes per slot.
        tgt_loc: [slots].
        src_loc: [slots]; may overlap ``tgt_loc``, so all are read before any write.
    """
    sources, targets = src_loc.tolist(), tgt_loc.tolist()
    for base, stride in _rows(data_ptrs, strides):
        held = [ctypes.string_at(base + slot * stride, stride) for slot in sources]
        for slot, row in zip(targets, held, strict=True):
            ctypes.memmove(base + slot * stride, row, stride)


def _rows(*columns: Tensor) -> list[tuple[int, ...]]:
    """Zip integer vectors of equal length into tuples of Python numbers."""
    return list(zip(*(column.tolist() for column in columns), strict=True))
