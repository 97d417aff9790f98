"""Rotary embeddings as SGLang's ``layers/rotary_embedding`` computes them."""

from __future__ import annotations

import math
from typing import Any, Protocol

import torch

from spec_export.judge.reference.serving_config import (
    ReferenceUnsupported,
    ServingError,
)


class Rotary(Protocol):
    """What a serving configuration says about positions."""

    @property
    def rope(self) -> dict[str, Any]:
        """Effective RoPE dictionary, ``rope_theta`` and ``rope_type`` included."""

    @property
    def rotary_dim(self) -> int:
        """Channels that are rotated."""

    @property
    def head_dim(self) -> int:
        """Channels of a head."""

    @property
    def neox(self) -> bool:
        """Whether halves are rotated, not pairs."""

    @property
    def max_position(self) -> int:
        """Length of the context."""


def _inverse_frequencies(base: float, dim: int) -> torch.Tensor:
    return 1.0 / (base ** (torch.arange(0, dim, 2, dtype=torch.float) / dim))


def _llama3(
    rope: dict[str, Any], base: float, dim: int, original: float
) -> torch.Tensor:
    frequencies = _inverse_frequencies(base, dim)
    factor = rope.get("factor", 1.0)
    low, high = rope.get("low_freq_factor", 1.0), rope.get("high_freq_factor", 4.0)
    wave = 2 * math.pi / frequencies
    smooth: torch.Tensor | float = 0.0
    if low != high:
        smooth = (original / wave - low) / (high - low)
    mixed = (1 - smooth) * frequencies / factor + smooth * frequencies
    slow = torch.where(wave > original / low, frequencies / factor, mixed)
    return torch.where(wave < original / high, frequencies, slow)


def _yarn(
    rope: dict[str, Any], base: float, dim: int, original: float
) -> tuple[torch.Tensor, float]:
    """Frequencies and the factor on cos and sin (``attention_factor`` is not read)."""
    factor = rope.get("factor", 1.0)

    def magnitude(weight: float = 1.0) -> float:
        return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

    m, m_all = rope.get("mscale"), rope.get("mscale_all_dim")
    scale = magnitude()
    if m is not None and m_all is not None:
        scale = magnitude(m) / magnitude(m_all)
    scale *= rope.get("attn_factor", 1)

    def correction(rotations: float) -> float:
        period = original / (rotations * 2 * math.pi)
        return dim * math.log(period) / (2 * math.log(base))

    low = correction(rope.get("beta_fast", 32))
    high = correction(rope.get("beta_slow", 1))
    if rope.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    if low == high:
        high += 0.001
    ramp = (torch.arange(dim // 2, dtype=torch.float) - low) / (high - low)
    ramp = ramp.clamp(0, 1)
    keep = (1 - ramp) * rope.get("extrapolation_factor", 1)
    plain = _inverse_frequencies(base, dim)
    return plain / factor * (1 - keep) + plain * keep, float(scale)


class Rope:
    """cos/sin tables of one configuration.

    Raises:
        ServingError: SGLang would raise.
        ReferenceUnsupported: a type that the reference does not compute.
    """

    def __init__(self, config: Rotary) -> None:
        rope, dim = config.rope, config.rotary_dim
        kind, base = rope["rope_type"], float(rope["rope_theta"])
        original = rope.get("original_max_position_embeddings", config.max_position)
        if not 0 < dim <= config.head_dim or dim % 2:
            raise ServingError(f"{dim} of {config.head_dim} channels cannot be rotated")
        self.dim, self.neox = dim, config.neox
        self.scale, self.stretch = 1.0, 1.0
        if kind == "default":
            self.frequencies = _inverse_frequencies(base, dim)
        elif kind == "linear":
            factor = rope.get("factor", 1.0)
            if not isinstance(factor, float):
                raise ServingError(
                    f"rope factor {factor!r} of type linear must be a float: TypeError"
                )
            self.frequencies, self.stretch = _inverse_frequencies(base, dim), factor
        elif kind == "dynamic":
            factor = rope.get("factor", 1.0)
            grow = rope.get("alpha", factor * factor - (factor - 1))
            base *= grow ** (dim / (dim - 2))
            self.frequencies = _inverse_frequencies(base, dim)
        elif kind == "llama3":
            self.frequencies = _llama3(rope, base, dim, original)
        elif kind == "yarn":
            self.frequencies, self.scale = _yarn(rope, base, dim, original)
        elif kind in ("deepseek_yarn", "longrope", "proportional"):
            raise ReferenceUnsupported(f"rope type {kind!r} is not computed here")
        else:
            raise ServingError(f"Unknown RoPE scaling type {kind}")

    def table(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosines and sines, each [T, rotary_dim / 2] float32, for positions [T]."""
        frequencies = self.frequencies.to(positions.device)
        angles = (positions.float() / self.stretch)[:, None] * frequencies
        return angles.cos() * self.scale, angles.sin() * self.scale

    def apply(
        self, x: torch.Tensor, table: tuple[torch.Tensor, torch.Tensor]
    ) -> torch.Tensor:
        """Rotate the first ``rotary_dim`` channels of x [T, heads, head_dim]."""
        cos, sin = (t[:, None] for t in table)
        turned, rest = x[..., : self.dim].float(), x[..., self.dim :]
        if self.neox:
            a, b = turned.chunk(2, dim=-1)
            out = torch.cat([a * cos - b * sin, b * cos + a * sin], -1)
        else:
            a, b = turned[..., ::2], turned[..., 1::2]
            out = torch.stack([a * cos - b * sin, b * cos + a * sin], -1).flatten(-2)
        return torch.cat([out.to(x.dtype), rest], -1)
