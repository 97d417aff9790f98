"""Strict loading of one tensor-parallel rank, with SGLang's own parallel layers.

Runs in SGLang's Python. The layers are told their rank and the number of ranks, as
SGLang 0.5.23 spells it; no second process is there, and no forward runs. Prints one
JSON object: what a rank finds when its slices landed, and when another rank's did.
"""

from __future__ import annotations

import hashlib
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from runtime import plain_args, print_answer, start
from sglang.srt.layers import linear

from spec_export.artifact.manifest import Manifest, Serving, TensorEntry
from spec_export.serving import strict

RANKS, H, D = 2, 32, 8
PARTS = {
    **{f"{p}_proj": ("qkv", p) for p in "qkv"},
    "gate_proj": ("gate_up", 0),
    "up_proj": ("gate_up", 1),
}


class Rank(torch.nn.Module):
    """The sharded layers of a draft on one rank: 4 heads, 1 key/value head."""

    def __init__(self, rank: int, folder: Path, dtype: torch.dtype) -> None:
        super().__init__()
        self.config = SimpleNamespace(_name_or_path=str(folder))
        group = linear._LogicalGroup(rank_in_group=rank, world_size=RANKS)
        linear._resolve_linear_group = lambda name: group
        how: dict[str, Any] = {"bias": True, "params_dtype": dtype}
        self.qkv = linear.QKVParallelLinear(H, D, 4, 1, **how)
        self.gate_up = linear.MergedColumnParallelLinear(H, [48, 48], **how)
        self.o_proj = linear.RowParallelLinear(H, H, **how)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        parameters = dict(self.named_parameters())
        for name, value in weights:
            layer, kind = name.split(".")
            fused, part = PARTS.get(layer, (layer, None))
            parameter = parameters[f"{fused}.{kind}"]
            parts = [] if part is None else [part]
            parameter.weight_loader(parameter, value, *parts)


def make_tensors() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    rows = {"q_proj": 32, "k_proj": 8, "v_proj": 8, "o_proj": 32}
    rows |= {"gate_proj": 48, "up_proj": 48}
    out = {f"{name}.weight": torch.randn(n, H) for name, n in rows.items()}
    return out | {f"{name}.bias": torch.randn(n) for name, n in rows.items()}


def write_manifest(folder: Path, tensors: dict[str, torch.Tensor]) -> None:
    serving = {"min_version": "0.5.12", "max_known_version": "0.5.23", "launch": []}
    serving |= {"algorithm": "EAGLE3", "architecture": "", "requires_plugin": True}
    entries = {
        name: TensorEntry(
            role=None,
            source=[name],
            dtype="F32",
            shape=list(value.shape),
            sha256=hashlib.sha256(value.numpy().tobytes()).hexdigest(),
        )
        for name, value in tensors.items()
    }
    held = Serving.model_validate(serving)
    Manifest(run_id="run", status="final", serving=held, tensors=entries).write(folder)


def found(rank: int, folder: Path, dtype: torch.dtype, wrong: bool) -> list[str]:
    """What rank ``rank`` finds; ``wrong``: it was loaded with another rank's slices."""
    model, tensors = Rank(rank, folder, dtype), make_tensors()

    def load(weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        model.load_weights(weights)
        if wrong:
            other = Rank(1 - rank, folder, dtype)
            other.load_weights(tensors.items())
            for mine, theirs in zip(
                model.parameters(), other.parameters(), strict=True
            ):
                mine.data.copy_(theirs.data)

    try:
        strict.load_weights(model, load, tensors.items())
    except strict.DraftRefused as problem:
        return sorted(f"{f.code} {f.subject}" for f in problem.findings)
    return []


def main(target: str) -> dict[str, Any]:
    start(plain_args(target))
    folder = Path(tempfile.mkdtemp())
    write_manifest(folder, make_tensors())
    right = {
        f"rank {rank}, {str(dtype).removeprefix('torch.')}": found(
            rank, folder, dtype, False
        )
        for rank in range(RANKS)
        for dtype in (torch.float32, torch.bfloat16)
    }
    return {"right": right, "wrong": found(0, folder, torch.float32, True)}


if __name__ == "__main__":
    print_answer(lambda: main(sys.argv[1]))
