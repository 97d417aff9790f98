"""Attention in its two forms: as training unrolls it and as a server runs it."""

from __future__ import annotations

from typing import Protocol

import torch
import torch.nn.functional as F


class Windowed(Protocol):
    """Knows how far back each layer sees."""

    def window_of(self, layer: int) -> int | None:
        """Largest distance of a visible key in a layer; None: all."""


class TeacherKeys:
    """Step-0 keys for all later rows of a document, later keys for the row alone."""

    def __init__(self, model: Windowed, document_ids: torch.Tensor) -> None:
        self.model, self.documents = model, document_ids
        self.held: dict[int, list[tuple[torch.Tensor, torch.Tensor]]] = {}

    def attend(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
    ) -> torch.Tensor:
        """q [T, heads, d], k and v [T, kv heads, d] of one step -> [T, heads * d]."""
        group = q.shape[1] // k.shape[1]
        k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
        held = self.held.setdefault(layer, [])
        held.append((k, v))
        (k0, v0), own = held[0], held[1:]
        scores = torch.einsum("qhd,khd->hqk", q, k0).float()
        row = torch.arange(q.shape[0], device=q.device)
        distance = row[:, None] - row
        window = self.model.window_of(layer)
        unseen = (distance < 0) | (self.documents[:, None] != self.documents)
        if window is not None:
            unseen |= distance > window
        scores = scores.masked_fill(unseen, float("-inf"))
        ones = [torch.einsum("qhd,qhd->hq", q, kj).float()[..., None] for kj, _ in own]
        weights = torch.cat([scores, *ones], -1) * q.shape[-1] ** -0.5
        weights = weights.softmax(-1).to(v.dtype)
        out = torch.einsum("hqk,khd->qhd", weights[..., : q.shape[0]], v0)
        for j, (_, vj) in enumerate(own):
            out = out + weights[..., q.shape[0] + j].T[..., None] * vj
        return out.flatten(1)


class ServerKeys:
    """The key/value cache of one request: the prefix, then one row per draft step."""

    def __init__(self, model: Windowed, positions: torch.Tensor) -> None:
        self.model, self.positions = model, positions
        self.key_positions = positions
        self.held: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def advance(self) -> None:
        """The next call brings one row, one position further."""
        self.positions = self.positions[-1:] + 1
        self.key_positions = torch.cat([self.key_positions, self.positions])

    def attend(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
    ) -> torch.Tensor:
        """q [n, heads, d], k and v [n, kv heads, d] of new rows -> [n, heads * d]."""
        if layer in self.held:
            k = torch.cat([self.held[layer][0], k])
            v = torch.cat([self.held[layer][1], v])
        self.held[layer] = (k, v)
        heads_per_key = q.shape[1] // k.shape[1]
        distance = self.positions[:, None] - self.key_positions
        visible = distance >= 0
        window = self.model.window_of(layer)
        if window is not None:
            visible &= distance <= window
        out = F.scaled_dot_product_attention(
            q.transpose(0, 1),
            k.repeat_interleave(heads_per_key, 1).transpose(0, 1),
            v.repeat_interleave(heads_per_key, 1).transpose(0, 1),
            attn_mask=visible,
        )
        return out.transpose(0, 1).flatten(1)
