"""Hold the ``sgl_kernel`` stand-in against SGLang's own Triton kernels.

Runs in SGLang's environment with ``shim/`` on ``PYTHONPATH``. Triton's
interpreter executes the kernels of the installed SGLang on the CPU; every
function of the stand-in must give the same result on the same random input.
After that each function is replaced by one that does nothing, and its check has
to fail. The last line of the output is a JSON object with what was compared.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import dataclass

os.environ["TRITON_INTERPRET"] = "1"
os.environ["SGLANG_USE_CPU_ENGINE"] = "1"

import sgl_kernel
import torch
from sglang.kernels.ops.attention.decode_attention import (
    decode_attention_fwd,
)
from sglang.kernels.ops.attention.extend_attention import (
    extend_attention_fwd,
)
from sglang.kernels.ops.kvcache import cache_move
from sglang.kernels.ops.speculative import (
    cache_locs,
    eagle,
    multi_layer_eagle,
    spec_tree,
)
from sglang.srt.mem_cache import allocation
from sglang.srt.speculative.eagle_utils import organize_draft_results
from sglang.srt.utils import next_power_of_2
from torch import Tensor

ROWS, POOL_LEN = 5, 64  # request rows of a slot table and their length


def pick(low: int, high: int) -> int:
    """One random integer in [low, high)."""
    return int(torch.randint(low, high, ()))


def same(what: str, ours: Tensor, theirs: Tensor, tolerance: float = 0.0) -> None:
    """Fail unless both tensors agree: exactly, or within a largest difference."""
    if tolerance:
        equal = bool((ours - theirs).abs().max() <= tolerance)
    else:
        equal = torch.equal(ours, theirs)
    if not equal:
        raise AssertionError(f"{what}: {ours.tolist()} is not {theirs.tolist()}")


def random_drafts(batch: int, topk: int, steps: int, nodes: int) -> tuple[Tensor, ...]:
    """Drafts as EAGLE's beam search leaves them: parents, selection, tokens.

    Scores fall along each path, as cumulative probabilities do.
    """
    score = torch.rand(batch, topk).sort(1, descending=True).values
    scores = [score[:, None]]
    tokens = [torch.randint(0, 9, (batch, topk))]
    parents = [torch.arange(-1, topk).repeat(batch, 1)]
    for step in range(1, steps):
        grown = score[:, :, None] * torch.rand(batch, topk, topk)
        best = grown.flatten(1).topk(topk, -1)
        scores.append(grown)
        tokens.append(torch.randint(0, 9, (batch, topk * topk)))
        parents.append(best.indices + topk**2 * (step - 1) + topk)
        score = best.values
    return tuple(organize_draft_results(scores, tokens, parents, nodes))


def check_trees() -> None:
    """Build random trees in both mask modes and verify them with random targets."""
    batch, topk, steps = pick(1, 4), pick(1, 5), pick(1, 5)
    nodes = steps + 1
    if topk > 1:
        nodes = pick(2, min(topk + (steps - 1) * topk * topk, 12) + 2)
    parents, selected, drafts = random_drafts(batch, topk, steps, nodes)
    lengths = torch.randint(1, 9, (batch,))
    for mode in (0, 1):
        cells = batch * nodes * nodes + (int(lengths.sum()) * nodes if mode == 0 else 0)
        built = []
        for build in (
            sgl_kernel.build_tree_kernel_efficient_cpu,
            spec_tree.sgl_build_tree_kernel_triton,
        ):
            out = [
                torch.ones(cells, dtype=torch.bool),
                torch.zeros(batch * nodes, dtype=torch.long),
                *(torch.full((batch, nodes), -1) for _ in range(3)),
            ]
            mask_mode = spec_tree.TreeMaskMode(mode)
            build(
                parents, selected, lengths, *out, topk, steps, nodes, mask_mode
            )  # fmt: skip
            built.append(out)
        for name, ours, theirs in zip(
            ("mask", "positions", "index", "child", "sibling"), *built, strict=True
        ):
            same(f"tree {name}", ours, theirs)
    index, child, sibling = built[1][2:]
    candidates = torch.cat([torch.randint(0, 9, (batch, 1)), drafts], 1).long()
    for friendly in (False, True):
        target = torch.randint(0, 9, (batch, nodes))
        if friendly:  # the target wants each node's first child: long acceptances
            follow = candidates.gather(1, child.clamp(min=0))
            target = torch.where(child >= 0, follow, target)
        _check_verify(candidates, index, child, sibling, target, steps)


def _check_verify(
    candidates: Tensor,
    index: Tensor,
    child: Tensor,
    sibling: Tensor,
    target: Tensor,
    steps: int,
) -> None:
    batch, nodes = candidates.shape
    results = []
    for verify, word in (
        (sgl_kernel.verify_tree_greedy_cpu, "retrive"),
        (spec_tree.verify_tree_greedy_triton, "retrieve"),
    ):
        predicts = torch.zeros(batch * nodes, dtype=torch.int32)
        accepted = torch.full((batch, steps + 1), -1, dtype=torch.int32)
        count = torch.zeros(batch, dtype=torch.int32)
        verify(
            predicts=predicts,
            accept_index=accepted,
            accept_token_num=count,
            candidates=candidates,
            target_predict=target,
            **{
                f"{word}_index": index,
                f"{word}_next_token": child,
                f"{word}_next_sibling": sibling,
            },
        )
        results.append((predicts, accepted, count))
    for name, ours, theirs in zip(
        ("predicts", "index", "count"), *results, strict=True
    ):
        same(f"verified {name}", ours, theirs)


def check_tokens() -> None:
    """The bonus token, the slots of accepted tokens, the shifted input ids."""
    batch, width = pick(1, 4), pick(2, 6)
    tokens = torch.randint(1, 99, (batch, width), dtype=torch.int32)
    lengths = torch.randint(1, width + 1, (batch,), dtype=torch.int32)
    ours, theirs = (torch.zeros(batch, dtype=torch.int32) for _ in range(2))
    sgl_kernel.fill_bonus_tokens_cpu(tokens, lengths, ours, width)
    eagle.fill_bonus_tokens[(batch,)](tokens, lengths, theirs, width)
    same("bonus tokens", ours, theirs)

    index = torch.randperm(batch * width).view(batch, width).int()
    index[torch.rand(batch, width) < 0.4] = -1
    index[0, 0] = 0
    slots = torch.randperm(99)[: batch * width] + 1
    ours, theirs = (torch.zeros(index.numel(), dtype=torch.long) for _ in range(2))
    sgl_kernel.fill_accept_out_cache_loc_cpu(index, slots, ours)
    eagle.fill_accept_out_cache_loc[(index.numel(),)](
        index, slots, theirs, next_power_of_2(index.numel())
    )
    same("accepted slots", ours, theirs)

    counts = torch.randint(1, 6, (batch,))
    starts = torch.cumsum(counts, 0) - counts
    ours = torch.randint(0, 99, (int(counts.sum()),))
    theirs, new = ours.clone(), torch.randint(100, 200, (batch,))
    sgl_kernel.rotate_input_ids_cpu(ours, starts, counts, new)
    multi_layer_eagle.rotate_input_ids_kernel[(batch,)](
        theirs, starts, counts, new, None, BLOCK_SIZE=8
    )
    same("rotated ids", ours, theirs)


def check_slots() -> None:
    """Reading and writing rows of the slot table."""
    batch, topk, steps = pick(1, 4), pick(1, 4), pick(2, 5)
    table = torch.randint(1, 999, (ROWS, POOL_LEN), dtype=torch.int32)
    rows, lengths = torch.randperm(ROWS)[:batch], torch.randint(1, 9, (batch,))
    ends = lengths + torch.randint(1, 6, (batch,))
    total, upper = int((ends - lengths).sum()), next_power_of_2(batch)

    new = torch.randint(1000, 1999, (total,))
    ours, theirs = table.clone(), table.clone()
    sgl_kernel.assign_req_to_token_pool_cpu(rows, ours, lengths, ends, new, POOL_LEN)
    allocation.assign_req_to_token_pool[(batch,)](
        rows, theirs, lengths, ends, new, POOL_LEN, upper
    )
    same("slots written", ours, theirs)

    ours, theirs = (torch.zeros(total, dtype=torch.long) for _ in range(2))
    sgl_kernel.assign_extend_cache_locs_cpu(rows, table, lengths, ends, ours, POOL_LEN)
    cache_locs.assign_extend_cache_locs[(batch,)](
        rows, table, lengths, ends, theirs, POOL_LEN, upper
    )
    same("slots to extend", ours, theirs)

    ours, theirs = (
        torch.zeros(batch * topk * steps, dtype=torch.long) for _ in range(2)
    )
    sgl_kernel.assign_draft_cache_locs_contiguous_cpu(
        rows, table, lengths, ours, POOL_LEN, topk, steps
    )
    cache_locs.assign_draft_cache_locs_contiguous[(batch,)](
        rows, table, lengths, theirs, POOL_LEN, topk, steps
    )
    same("slots to draft", ours, theirs)
    _check_branches(table, rows, lengths, topk, steps)


def _check_branches(
    table: Tensor, rows: Tensor, lengths: Tensor, topk: int, steps: int
) -> None:
    """One row of slots per branch, against the index lists of the GPU backends."""
    batch = rows.numel()
    ours = sgl_kernel.build_draft_decode_metadata_cpu(
        table, rows, lengths, topk, steps, POOL_LEN
    )
    theirs = torch.zeros(steps, batch * topk * POOL_LEN, dtype=torch.int32)
    pointers = torch.zeros(steps, batch * topk + 1, dtype=torch.int32)
    cache_locs.generate_draft_decode_kv_indices[(steps, batch, topk)](
        rows,
        table,
        lengths,
        theirs,
        pointers,
        lengths.repeat_interleave(topk),
        POOL_LEN,
        theirs.stride(0),
        pointers.stride(0),
        next_power_of_2(batch),
        next_power_of_2(steps),
        next_power_of_2(batch * topk),
        1,
    )
    for step in range(steps):
        seen = (lengths + step + 1).repeat_interleave(topk).tolist()
        flat = torch.cat([row[:n] for row, n in zip(ours, seen, strict=True)])
        same(f"branch slots at step {step}", flat, theirs[step, : flat.numel()])


def check_copy() -> None:
    """Copying slots inside key and value buffers, with overlap."""
    first, second = torch.rand(12, 3, 4), torch.rand(12, 2, 4)
    target, source = torch.randperm(12)[:5], torch.randperm(12)[:5]
    held = []
    for ours in (True, False):
        buffers = [first.clone(), second.clone()]
        addresses = torch.tensor([b.data_ptr() for b in buffers], dtype=torch.uint64)
        strides = torch.tensor([b[0].numel() * b.element_size() for b in buffers])
        if ours:
            sgl_kernel.copy_all_layer_kv_cache_cpu(addresses, strides, target, source)
        else:
            cache_move.copy_all_layer_kv_cache_tiled[(2, 1)](
                addresses, strides, target, source, 5, 8, BYTES_PER_TILE=64
            )
        held.append(buffers)
    for i, (ours_buffer, theirs_buffer) in enumerate(zip(*held, strict=True)):
        same(f"copied buffer {i}", ours_buffer, theirs_buffer)


@dataclass(frozen=True)
class Cache:
    """Random keys and values of two requests, in scattered slots.

    ``slots`` holds the slots of each request, the first ``prefix`` of them its past.
    """

    table: Tensor
    rows: Tensor
    lengths: Tensor
    new: Tensor
    slots: list[Tensor]
    keys: Tensor
    values: Tensor

    @property
    def prefix(self) -> Tensor:
        return self.lengths - self.new


HEADS, KV_HEADS, WIDTH = 4, 2, 16
SCALE = WIDTH**-0.5
ROUNDING = 2e-6  # both sides work in fp32, on values of about one


def random_cache() -> Cache:
    """Slots of ``req_to_token`` are a permutation, as after a while in a server."""
    table = (torch.randperm(ROWS * POOL_LEN) + 1).view(ROWS, POOL_LEN).int()
    rows, lengths = torch.randperm(ROWS)[:2], torch.randint(6, 12, (2,))
    slots = [table[r, :n].long() for r, n in zip(rows, lengths, strict=True)]
    buffers = torch.randn(2, ROWS * POOL_LEN + 1, KV_HEADS, WIDTH)
    new = torch.randint(2, 5, (2,))
    return Cache(table, rows, lengths, new, slots, *buffers.unbind(0))


def ends(lengths: Tensor) -> Tensor:
    """Start of each segment and the end of the last one, int32."""
    return torch.cat([lengths.new_zeros(1), lengths.cumsum(0)]).int()


def check_extend_attention() -> None:
    """Causal, with a sliding window, with a token tree; grouped-query heads."""
    cache = random_cache()
    new, prefix = cache.new, cache.prefix
    query = torch.randn(int(new.sum()), HEADS, WIDTH)
    pairs = list(zip(cache.slots, prefix.tolist(), strict=True))
    past = torch.cat([slots[:n] for slots, n in pairs])
    fresh = torch.cat([slots[n:] for slots, n in pairs])
    tree = [torch.rand(n, n).tril().gt(0.6) | torch.eye(n).bool() for n in new]
    # The Triton kernel's mask has columns for the prefix too.
    wide = [
        torch.cat([torch.ones(len(block), n, dtype=torch.bool), block], 1).flatten()
        for block, (_, n) in zip(tree, pairs, strict=True)
    ]
    flat, wide_flat = torch.cat([b.flatten() for b in tree]), torch.cat(wide)
    wide_ends = ends(torch.tensor([len(block) for block in wide]))
    for window, mask in ((0, None), (3, None), (0, flat)):
        ours, theirs = torch.zeros_like(query), torch.zeros_like(query)
        torch.ops.sgl_kernel.extend_attention_cpu(
            *(query, None, None, ours, cache.keys, cache.values, 1.0, 1.0),
            *(cache.table, cache.rows, cache.lengths, new, new.cumsum(0) - new),
            *(int(new.max()), SCALE, 0.0, False, window, None, None, mask, True),
        )
        extend_attention_fwd(
            *(query, cache.keys[fresh], cache.values[fresh], theirs),
            *(cache.keys, cache.values, ends(new), ends(prefix), past),
            *(None if mask is None else wide_flat, True, wide_ends),
            *(int(new.max()), 1.0, 1.0, SCALE),
            sliding_window_size=window - 1 if window else -1,  # keys to the left
        )
        what = f"extend attention, window {window}, tree {mask is not None}"
        same(what, ours, theirs, ROUNDING)


def check_decode_attention() -> None:
    """One query per request, all keys and a sliding window of them."""
    cache = random_cache()
    query, splits = torch.randn(2, HEADS, WIDTH), 2
    for window in (0, 4):
        ours, theirs = torch.zeros_like(query), torch.zeros_like(query)
        work = torch.zeros(2, HEADS, splits, WIDTH)
        torch.ops.sgl_kernel.decode_attention_cpu(
            *(query, cache.keys, cache.values, 1.0, 1.0, ours, None, None),
            *(cache.rows, work, cache.table, cache.rows, cache.lengths),
            *(SCALE, 0.0, False, window, None, None),
        )
        # The Triton kernel is given the slots that the window leaves.
        seen = [slots[-window:] for slots in cache.slots]
        decode_attention_fwd(
            *(query, cache.keys, cache.values, theirs),
            *(ends(torch.tensor([len(s) for s in seen])), torch.cat(seen), work),
            *(torch.zeros(2, HEADS, splits), torch.full((2,), splits), splits),
            *(SCALE, 1.0, 1.0),
        )
        same(f"decode attention, window {window}", ours, theirs, ROUNDING)


def _nothing(*args: object, **kwargs: object) -> None:
    return None


def _bare_rows(
    table: Tensor, rows: Tensor, lengths: Tensor, topk: int, *rest: object
) -> Tensor:
    return table[rows.repeat_interleave(topk)]


def _no_output(query: Tensor, *rest: object) -> Tensor:
    return torch.zeros_like(query)


# Each check, how often it runs, and what has to matter to it: the name of a function
# and what takes its place, which does as little as possible.
Idle = Callable[..., Tensor | None]
CHECKS: list[tuple[Callable[[], None], int, dict[str, Idle]]] = [
    (
        check_trees,
        30,
        {
            "build_tree_kernel_efficient_cpu": _nothing,
            "verify_tree_greedy_cpu": _nothing,
        },
    ),
    (
        check_tokens,
        10,
        {
            "fill_bonus_tokens_cpu": _nothing,
            "fill_accept_out_cache_loc_cpu": _nothing,
            "rotate_input_ids_cpu": _nothing,
        },
    ),
    (
        check_slots,
        10,
        {
            "assign_req_to_token_pool_cpu": _nothing,
            "assign_extend_cache_locs_cpu": _nothing,
            "assign_draft_cache_locs_contiguous_cpu": _nothing,
            "build_draft_decode_metadata_cpu": _bare_rows,
        },
    ),
    (check_copy, 10, {"copy_all_layer_kv_cache_cpu": _nothing}),
    (check_extend_attention, 3, {"attention.attend": _no_output}),
    (check_decode_attention, 3, {"attention.attend": _no_output}),
]


def notices(check: Callable[[], None], name: str, idle: Idle) -> bool:
    """Whether a check fails once a function of the stand-in does nothing.

    A few tries: there are trees in which nothing can be accepted, for example.
    """
    module = sgl_kernel.attention if name.startswith("attention.") else sgl_kernel
    attribute = name.rpartition(".")[2]
    real = getattr(module, attribute)
    setattr(module, attribute, idle)
    try:
        for _ in range(5):
            check()
    except AssertionError:
        return True
    finally:
        setattr(module, attribute, real)
    return False


def main() -> None:
    """Run every check, then every negative control; print a JSON summary."""
    torch.manual_seed(0)
    checked: set[str] = set()
    for check, trials, parts in CHECKS:
        for _ in range(trials):
            check()
        for name, idle in parts.items():
            if not notices(check, name, idle):
                raise AssertionError(f"{name} could do nothing and nobody noticed")
        checked |= parts.keys()
    if missed := set(sgl_kernel.__all__) - checked:
        raise AssertionError(f"no check for {sorted(missed)}")
    runs = {check.__name__: trials for check, trials, _ in CHECKS}
    print(json.dumps({"checks": runs, "functions": sorted(checked)}))


if __name__ == "__main__":
    main()
