"""How many rows a comparison can afford."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch

from spec_export.judge.inputs import Inputs

FEWEST_POSITIONS = 16


def fitting(
    inputs: Inputs,
    seconds: float,
    forward: Callable[[Inputs], Any],
    device: torch.device,
    *,
    full: float,
    few: float = 0,
    together: bool = False,
) -> Inputs:
    """As many rows as fit into the time, judged by a short forward, or two.

    Args:
        inputs: The rows asked for.
        seconds: What the whole comparison may take, this measurement included.
        forward: Runs rows through the training side.
        device: Where it runs.
        full: Forwards of all rows that the comparison needs.
        few: Forwards of few rows that it needs besides.
        together: All ranks of a collective forward must agree: rank 0's clock counts.
    """
    low, high = FEWEST_POSITIONS, 4 * FEWEST_POSITIONS
    if len(inputs) <= high:
        return inputs

    def measured(count: int) -> float:
        start = time.perf_counter()
        forward(inputs.first(count))
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        took = time.perf_counter() - start
        if not together:
            return took
        agreed = torch.tensor([took], device=device, dtype=torch.float64)
        torch.distributed.broadcast(agreed, 0)
        return float(agreed)

    least = measured(low)
    left = seconds - least
    # Were it all in proportion to the rows: a part of each forward is not.
    if full * least * len(inputs) / low + few * least <= left:
        return inputs
    if device.type == "cuda":  # the first one paid for caches
        least = measured(low)
        left -= least
    left -= (full + few) * least
    rows = low
    if left > least:  # otherwise a longer look costs more than it tells
        more = measured(high)
        per_row = max(more - least, 1e-9) / (high - low)
        rows = int(low + max(left - more, 0.0) / full / per_row)
        rows = max(min(rows, len(inputs)), low)
    return inputs.first(rows)
