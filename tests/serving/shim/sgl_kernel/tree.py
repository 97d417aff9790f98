"""Trees of draft tokens: building, verifying, and the tokens they yield.

A tree has ``draft_token_num`` nodes. Node 0 is the last committed token, the
others are drafts in the order of ``selected_index``. Argument names, the
spelling "retrive" included, are SGLang's, which passes some of them by name.
"""

from __future__ import annotations

import torch
from torch import Tensor

_FULL_MASK, _DRAFTS_ONLY = 0, 1  # members of SGLang's TreeMaskMode


def build_tree_kernel_efficient_cpu(
    parent_list: Tensor,
    selected_index: Tensor,
    verified_seq_len: Tensor,
    tree_mask: Tensor,
    positions: Tensor,
    retrive_index: Tensor,
    retrive_next_token: Tensor,
    retrive_next_sibling: Tensor,
    topk: int,
    depth: int,
    draft_token_num: int,
    tree_mask_mode: int,
) -> None:
    """Link the chosen drafts of each request into a tree.

    Args:
        parent_list: [requests, groups]; the parent, as a flat draft index, of each
            group of ``topk`` drafts. Group 0 hangs on node 0.
        selected_index: [requests, draft_token_num - 1], flat draft indices.
        verified_seq_len: [requests], committed tokens.
        tree_mask: flat bool, written: row of a node = the nodes that it sees, with
            the committed prefix before them in full-mask mode.
        positions: [requests * draft_token_num], written: position of each node.
        retrive_index: [requests, draft_token_num], written: flat node numbers.
        retrive_next_token: same shape, written: first child or -1.
        retrive_next_sibling: same shape, written: next sibling or -1.
        topk: Drafts per group.
        depth: Draft steps; the parents imply it.
        draft_token_num: Nodes per request.
        tree_mask_mode: 0 full mask, 1 drafts only.

    Raises:
        NotImplementedError: for the bit-packed mask, which no CPU path asks for.
    """
    nodes, mode = draft_token_num, int(tree_mask_mode)
    if mode not in (_FULL_MASK, _DRAFTS_ONLY):
        raise NotImplementedError("bit-packed tree mask")
    mask, at = tree_mask.view(-1), 0
    for request, length in enumerate(verified_seq_len.tolist()):
        parents = _parents(
            selected_index[request].tolist(), parent_list[request].tolist(), topk
        )
        first_child, sibling = _links(parents)
        for node in range(nodes):
            seen = _ancestors(node, parents)
            positions.view(-1, nodes)[request, node] = length + len(seen)
            row = torch.zeros(nodes, dtype=torch.bool)
            row[[0, *seen]] = True
            if mode == _FULL_MASK:
                start = at + (length + nodes) * node + length
            else:
                start = (request * nodes + node) * nodes
            mask[start : start + nodes] = row
        at += (length + nodes) * nodes
        flat = torch.arange(nodes) + request * nodes
        retrive_index[request] = flat.to(retrive_index.dtype)
        retrive_next_token[request] = torch.tensor(first_child).to(
            retrive_next_token.dtype
        )
        retrive_next_sibling[request] = torch.tensor(sibling).to(
            retrive_next_sibling.dtype
        )


def _parents(chosen: list[int], parent_list: list[int], topk: int) -> list[int]:
    """Parent node of each node; -1 for node 0, len(nodes) where it was not chosen."""
    node_of = {flat: i + 1 for i, flat in reversed(list(enumerate(chosen)))}
    parents = [-1]
    for flat in chosen:
        group = flat // topk
        missing = len(chosen) + 1
        parents.append(0 if group == 0 else node_of.get(parent_list[group], missing))
    return parents


def _links(parents: list[int]) -> tuple[list[int], list[int]]:
    """First child and next sibling of each node (-1: none), in node order."""
    nodes = len(parents)
    first_child, sibling = [-1] * nodes, [-1] * nodes
    for node in range(nodes - 1, 0, -1):
        parent = parents[node]
        if parent < nodes:
            sibling[node], first_child[parent] = first_child[parent], node
    return first_child, sibling


def _ancestors(node: int, parents: list[int]) -> list[int]:
    """The node and its ancestors, without node 0."""
    seen = []
    while 0 < node < len(parents):
        seen.append(node)
        node = parents[node]
    return seen


def verify_tree_greedy_cpu(
    predicts: Tensor,
    accept_index: Tensor,
    accept_token_num: Tensor,
    candidates: Tensor,
    retrive_index: Tensor,
    retrive_next_token: Tensor,
    retrive_next_sibling: Tensor,
    target_predict: Tensor,
) -> None:
    """Walk each tree from its root along the drafts that the target would emit.

    Args:
        predicts: flat, written at the visited nodes: the token behind each.
        accept_index: [requests, steps + 1], written: flat numbers of the visited nodes.
        accept_token_num: [requests], written: accepted drafts.
        candidates: [requests, nodes], token of each node.
        retrive_index: [requests, nodes], flat node numbers.
        retrive_next_token: [requests, nodes], first child or -1.
        retrive_next_sibling: [requests, nodes], next sibling or -1.
        target_predict: [requests, nodes], the target's greedy token behind each node.
    """
    wanted = target_predict.reshape(-1)
    for request in range(candidates.shape[0]):
        node, flat, count = 0, int(retrive_index[request, 0]), 0
        accept_index[request, 0] = flat
        for _ in range(1, accept_index.shape[1]):
            want = int(wanted[flat])
            node = int(retrive_next_token[request, node])
            while node != -1 and int(candidates[request, node]) != want:
                node = int(retrive_next_sibling[request, node])
            if node == -1:
                break
            predicts[flat] = want
            flat = int(retrive_index[request, node])
            count += 1
            accept_index[request, count] = flat
        accept_token_num[request] = count
        predicts[flat] = int(wanted[flat])


def fill_bonus_tokens_cpu(
    accept_tokens: Tensor, accept_lens: Tensor, bonus_tokens: Tensor, accept_stride: int
) -> None:
    """Take the last accepted token of each request.

    Args:
        accept_tokens: [requests, accept_stride].
        accept_lens: [requests], accepted tokens, the bonus token counted.
        bonus_tokens: [at least requests], its start is written.
        accept_stride: Row length of ``accept_tokens``.
    """
    count = accept_lens.numel()
    last = torch.arange(count) * accept_stride + accept_lens.long() - 1
    tokens = accept_tokens.reshape(-1)[last]
    bonus_tokens[:count] = tokens.to(bonus_tokens.dtype)


def rotate_input_ids_cpu(
    input_ids: Tensor,
    extend_start_loc: Tensor,
    extend_seq_lens: Tensor,
    topk_index: Tensor,
    select_index: Tensor | None = None,
) -> None:
    """Shift each request's tokens left by one and put its new token at the end.

    Args:
        input_ids: [tokens], written in place.
        extend_start_loc: [requests], where each request starts.
        extend_seq_lens: [requests], tokens of each request.
        topk_index: [requests], the new tokens.
        select_index: [requests] or None; where to put the new token instead.
    """
    new = topk_index.reshape(-1)
    for request in range(extend_seq_lens.numel()):
        start, count = int(extend_start_loc[request]), int(extend_seq_lens[request])
        if count <= 0:
            continue
        end = start + count - 1
        input_ids[start:end] = input_ids[start + 1 : end + 1].clone()
        input_ids[end if select_index is None else int(select_index[request])] = new[
            request
        ]
