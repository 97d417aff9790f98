"""Rows of a comparison: random by seed, or recorded from a training batch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from spec_export.judge.seeded import uniform

# Recorded features travel with the export: <= 8 MB for the whole probe.
RECORDED_BYTES = 7_000_000


def document_spans(document_ids: torch.Tensor) -> Iterator[tuple[int, int]]:
    """Row ranges [start, end) of the documents; padding (-1) is left out."""
    ids = document_ids.tolist()
    start = 0
    for row in range(1, len(ids) + 1):
        if row == len(ids) or ids[row] != ids[start]:
            if ids[start] != -1:
                yield start, row
            start = row


@dataclass(frozen=True)
class Inputs:
    """Rows of a comparison, aligned as in training: token x[t+1] with feature g[t].

    Attributes:
        token_ids: [T] int64, target vocabulary.
        aux: [T, n_aux * target width] float32.
        position_ids: [T] int64, counted from 1 within a document.
        document_ids: [T] int64, runs of equal ids; -1 is padding.
        seed: The seed they come from; None if recorded.
        vocab_size: Bound of the token ids, needed to make them again from the seed.
    """

    token_ids: torch.Tensor
    aux: torch.Tensor
    position_ids: torch.Tensor
    document_ids: torch.Tensor
    seed: int | None = None
    vocab_size: int | None = None

    @classmethod
    def random(
        cls, *, vocab_size: int, aux_width: int, positions: int = 256, seed: int = 0
    ) -> Inputs:
        """Rows from a seed: the same bits on every machine and torch version.

        Features are asymmetric: skewed, with a scale and an offset of its own per
        channel, so that permuted or negated channels show. Several documents.
        """
        count = positions * aux_width
        flat = uniform(count, seed).view(positions, aux_width)
        scale = uniform(aux_width, seed + 1) + 0.25
        offset = uniform(aux_width, seed + 2) - 0.375
        aux = (flat * flat * 3 - 0.75) * scale + offset
        tokens = (uniform(positions, seed + 3).double() * vocab_size).long()
        lengths = _document_lengths(positions)
        return cls(
            tokens.clamp(max=vocab_size - 1),
            aux,
            torch.cat([torch.arange(1, n + 1) for n in lengths]),
            torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths)),
            seed,
            vocab_size,
        )

    @classmethod
    def for_config(
        cls,
        checkpoint_config: Mapping[str, Any],
        *,
        positions: int = 256,
        seed: int = 0,
    ) -> Inputs:
        """Random rows for a speculators ``config.json``."""
        layer = checkpoint_config["transformer_layer_config"]
        kind = checkpoint_config.get("speculators_model_type")
        ids = checkpoint_config.get(
            "eagle_aux_hidden_state_layer_ids",
            checkpoint_config.get("aux_hidden_state_layer_ids"),
        )
        return cls.random(
            vocab_size=layer["vocab_size"],
            aux_width=layer["hidden_size"]
            * (1 if kind == "mtp" else len(ids) if ids else 3),
            positions=positions,
            seed=seed,
        )

    @classmethod
    def from_batch(cls, batch: Mapping[str, Any], *, positions: int = 256) -> Inputs:
        """Recorded rows: a stretch of a training batch around a document boundary.

        Features are rounded to bfloat16, in which they are stored, so that both sides
        and the travelling probe see the same. A stretch without a boundary is cut
        into two documents: each starts without a past, on both sides alike.

        Args:
            batch: ``hidden_states`` [1, S, A], ``input_ids``, ``document_ids`` and
                ``position_ids`` [1, S], as speculators collates them.
            positions: Rows to take at most; fewer where the features are so wide
                that the probe would exceed its size.

        Raises:
            ValueError: the batch holds padding only.
        """
        documents = batch["document_ids"].reshape(-1).cpu().long()
        used = int((documents != -1).sum())  # padding is at the end
        if used < 2:
            raise ValueError("the batch holds padding only")
        changes = (documents[1:used] != documents[: used - 1]).nonzero().reshape(-1) + 1
        middle = int(changes[0]) if len(changes) else positions // 2
        width = batch["hidden_states"].shape[-1]
        count = min(positions, used, max(2, RECORDED_BYTES // (2 * width)))
        start = min(max(middle - count // 2, 0), used - count)
        take = slice(start, start + count)
        documents = documents[take]
        if bool((documents == documents[0]).all()):
            documents = torch.repeat_interleave(
                torch.arange(2), torch.tensor(_document_lengths(count, 2))
            )
        aux = batch["hidden_states"].reshape(-1, width)
        return cls(
            batch["input_ids"].reshape(-1)[take].cpu().long(),
            aux[take].detach().cpu().to(torch.bfloat16).float(),
            batch["position_ids"].reshape(-1)[take].cpu().long(),
            documents,
        )

    def __len__(self) -> int:
        return self.token_ids.shape[0]

    def first(self, positions: int) -> Inputs:
        """Fewer rows, several documents kept."""
        if positions >= len(self):
            return self
        if self.seed is not None and self.vocab_size is not None:
            return Inputs.random(
                vocab_size=self.vocab_size,
                aux_width=self.aux.shape[1],
                positions=positions,
                seed=self.seed,
            )
        batch = {
            "hidden_states": self.aux,
            "input_ids": self.token_ids,
            "document_ids": self.document_ids,
            "position_ids": self.position_ids,
        }
        return Inputs.from_batch(batch, positions=positions)

    def part(self, start: int, end: int) -> Inputs:
        """Some rows as they are."""
        cut = slice(start, end)
        return Inputs(
            self.token_ids[cut],
            self.aux[cut],
            self.position_ids[cut],
            self.document_ids[cut],
        )

    def rows(self) -> torch.Tensor:
        """Rows that are not padding, int64 [N]."""
        return (self.document_ids != -1).nonzero().reshape(-1)

    def shifted(self, by: int) -> Inputs:
        """The same rows further back in their documents."""
        return replace(self, position_ids=self.position_ids + by)


def _document_lengths(rows: int, documents: int = 4) -> list[int]:
    """Documents of different lengths, the first ones longest; at least one row each."""
    weights = [documents - i for i in range(documents)][: max(1, rows)]
    lengths = [max(1, rows * w // sum(weights)) for w in weights]
    lengths[0] += rows - sum(lengths)
    return [n for n in lengths if n > 0]
