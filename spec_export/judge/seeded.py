"""Random numbers that are the same bits on every machine and torch version."""

from __future__ import annotations

import hashlib

import torch

_GOLDEN = -7046029254386353131  # 0x9E3779B97F4A7C15 as int64
_MIX = (-4658895280553007687, -7723592293110705685)  # splitmix64's two multipliers


def _shift_right(x: torch.Tensor, bits: int) -> torch.Tensor:
    """Logical shift: torch's shift of int64 keeps the sign."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def uniform(count: int, seed: int) -> torch.Tensor:
    """``count`` float32 numbers in [0, 1): splitmix64 of seed and index, 24 bits."""
    x = torch.arange(1, count + 1) * _GOLDEN + seed * 1_000_003
    x = (x ^ _shift_right(x, 30)) * _MIX[0]
    x = (x ^ _shift_right(x, 27)) * _MIX[1]
    x = x ^ _shift_right(x, 31)
    return _shift_right(x, 40).float() / 2**24


def digest(tensor: torch.Tensor) -> str:
    """SHA-256 of the raw bytes of a tensor."""
    raw = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    return hashlib.sha256(raw.numpy().data).hexdigest()
