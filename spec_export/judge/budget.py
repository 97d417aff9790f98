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
    together: bool = False,
) -> Inputs:
    """As many rows as one forward can do in the time, judged by two short ones.

    Args:
        inputs: The rows asked for.
        seconds: What one forward may take.
        forward: Runs rows through the training side.
        device: Where it runs.
        together: All ranks of a collective forward must agree: rank 0 decides.
    """
    few, more = FEWEST_POSITIONS, 4 * FEWEST_POSITIONS
    if len(inputs) <= more:
        return inputs
    forward(inputs.first(few))  # the first one pays for caches
    times = []
    for count in (few, more):
        start = time.perf_counter()
        forward(inputs.first(count))
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        times.append(time.perf_counter() - start)
    per_row = max(times[1] - times[0], 1e-9) / (more - few)
    rows = int(few + max(seconds - times[0], 0.0) / per_row)
    rows = max(min(rows, len(inputs)), few)
    if together:
        agreed = torch.tensor([rows], device=device)
        torch.distributed.broadcast(agreed, 0)
        rows = int(agreed)
    return inputs.first(rows)
