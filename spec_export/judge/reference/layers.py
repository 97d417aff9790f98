"""Layers of SGLang that its draft classes share."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F


class Layers:
    """Linear layers and norms over loaded weights.

    Attributes:
        config: The resolved configuration; ``eps`` is that of the norms.
        weights: By SGLang's parameter names; a part of a merged one as ``name[part]``.
        dtype: Dtype of the computation.
    """

    config: Any
    weights: dict[str, torch.Tensor]
    dtype: torch.dtype

    def _weight(self, name: str) -> torch.Tensor:
        return self.weights[name].to(self.dtype)

    def _linear(self, x: torch.Tensor, name: str, part: str = "") -> torch.Tensor:
        suffix = f"[{part}]" if part else ""
        bias = f"{name}.bias{suffix}"
        return F.linear(
            x,
            self._weight(f"{name}.weight{suffix}"),
            self._weight(bias) if bias in self.weights else None,
        )

    def _norm(self, x: torch.Tensor, name: str) -> torch.Tensor:
        """RMSNorm in float32, the weight before the cast back."""
        y = x.float()
        y = y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + self.config.eps)
        return (y * self._weight(f"{name}.weight")).to(self.dtype)
