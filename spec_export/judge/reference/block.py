"""``DFlashDraftModel``, ``DFlash2DraftModel`` and ``Qwen3DSparkModel`` in plain torch.

A block is an anchor token and mask tokens behind it, drafted in one forward: its rows
see the target's features of all tokens before the anchor and each other. The forward
follows SGLang 0.5.23; stages are called by the training class's module names.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from spec_export.judge.inputs import document_spans
from spec_export.judge.reference.block_config import read_block_config
from spec_export.judge.reference.block_loading import load_block_weights
from spec_export.judge.reference.layers import Layers
from spec_export.judge.reference.rope import Rope
from spec_export.judge.reference.serving_config import (
    ReferenceUnsupported,
    ServingError,
)

Trace = Callable[[int, str, torch.Tensor], None]
# A bias below this forbids a token; logits are far smaller.
FORBIDDEN = -5000.0
_ANCHORS = 32  # blocks at a time


class BlockReference(Layers):
    """SGLang's block drafts.

    Attributes:
        config: The resolved configuration.
        report: What loading did.
        hot_token_id: Ids that can be proposed, or None for the whole vocabulary.
        dtype: Dtype of the computation.
        embed_scale: Factor of the target's embedding module. What goes into a norm has
            to be as much larger than in training; traces are of training's size.
    """

    embed_scale = 1.0

    def __init__(
        self,
        folder: Path,
        raw: Mapping[str, Any],
        *,
        embed: torch.Tensor | None,
        head: torch.Tensor | None,
        release: str,
        dtype: torch.dtype,
        device: torch.device,
        window: int | None,
    ) -> None:
        self.config = read_block_config(raw, release)
        if window is not None:  # --speculative-draft-window-size
            limits = [
                window if w is None else min(w, window) for w in self.config.windows
            ]
            self.config = replace(self.config, windows=tuple(limits))
        self.rope = Rope(self.config)
        self.dtype, self.device = dtype, device
        held = getattr(torch, self.config.dtype, None)
        if not isinstance(held, torch.dtype) or not held.is_floating_point:
            raise ServingError(f"dtype {self.config.dtype!r} is no float dtype")
        values, self.report = load_block_weights(folder, self.config, held)
        for name, shared in (("embed_tokens.weight", embed), ("lm_head.weight", head)):
            if shared is None:
                raise ReferenceUnsupported(f"the target's {name} is not at hand")
            values[name] = shared.to(held)
        rows, width = values["embed_tokens.weight"].shape
        if width != self.config.hidden_size:
            raise ServingError(f"the target is {width} wide")
        if self.config.mask_token >= rows:
            raise ServingError(f"mask_token_id {self.config.mask_token} of {rows}")
        self.weights = {name: value.to(device) for name, value in values.items()}
        self.hot_token_id = self._allowed()
        count = rows if self.hot_token_id is None else len(self.hot_token_id)
        self.config = replace(self.config, draft_vocab_size=count)

    # --- the backbone -------------------------------------------------------------

    def _heads(self, x: torch.Tensor, i: int, part: str) -> torch.Tensor:
        """One of q, k, v [rows, heads, head_dim], normed but not rotated."""
        name = f"layers.{i}.self_attn"
        y = self._linear(x, f"{name}.qkv_proj", part)
        y = y.unflatten(-1, (-1, self.config.head_dim))
        return y if part == "v" else self._norm(y, f"{name}.{part}_norm")

    def _context(
        self, features: torch.Tensor, positions: torch.Tensor, trace: Trace
    ) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Keys and values of every layer for features [n, n_aux * H]."""
        width = self.weights["fc.weight"].shape[1]
        if features.shape[-1] != width:
            raise ServingError(f"features are {features.shape[-1]} wide, fc {width}")
        x = self._linear(features, "fc")
        trace(0, "fc", x / self.embed_scale)
        x = self._norm(x, "hidden_norm")
        trace(0, "hidden_norm", x)
        table = self.rope.table(positions)
        return [
            (self.rope.apply(self._heads(x, i, "k"), table), self._heads(x, i, "v"))
            for i in range(self.config.num_layers)
        ]

    def _attend(
        self,
        i: int,
        x: torch.Tensor,
        context: tuple[torch.Tensor, torch.Tensor],
        anchors: torch.Tensor,
        positions: torch.Tensor,
    ) -> torch.Tensor:
        """x [A * B, H] of A blocks -> [A * B, heads * head_dim].

        Args:
            i: The layer.
            x: Normed rows.
            context: Keys and values of the document [n, kv heads, head_dim].
            anchors: Row of each anchor in the document [A].
            positions: Of the document's rows [n].
        """
        blocks, size = len(anchors), self.config.queries
        at = (positions[anchors][:, None] + torch.arange(size, device=x.device)).view(
            -1
        )
        table = self.rope.table(at)
        q = self.rope.apply(self._heads(x, i, "q"), table)
        k = self.rope.apply(self._heads(x, i, "k"), table)
        v = self._heads(x, i, "v")
        group = q.shape[1] // k.shape[1]
        q, k, v = (t.unflatten(0, (blocks, size)) for t in (q, k, v))
        old_k, old_v = (t.repeat_interleave(group, 1) for t in context)
        k, v = k.repeat_interleave(group, 2), v.repeat_interleave(group, 2)
        old = torch.einsum("abhd,nhd->ahbn", q, old_k)
        own = torch.einsum("abhd,achd->ahbc", q, k)
        row = torch.arange(size, device=x.device)
        hidden = torch.zeros(blocks, size, old.shape[-1] + size, device=x.device).bool()
        rows = torch.arange(len(positions), device=x.device)
        hidden[..., : len(rows)] = (rows >= anchors[:, None])[:, None]
        if self.config.causal[i]:
            hidden[..., len(rows) :] = row[None, :] > row[:, None]
        if (left := self.config.windows[i]) is not None:
            query = at.view(blocks, size)[..., None]
            keys = torch.cat([positions.expand(blocks, -1), at.view(blocks, size)], 1)[
                :, None
            ]
            hidden |= query - keys > left
        scores = torch.cat([old, own], -1).float() * self.config.head_dim**-0.5
        weights = scores.masked_fill(hidden[:, None], float("-inf")).softmax(-1)
        weights = weights.to(v.dtype)
        out = torch.einsum("ahbn,nhd->abhd", weights[..., : len(rows)], old_v)
        out = out + torch.einsum("ahbc,achd->abhd", weights[..., len(rows) :], v)
        return out.flatten(0, 1).flatten(1)

    def _convolve(
        self, x: torch.Tensor, kernel: torch.Tensor, base: torch.Tensor
    ) -> torch.Tensor:
        """Causal taps in each block; kernel [rows, taps, groups], base [taps, H]."""
        blocks = x.unflatten(0, (-1, self.config.queries))
        kernel = kernel.repeat_interleave(self.config.group, -1) + base
        kernel = kernel.unflatten(0, (-1, self.config.queries))
        out = torch.zeros_like(blocks)
        for tap in range(self.config.taps):
            shifted = F.pad(blocks, (0, 0, tap, 0))[:, : self.config.queries]
            out = out + kernel[:, :, tap] * shifted
        return out.flatten(0, 1)

    def _wrapped(
        self, x: torch.Tensor, conv: str, inner: Callable[[torch.Tensor], torch.Tensor]
    ) -> torch.Tensor:
        """A sublayer, between its two convolutions where the class has them."""
        if not self.config.taps:
            return inner(x)
        kernels = self._linear(x, f"{conv}.kernel_projection")
        kernels = kernels.unflatten(-1, (2, self.config.taps, -1))
        base = self._weight(f"{conv}.base_kernel")
        x = inner(self._convolve(x, kernels[:, 0], base[0]))
        return self._convolve(x, kernels[:, 1], base[1])

    def _layer(
        self,
        i: int,
        x: torch.Tensor,
        attend: Callable[[torch.Tensor], torch.Tensor],
        trace: Trace,
    ) -> torch.Tensor:
        name = f"layers.{i}"

        def attention(y: torch.Tensor) -> torch.Tensor:
            out = self._linear(attend(y), f"{name}.self_attn.o_proj")
            trace(0, f"{name}.self_attn.o_proj", out / self.embed_scale)
            return out

        def mlp(y: torch.Tensor) -> torch.Tensor:
            gate = self._linear(y, f"{name}.mlp.gate_up_proj", "gate")
            up = self._linear(y, f"{name}.mlp.gate_up_proj", "up")
            out = self._linear(F.silu(gate) * up, f"{name}.mlp.down_proj")
            trace(0, f"{name}.mlp.down_proj", out / self.embed_scale)
            return out

        y = self._norm(x, f"{name}.input_layernorm")
        trace(0, f"{name}.input_layernorm", y)
        x = x + self._wrapped(y, f"{name}.attention_conv", attention)
        y = self._norm(x, f"{name}.post_attention_layernorm")
        trace(0, f"{name}.post_attention_layernorm", y)
        return x + self._wrapped(y, f"{name}.mlp_conv", mlp)

    def _blocks(
        self,
        tokens: torch.Tensor,
        anchors: torch.Tensor,
        context: list[tuple[torch.Tensor, torch.Tensor]],
        positions: torch.Tensor,
        trace: Trace,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Hidden states and base logits [A, proposals, ...] of some blocks."""
        size = self.config.queries
        ids = torch.full((len(anchors), size), self.config.mask_token)
        ids = ids.to(self.device)
        ids[:, 0] = tokens[anchors]
        x = F.embedding(ids.view(-1), self.weights["embed_tokens.weight"])
        x = x.to(self.dtype)
        trace(0, "embed_tokens", x)
        x = x * self.embed_scale
        for i, held in enumerate(context):
            x = self._layer(
                i,
                x,
                lambda y, i=i, held=held: self._attend(  # type: ignore[misc]
                    i, y, held, anchors, positions
                ),
                trace,
            )
        x = self._norm(x, "norm")
        trace(0, "norm", x)
        logits = self._linear(x, "lm_head")
        trace(0, "lm_head", logits)
        shape = (len(anchors), size)
        return (
            x.unflatten(0, shape)[:, self.config.first :],
            logits.unflatten(0, shape)[:, self.config.first :],
        )

    # --- the heads ----------------------------------------------------------------

    def _scored(
        self,
        slot: int,
        before: torch.Tensor,
        hidden: torch.Tensor,
        logits: torch.Tensor,
        state: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Logits of a slot with what the token before it adds; the head's state."""
        config = self.config
        if config.family == "dflash2":
            # The selector reranks the largest logits; here all tokens are candidates.
            name = "candidate_selector"
            first = F.embedding(before, self._weight(f"{name}.predecessor_codebook"))
            mixed = first * self._linear(hidden, f"{name}.hidden_projection")
            return logits + mixed @ self._weight(f"{name}.successor_codebook").T, None
        if config.family == "dflash":
            return logits, None
        latent = F.embedding(before, self._weight("markov_head.markov_w1.weight"))
        if config.head == "gated":
            joined = torch.cat([hidden, latent], -1)
            latent = (
                torch.sigmoid(self._linear(joined, "markov_head.gate_proj")) * latent
            )
        elif config.head == "rnn":
            state = torch.zeros_like(latent) if state is None else state
            z = self._linear(
                torch.cat([state, latent, hidden], -1), "markov_head.joint_proj"
            )
            gate, candidate, output = z.chunk(3, -1)
            gate = torch.sigmoid(gate)
            state = gate * state + (1 - gate) * torch.tanh(candidate)
            latent = torch.tanh(output)
        return logits + self._linear(latent, "markov_head.markov_w2"), state

    @property
    def tables(self) -> tuple[str, ...]:
        """The table of preceding tokens and the one of those proposed."""
        return {
            "dflash": (),
            "dflash2": (
                "candidate_selector.predecessor_codebook",
                "candidate_selector.successor_codebook",
            ),
            "dspark": ("markov_head.markov_w1.weight", "markov_head.markov_w2.weight"),
        }[self.config.family]

    def confidence(self, hidden: torch.Tensor, before: torch.Tensor) -> torch.Tensor:
        """Raw confidence of tokens [n], as modes other than static would compute it.

        Args:
            hidden: States of their slots [n, H].
            before: The tokens before them [n].

        Raises:
            KeyError: the export has no such weights, over which these modes raise.
            RuntimeError: they have other shapes than the class.
        """
        weight = self._weight("confidence_head.proj.weight")
        x = hidden.to(self.device, self.dtype)
        if self.config.confidence_with_markov:
            table = self._weight(self.tables[0])
            x = torch.cat([x, F.embedding(before.to(self.device), table)], -1)
        return F.linear(x, weight, self._weight("confidence_head.proj.bias"))[:, 0]

    def _allowed(self) -> torch.Tensor | None:
        """Ids whose bias does not forbid them; None if that is all."""
        if self.config.family != "dspark":
            return None
        hidden = torch.zeros(1, self.config.hidden_size, device=self.device)
        zero = torch.zeros(1, dtype=torch.long, device=self.device)
        base = torch.zeros(1, 1, device=self.device, dtype=self.dtype)
        bias, _ = self._scored(0, zero, hidden.to(self.dtype), base, None)
        kept = (bias[0] > FORBIDDEN).nonzero().reshape(-1)
        return None if len(kept) == bias.shape[1] else kept

    def _picked(self, logits: torch.Tensor) -> torch.Tensor:
        return logits if self.hot_token_id is None else logits[..., self.hot_token_id]

    # --- the two forms ----------------------------------------------------------

    @torch.no_grad()
    def teacher_forced(
        self,
        token_ids: torch.Tensor,
        features: torch.Tensor,
        position_ids: torch.Tensor,
        document_ids: torch.Tensor,
        steps: int,
        trace: Trace | None = None,
    ) -> list[torch.Tensor]:
        """A block at every row, the tokens before each slot given.

        Args:
            token_ids: [T] int64.
            features: [T, n_aux * target width].
            position_ids: [T] int64, counted from 1; SGLang counts from 0.
            document_ids: [T] int64; a run of equal ids is a request, -1 is padding.
            steps: At most so many of the proposals.
            trace: Called with (0, name of the training module, rows x channels).

        Returns:
            Per proposal [T, tokens that can be proposed]; padding rows are zero.
        """
        steps = min(steps, self.config.proposals)
        shape = (len(token_ids), self.config.draft_vocab_size)
        out = [
            torch.zeros(shape, dtype=self.dtype, device=self.device)
            for _ in range(steps)
        ]
        tokens = F.pad(token_ids, (0, steps)).to(self.device)
        for start, end in document_spans(document_ids):
            positions = position_ids[start:end].to(self.device) - 1
            rows = features[start:end].to(self.device, self.dtype)
            context = self._context(rows, positions, trace or _no_trace)
            for part in torch.arange(end - start, device=self.device).split(_ANCHORS):
                hidden, logits = self._blocks(
                    tokens[start:end], part, context, positions, trace or _no_trace
                )
                state: torch.Tensor | None = None
                for slot in range(steps):
                    before = tokens[start + part + slot]
                    scored, state = self._scored(
                        slot, before, hidden[:, slot], logits[:, slot], state
                    )
                    out[slot][start + part] = self._picked(scored)
        return out

    @torch.no_grad()
    def free_running(
        self,
        token_ids: torch.Tensor,
        features: torch.Tensor,
        position_ids: torch.Tensor,
        steps: int,
        draft_ids: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """One block behind a prefix, as the server drafts; its last row is the anchor.

        Args:
            token_ids: [n] int64, the rows of one request.
            features: [n, n_aux * target width]; the anchor's own are not seen.
            position_ids: [n] int64, counted from 1.
            steps: At most so many of the proposals.
            draft_ids: Draft ids to go on with instead of the own choice [steps - 1].

        Returns:
            Logits [steps, tokens that can be proposed] and the own choices [steps].
        """
        positions = position_ids.to(self.device) - 1
        tokens = token_ids.to(self.device)
        rows = features.to(self.device, self.dtype)
        context = self._context(rows, positions, _no_trace)
        last = torch.tensor([len(tokens) - 1], device=self.device)
        hidden, base = self._blocks(tokens, last, context, positions, _no_trace)
        before, state = tokens[-1:], None
        logits, chosen = [], []
        for slot in range(min(steps, self.config.proposals)):
            scored, state = self._scored(
                slot, before, hidden[:, slot], base[:, slot], state
            )
            logits.append(self._picked(scored)[0])
            chosen.append(logits[-1].argmax())
            own = draft_ids is None or slot >= len(draft_ids)
            fed = chosen[-1] if own else draft_ids[slot]  # type: ignore[index]
            before = self.to_target(fed.reshape(1))
        return torch.stack(logits), torch.stack(chosen)

    def to_target(self, draft_ids: torch.Tensor) -> torch.Tensor:
        """Ids among the tokens that can be proposed -> target ids."""
        draft_ids = draft_ids.to(self.device)
        return draft_ids if self.hot_token_id is None else self.hot_token_id[draft_ids]

    def window_of(self, layer: int) -> int | None:
        """None: a block's window is compared as the server counts it."""
        return None


def _no_trace(step: int, stage: str, value: torch.Tensor) -> None:
    return None
