"""``LlamaForCausalLMEagle3`` and the plug-in's class in plain torch.

The forward follows SGLang 0.5.23's ``models/llama_eagle3.py``; older releases lose
what ``serving_config.SINCE`` says.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from spec_export.judge.reference.attention import ServerKeys, TeacherKeys
from spec_export.judge.reference.layers import Layers
from spec_export.judge.reference.loading import Parameter, load_weights
from spec_export.judge.reference.rope import Rope
from spec_export.judge.reference.serving_config import (
    ServingConfig,
    ServingError,
    read_config,
)

Trace = Callable[[int, str, torch.Tensor], None]
# (layer, q, k, v) -> attention output [T, heads * head_dim]
Attend = Callable[[int, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


class Eagle3Reference(Layers):
    """SGLang's EAGLE-3 draft for Llama-shaped layers.

    Attributes:
        config: The resolved configuration.
        report: What loading did.
        hot_token_id: Target id of each draft id, or None (ids are the same).
        dtype: Dtype of the computation.
    """

    plugin = False

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
        self.config = read_config(raw, release, window=window, plugin=self.plugin)
        self.rope = Rope(self.config)
        self.dtype, self.device = dtype, device
        held = getattr(torch, self.config.dtype, None)
        if not isinstance(held, torch.dtype) or not held.is_floating_point:
            raise ServingError(f"dtype {self.config.dtype!r} is no float dtype")
        borrowed = self._borrowed(embed, head, held)
        values, self.hot_token_id, self.report = load_weights(
            folder, _parameters(self.config), self.config, held, dtype, borrowed
        )
        values |= borrowed
        if self.config.tied:
            values["lm_head.weight"] = values["embed_tokens.weight"]
        self.weights = {name: value.to(device) for name, value in values.items()}

    def _borrowed(
        self,
        embed: torch.Tensor | None,
        head: torch.Tensor | None,
        held: torch.dtype,
    ) -> dict[str, torch.Tensor]:
        """The target's embedding and head, where ``init_lm_head`` puts them in.

        One server computes in one dtype, so both are held in the parameters' dtype.
        """
        config, out = self.config, {}
        if config.shares_embedding or config.head_from_target:
            if embed is None:
                raise ServingError("the target's embedding is not at hand")
            if embed.shape[-1] != config.hidden_size:
                raise ServingError(
                    f"the target's embedding is {embed.shape[-1]} wide, the draft "
                    f"{config.hidden_size}"
                )
            out["embed_tokens.weight"] = embed.to(held)
        if config.head_from_target:
            if head is None:
                raise ServingError("the target's head is not at hand")
            out["lm_head.weight"] = head.to(held)
        return out

    # --- the parts of the forward ---------------------------------------------

    def _add_norm(
        self, x: torch.Tensor, residual: torch.Tensor, name: str
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Residual add in float32, then the norm: (normed, new residual)."""
        total = x.float() + residual.float()
        return self._norm(total, name), total.to(self.dtype)

    def fuse(self, features: torch.Tensor, step: int, trace: Trace) -> torch.Tensor:
        """Features [T, n_aux * H] -> state [T, H]; skipped where widths agree."""
        config, x = self.config, features
        if x.shape[-1] != config.hidden_size or (config.always_fc and step == 0):
            if config.input_norm:
                x = self._norm(x, "input_norm")
                trace(step, "features norm", x)
            if config.fc_norm:
                chunks = x.chunk(config.num_aux, dim=-1)
                normed = [self._norm(c, f"fc_norm.{j}") for j, c in enumerate(chunks)]
                for j, chunk in enumerate(normed):
                    trace(step, f"feature norm {j}", chunk)
                x = torch.cat(normed, -1)
            width = self.weights["fc.weight"].shape[1]
            if x.shape[-1] != width:
                raise ServingError(f"features are {x.shape[-1]} wide, fc takes {width}")
            x = self._linear(x, "fc")
        trace(step, "fused features" if step == 0 else "recurrent state", x)
        return x

    def _attention_inputs(
        self, i: int, x: torch.Tensor, step: int, trace: Trace
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        config = self.config
        parts = []
        for part, heads in (
            ("q", config.num_heads),
            ("k", config.num_kv_heads),
            ("v", config.num_kv_heads),
        ):
            y = self._linear(x, f"layers.{i}.self_attn.qkv_proj", part)
            trace(step, f"layer {i} {part}", y)
            y = y.view(x.shape[0], heads, config.head_dim)
            if config.qk_norm and part != "v":
                y = self._norm(y, f"layers.{i}.self_attn.{part}_norm")
                trace(step, f"layer {i} {part} norm", y.flatten(1))
            parts.append(y)
        return parts[0], parts[1], parts[2]

    def _layer(
        self,
        i: int,
        state: torch.Tensor,
        residual: torch.Tensor | None,
        embeds: torch.Tensor,
        table: tuple[torch.Tensor, torch.Tensor],
        attend: Attend,
        step: int,
        trace: Trace,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        name = f"layers.{i}"
        if residual is None:  # the first layer
            residual, x = state, self._norm(state, f"{name}.hidden_norm")
            if self.config.norm_before_residual:
                residual = x
            first = self._norm(embeds, f"{name}.input_layernorm")
            trace(step, f"layer {i} embedding norm", first)
            trace(step, f"layer {i} input norm", x)
            x = torch.cat([first, x], -1)
        else:
            x, residual = self._add_norm(state, residual, f"{name}.hidden_norm")
            trace(step, f"layer {i} input norm", x)
        q, k, v = self._attention_inputs(i, x, step, trace)
        out = attend(i, self.rope.apply(q, table), self.rope.apply(k, table), v)
        trace(step, f"layer {i} attention", out)
        x = self._linear(out, f"{name}.self_attn.o_proj")
        trace(step, f"layer {i} attention output", x)
        x, residual = self._add_norm(x, residual, f"{name}.post_attention_layernorm")
        trace(step, f"layer {i} post-attention norm", x)
        gate = self._linear(x, f"{name}.mlp.gate_up_proj", "gate")
        up = self._linear(x, f"{name}.mlp.gate_up_proj", "up")
        trace(step, f"layer {i} MLP gate", gate)
        trace(step, f"layer {i} MLP up", up)
        x = self._linear(F.silu(gate) * up, f"{name}.mlp.down_proj")
        trace(step, f"layer {i} MLP output", x)
        return x, residual

    def step(
        self,
        tokens: torch.Tensor,
        state: torch.Tensor,
        positions: torch.Tensor,
        attend: Attend,
        step: int,
        trace: Trace,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """One draft step over rows: (logits [T, draft vocab], next state [T, H])."""
        embeds = F.embedding(tokens, self.weights["embed_tokens.weight"]).to(self.dtype)
        trace(step, "embedding", embeds)
        x = self.fuse(state, step, trace)
        table = self.rope.table(positions)
        residual: torch.Tensor | None = None
        for i in range(self.config.num_layers):
            x, residual = self._layer(
                i, x, residual, embeds, table, attend, step, trace
            )
        assert residual is not None
        normed, total = self._add_norm(x, residual, "norm")
        trace(step, "final norm", normed)
        logits = self._linear(normed, "lm_head")[:, : self.config.draft_vocab_size]
        trace(step, "logits", logits)
        return logits, normed if self.config.norm_output else total

    def window_of(self, layer: int) -> int | None:
        """Largest distance of a visible key in a layer; None: all."""
        if self.config.layer_windows is not None and self.config.window is None:
            return self.config.layer_windows[layer]
        return self.config.window

    # --- the two forms ---------------------------------------------------------

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
        """Chained steps over all rows, tokens given, as in training.

        At step s row p takes ``token_ids[p + s]`` (0 behind the end) and the row's own
        state of step s - 1; it sees the step-0 keys of its document up to p and its
        own keys of the later steps. The window is counted from p at every step, as in
        training; a server's window moves with the drafted tokens (``free_running``).

        Args:
            token_ids: [T] int64.
            features: [T, n_aux * target width].
            position_ids: [T] int64, counted from 1 as in training; SGLang counts
                from 0.
            document_ids: [T] int64; each document is a request of its own, -1 is
                padding.
            steps: Number of draft steps.
            trace: Called with (step, stage, rows without padding x channels).

        Returns:
            Per step [T, draft vocab]; padding rows are zero.
        """
        device = self.device
        rows = (document_ids != -1).nonzero().reshape(-1)
        tokens = F.pad(token_ids, (0, steps))
        state = features[rows].to(device, self.dtype)
        positions = position_ids[rows].to(device) - 1
        keys = TeacherKeys(self, document_ids[rows].to(device))
        out = []
        for step in range(steps):
            logits, state = self.step(
                tokens[rows + step].to(device),
                state,
                positions + step,
                keys.attend,
                step,
                trace or _no_trace,
            )
            whole = logits.new_zeros(len(token_ids), logits.shape[-1])
            whole[rows.to(device)] = logits
            out.append(whole)
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
        """A greedy chain behind one prefix, as the server drafts.

        Args:
            token_ids: [n] int64, the rows of one request.
            features: [n, n_aux * target width].
            position_ids: [n] int64, counted from 1 as in training.
            steps: Number of drafted tokens.
            draft_ids: Draft ids to feed back instead of the own choice [steps - 1].

        Returns:
            Logits [steps, draft vocab] and the own choices (draft ids) [steps].
        """
        keys = ServerKeys(self, position_ids.to(self.device) - 1)
        tokens = token_ids.to(self.device)
        state = features.to(self.device, self.dtype)
        logits, chosen = [], []
        for step in range(steps):
            row, state = self.step(
                tokens, state, keys.positions, keys.attend, step, _no_trace
            )
            logits.append(row[-1])
            chosen.append(row[-1].argmax())
            if step + 1 < steps:
                fed = chosen[-1] if draft_ids is None else draft_ids[step]
                tokens, state = self.to_target(fed.reshape(1)), state[-1:]
                keys.advance()
        return torch.stack(logits), torch.stack(chosen)

    def to_target(self, draft_ids: torch.Tensor) -> torch.Tensor:
        """Draft ids -> target ids, through the hot token ids if there are any."""
        draft_ids = draft_ids.to(self.device)
        if self.hot_token_id is None:
            return draft_ids
        return self.hot_token_id.to(self.device)[draft_ids]


class PluginEagle3Reference(Eagle3Reference):
    """``SpecExportEagle3ForCausalLM``: the same forward with the keys stock ignores."""

    plugin = True


def _no_trace(step: int, stage: str, value: torch.Tensor) -> None:
    return None


def _parameters(config: ServingConfig) -> dict[str, Parameter]:
    """Name, shape and initial value of each parameter of the class."""
    hidden, inter = config.hidden_size, config.intermediate_size
    features = config.target_width * config.num_aux
    q, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    out = {
        "model.embed_tokens.weight": Parameter((config.vocab_size, hidden)),
        "model.fc.weight": Parameter((hidden, features)),
        "model.norm.weight": Parameter((hidden,), "ones"),
    }
    if config.fc_bias:
        out["model.fc.bias"] = Parameter((hidden,))
    if config.input_norm:
        out["model.input_norm.weight"] = Parameter((features,), "ones")
    if config.fc_norm:
        for j in range(config.num_aux):
            out[f"model.fc_norm.{j}.weight"] = Parameter((config.target_width,), "ones")
    for i in range(config.num_layers):
        layer = f"model.layers.{i}"
        for norm in ("input_layernorm", "hidden_norm", "post_attention_layernorm"):
            used = i == 0 or norm != "input_layernorm"
            out[f"{layer}.{norm}.weight"] = Parameter((hidden,), "ones", used=used)
        width = 2 * hidden if i == 0 else hidden
        shards = (("q", q), ("k", kv), ("v", kv))
        qkv = f"{layer}.self_attn.qkv_proj"
        out[f"{qkv}.weight"] = Parameter((q + 2 * kv, width), shards=shards)
        if config.qkv_bias:
            out[f"{qkv}.bias"] = Parameter((q + 2 * kv,), shards=shards)
        if config.qk_norm:
            for part in ("q", "k"):
                name = f"{layer}.self_attn.{part}_norm.weight"
                out[name] = Parameter((config.head_dim,), "ones")
        out[f"{layer}.self_attn.o_proj.weight"] = Parameter((hidden, q))
        if config.o_bias:
            out[f"{layer}.self_attn.o_proj.bias"] = Parameter((hidden,), "zeros")
        halves = (("gate", inter), ("up", inter))
        out[f"{layer}.mlp.gate_up_proj.weight"] = Parameter(
            (2 * inter, hidden), shards=halves
        )
        out[f"{layer}.mlp.down_proj.weight"] = Parameter((hidden, inter))
        if config.mlp_bias:
            out[f"{layer}.mlp.gate_up_proj.bias"] = Parameter(
                (2 * inter,), shards=halves
            )
            out[f"{layer}.mlp.down_proj.bias"] = Parameter((hidden,))
    if not config.tied:
        out["lm_head.weight"] = Parameter((config.draft_vocab_size, hidden))
    return out
