"""Rows of a comparison: random by seed, recorded from a batch, or both.

Recorded rows have what real features have, and text for an acceptance length; rows from
a seed show every channel and can travel: those of a training's text must not.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F

from spec_export.judge.seeded import uniform

# Of recorded features: that much is kept in memory, and a probe stays below 8 MB.
RECORDED_BYTES = 7_000_000
# What is row by row in a batch of speculators, and of use.
_BATCH = (
    "hidden_states",
    "input_ids",
    "document_ids",
    "loss_mask",
    "verifier_last_hidden_states",
)


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
        seed: The seed of the rows that are not recorded; None: there are none.
        vocab_size: Bound of the token ids, needed to make them again from the seed.
        recorded: So many rows at the start come from a batch.
        scored: [T] bool, recorded rows that training scores; None: all of them.
        last: [T, target width], the target's last hidden state at each token, before
            its final norm; None where the batch has none, zero for rows of a seed.
        batch: What kind of batch the recorded rows are from.
    """

    token_ids: torch.Tensor
    aux: torch.Tensor
    position_ids: torch.Tensor
    document_ids: torch.Tensor
    seed: int | None = None
    vocab_size: int | None = None
    recorded: int = 0
    scored: torch.Tensor | None = None
    last: torch.Tensor | None = None
    batch: str = "training"

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
    def from_batch(
        cls,
        batch: Mapping[str, Any],
        *,
        positions: int = 256,
        kind: str = "eagle3",
        of: str = "training",
    ) -> Inputs:
        """Recorded rows: a stretch of a training batch around a document boundary.

        Features are rounded to bfloat16, in which they are stored, so that both sides
        and the travelling probe see the same. A stretch without a boundary is cut
        into two documents: each starts without a past, on both sides alike. Positions
        are counted anew: only their distances matter, and the angle of a far one has
        an error in float32 (SGLang counts from 0, training from 1) that would pass
        for a difference.

        Args:
            batch: ``hidden_states`` [1, S, A], ``input_ids`` and ``document_ids``
                [1, S], as speculators collates them; ``loss_mask`` [1, S] and
                ``verifier_last_hidden_states`` [1, S, H] if there.
            positions: Rows to take at most; fewer where the features are so wide
                that the probe would exceed its size.
            kind: Draft type. For ``mtp`` speculators collates each token with its own
                feature, and the module looks one place further: so does this.
            of: What kind of batch it is.

        Raises:
            ValueError: the batch holds padding only.
        """
        taken = stretch(batch, positions)
        documents = taken["document_ids"][0]
        rows = torch.arange(len(documents))
        tokens = taken["input_ids"][0]
        if kind == "mtp":
            rows = (documents[1:] == documents[:-1]).nonzero().reshape(-1)
            tokens = tokens[1:]
        if len(rows) < 2:
            raise ValueError("the batch holds padding only")
        mask, last = (
            taken[key][0][rows] if key in taken else None
            for key in ("loss_mask", "verifier_last_hidden_states")
        )
        documents = _in_two(documents[rows].long())
        lengths = [end - start for start, end in document_spans(documents)]
        return cls(
            tokens[rows].long(),
            taken["hidden_states"][0][rows].to(torch.bfloat16).float(),
            torch.cat([torch.arange(1, n + 1) for n in lengths]),
            documents,
            recorded=len(rows),
            scored=None if mask is None else mask.bool(),
            last=last,
            batch=of,
        )

    def beside(self, seeded: Inputs) -> Inputs:
        """These recorded rows, and behind them rows from a seed as other documents."""
        extra = len(seeded)
        return replace(
            seeded,
            token_ids=torch.cat([self.token_ids, seeded.token_ids]),
            aux=torch.cat([self.aux, seeded.aux]),
            position_ids=torch.cat([self.position_ids, seeded.position_ids]),
            document_ids=torch.cat(
                [self.document_ids, seeded.document_ids + self.document_ids.max() + 1]
            ),
            recorded=len(self),
            scored=None if self.scored is None else F.pad(self.scored, (0, extra)),
            last=None if self.last is None else F.pad(self.last, (0, 0, 0, extra)),
            batch=self.batch,
        )

    def __len__(self) -> int:
        return self.token_ids.shape[0]

    def first(self, positions: int) -> Inputs:
        """Fewer rows, several documents kept, and as many recorded as seeded ones."""
        if positions >= len(self):
            return self
        if self.seed is None or self.vocab_size is None:
            start, end = _place(self.document_ids, self.scored, positions)
            taken = self.part(start, end)
            return replace(taken, document_ids=_in_two(taken.document_ids))
        recorded = min(self.recorded, positions // 2)
        seeded = Inputs.random(
            vocab_size=self.vocab_size,
            aux_width=self.aux.shape[1],
            positions=positions - recorded,
            seed=self.seed,
        )
        if not recorded:
            return seeded
        return self.part(0, self.recorded).first(recorded).beside(seeded)

    def part(self, start: int, end: int) -> Inputs:
        """Some rows as they are."""
        cut = slice(start, end)
        return Inputs(
            self.token_ids[cut],
            self.aux[cut],
            self.position_ids[cut],
            self.document_ids[cut],
            recorded=max(0, min(self.recorded, end) - start),
            scored=None if self.scored is None else self.scored[cut],
            last=None if self.last is None else self.last[cut],
            batch=self.batch,
        )

    def seeded(self) -> Inputs:
        """The rows from the seed alone, which hold nothing of a training."""
        if self.seed is None or not self.recorded:
            return self
        rest = self.part(self.recorded, len(self))
        ids = rest.document_ids - rest.document_ids.min()
        return Inputs(
            rest.token_ids, rest.aux, rest.position_ids, ids, self.seed, self.vocab_size
        )

    def described(self) -> str:
        """Where the rows come from, for a reader."""
        if not self.recorded:
            return f"{len(self)} rows from a seed, none from a batch of a training"
        told = f"{self.recorded} rows recorded from a batch of {self.batch}"
        rest = len(self) - self.recorded
        return f"{told}, {rest} from a seed" if rest else told

    def rows(self) -> torch.Tensor:
        """Rows that are not padding, int64 [N]."""
        return (self.document_ids != -1).nonzero().reshape(-1)

    def shifted(self, by: int) -> Inputs:
        """The same rows further back in their documents."""
        return replace(self, position_ids=self.position_ids + by)


def stretch(batch: Mapping[str, Any], positions: int) -> dict[str, torch.Tensor]:
    """Some rows of a batch around a document boundary, copied to the CPU.

    Args:
        batch: As for ``Inputs.from_batch``.
        positions: Rows at most; fewer if the features take ``RECORDED_BYTES``.

    Returns:
        The same keys, [1, rows, ...]; floats in bfloat16.

    Raises:
        ValueError: the batch holds padding only.
    """
    documents = batch["document_ids"].reshape(-1).cpu().long()
    mask = batch.get("loss_mask")
    width = batch["hidden_states"].shape[-1]
    count = min(positions, max(2, RECORDED_BYTES // (2 * width)))
    scored = None if mask is None else mask.reshape(-1).cpu().bool()
    start, end = _place(documents, scored, count)
    out = {}
    for key in _BATCH:
        if isinstance(batch.get(key), torch.Tensor):
            value = batch[key].detach()[:, start:end]
            dtype = torch.bfloat16 if value.is_floating_point() else value.dtype
            # A view would keep the whole batch in memory.
            out[key] = value.to("cpu", dtype, copy=True)
    return out


def _place(
    documents: torch.Tensor, scored: torch.Tensor | None, count: int
) -> tuple[int, int]:
    """Rows [start, end) around that boundary of documents that has most scored rows."""
    used = int((documents != -1).sum())  # padding is at the end
    if used < 2:
        raise ValueError("the batch holds padding only")
    count = min(count, used)
    changes = (documents[1:used] != documents[: used - 1]).nonzero().reshape(-1) + 1
    starts = (changes - count // 2).clamp(0, used - count)
    if not len(changes):
        starts = torch.arange(used - count + 1)
    if scored is None:
        start = int(starts[0])
    else:
        before = F.pad(scored[:used].long().cumsum(0), (1, 0))
        start = int(starts[(before[starts + count] - before[starts]).argmax()])
    return start, start + count


def _in_two(documents: torch.Tensor) -> torch.Tensor:
    """Document ids as they are, or two documents made of one."""
    if len(documents) < 2 or bool((documents != documents[0]).any()):
        return documents
    lengths = torch.tensor(_document_lengths(len(documents), 2))
    return torch.repeat_interleave(torch.arange(2), lengths)


def _document_lengths(rows: int, documents: int = 4) -> list[int]:
    """Documents of different lengths, the first ones longest; at least one row each."""
    weights = [documents - i for i in range(documents)][: max(1, rows)]
    lengths = [max(1, rows * w // sum(weights)) for w in weights]
    lengths[0] += rows - sum(lengths)
    return [n for n in lengths if n > 0]
