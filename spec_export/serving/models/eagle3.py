"""EAGLE-3 drafts as speculators trains them, on SGLang's own layers.

SGLang's ``LlamaForCausalLMEagle3`` ignores ``norm_before_residual``, q/k norms, q/k/v
and MLP biases and windows of single layers, all without a word. This class computes
them; the rest is the stock class: tensor parallelism, KV cache, CUDA graphs, sharing
of embedding and head with the target, ``norm_output`` and the loading of names.

Runs with SGLang 0.5.12 and newer. What differs between those releases and matters
here: the arguments of ``LlamaDecoderLayer`` (0.5.13, 0.5.22), which are therefore
given by keyword, and ``input_norm``, which the stock class has since 0.5.17.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import Any

import torch
from sglang.srt.layers.activation import SiluAndMul
from sglang.srt.layers.layernorm import RMSNorm
from sglang.srt.layers.linear import (
    MergedColumnParallelLinear,
    QKVParallelLinear,
    RowParallelLinear,
)
from sglang.srt.models import llama_eagle3 as stock
from sglang.srt.utils import add_prefix
from torch import nn

from spec_export.serving.strict import load_weights


class BiasedMLP(nn.Module):
    """The gated SiLU MLP with biases, which ``LlamaMLP`` cannot have."""

    def __init__(self, config: Any, quant_config: Any, prefix: str) -> None:
        super().__init__()
        hidden, inter = config.hidden_size, config.intermediate_size
        self.gate_up_proj = MergedColumnParallelLinear(
            hidden,
            [inter] * 2,
            bias=True,
            quant_config=quant_config,
            prefix=add_prefix("gate_up_proj", prefix),
        )
        self.down_proj = RowParallelLinear(
            inter,
            hidden,
            bias=True,
            quant_config=quant_config,
            prefix=add_prefix("down_proj", prefix),
        )
        self.act_fn = SiluAndMul()

    def forward(self, x: torch.Tensor, forward_batch: Any = None) -> torch.Tensor:
        """[rows, hidden] -> [rows, hidden]."""
        x, _ = self.gate_up_proj(x)
        x, _ = self.down_proj(self.act_fn(x))
        return x


class Eagle3DecoderLayer(stock.LlamaDecoderLayer):
    """One layer; the first one takes embedding and state side by side."""

    def __init__(
        self, config: Any, layer_id: int, quant_config: Any, prefix: str
    ) -> None:
        super().__init__(
            config, layer_id=layer_id, quant_config=quant_config, prefix=prefix
        )
        attention = self.self_attn
        self.norm_before_residual = bool(getattr(config, "norm_before_residual", False))
        self.qk_norm = bool(getattr(config, "qk_norm", False))
        if getattr(config, "attention_bias", False):
            # The stock layer gives o_proj a bias and builds qkv_proj without one.
            attention.qkv_proj = QKVParallelLinear(
                (2 if self.is_input_layer else 1) * config.hidden_size,
                attention.head_dim,
                attention.total_num_heads,
                attention.total_num_kv_heads,
                bias=True,
                quant_config=quant_config,
                prefix=add_prefix("qkv_proj", prefix),
            )
        if self.qk_norm:
            attention.q_norm = RMSNorm(attention.head_dim, eps=config.rms_norm_eps)
            attention.k_norm = RMSNorm(attention.head_dim, eps=config.rms_norm_eps)
        if getattr(config, "mlp_bias", False):
            self.mlp = BiasedMLP(config, quant_config, prefix)
        if not self.is_input_layer:
            # Only the first layer sees embeddings; left in, it would be a parameter
            # that no tensor sets.
            del self.input_layernorm

    def forward(
        self,
        positions: torch.Tensor,
        embeds: torch.Tensor,
        hidden_states: torch.Tensor,
        forward_batch: Any,
        residual: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Rows x hidden in, the layer's output and its residual out.

        The sum of the two is the residual stream; the next norm adds them up.
        """
        x: torch.Tensor = hidden_states
        if self.is_input_layer:
            residual, x = x, self.hidden_norm(x)
            if self.norm_before_residual:
                residual = x
            x = torch.cat([self.input_layernorm(embeds), x], dim=-1)
        else:
            x, residual = self.hidden_norm(x, residual)
        x = self._attend(positions, x, forward_batch)
        x, residual = self.post_attention_layernorm(x, residual)
        return self.mlp(x), residual

    def _attend(
        self, positions: torch.Tensor, x: torch.Tensor, forward_batch: Any
    ) -> torch.Tensor:
        attention = self.self_attn
        if not self.qk_norm:
            out: torch.Tensor = attention(
                positions=positions, hidden_states=x, forward_batch=forward_batch
            )
            return out
        qkv, _ = attention.qkv_proj(x)
        q, k, v = qkv.split(
            [attention.q_size, attention.kv_size, attention.kv_size], dim=-1
        )
        heads = (-1, attention.head_dim)
        q = attention.q_norm(q.reshape(heads)).view(q.shape)
        k = attention.k_norm(k.reshape(heads)).view(k.shape)
        q, k = attention.rotary_emb(positions, q, k)
        out, _ = attention.o_proj(attention.attn(q, k, v, forward_batch))
        return out


class Eagle3Model(stock.LlamaModel):
    """The stock model with our layers; turns features into a state itself.

    Made from a stock model without layers by ``complete``, because the stock class
    names the class of its model and of its layers itself.
    """

    def complete(self, config: Any, quant_config: Any, prefix: str) -> None:
        """Add what the stock model lacks.

        Raises:
            ValueError: ``layer_types`` does not fit the number of layers, or has a
                window without ``sliding_window``.
        """
        self.config = config
        layers = []
        for i, window in enumerate(layer_windows(config)):
            layer = Eagle3DecoderLayer(config, i, quant_config, prefix)
            if window is not None:
                layer.self_attn.attn.sliding_window_size = window
            layers.append(layer)
        self.layers = nn.ModuleList(layers)
        width = self.fc.in_features
        eagle_config = getattr(config, "eagle_config", None) or {}
        before_fc = getattr(config, "norm_before_fc", False)
        if not hasattr(self, "input_norm"):
            self.input_norm = (
                RMSNorm(width, eps=config.rms_norm_eps)
                if eagle_config.get("norm_before_fc", before_fc)
                else None
            )

    def forward(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        forward_batch: Any,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        """As the stock model, which takes a state of its own width as it is."""
        spec_info = forward_batch.spec_info
        given = spec_info.hidden_states
        spec_info.hidden_states = self.state(given, forward_batch)
        try:
            return super().forward(input_ids, positions, forward_batch, *args, **kwargs)
        finally:
            spec_info.hidden_states = given

    def state(self, given: torch.Tensor, forward_batch: Any) -> torch.Tensor:
        """The state [rows, hidden] of the first layer.

        ``given`` is the target's features [rows, n_aux * width] where a round starts
        (the prompt's and the accepted tokens' pass), and the draft's own state of the
        step before in the steps after it, which alone run in decode mode. The widths
        tell the two apart unless there is one auxiliary layer; then the mode does.
        """
        own = given.shape[-1] == self.fc.out_features
        if own and (
            self.fc.in_features != self.fc.out_features or _decodes(forward_batch)
        ):
            return given
        x = given if self.input_norm is None else self.input_norm(given)
        if self.fc_norm is not None:
            chunks = x.chunk(len(self.fc_norm), dim=-1)
            x = torch.cat(
                [norm(part) for norm, part in zip(self.fc_norm, chunks, strict=True)],
                dim=-1,
            )
        fused: torch.Tensor = self.fc(x)
        return fused


def _decodes(forward_batch: Any) -> bool:
    """Whether a batch is a draft step behind the first one.

    Under data parallelism SGLang may relabel a decode batch as an extend of one token
    per row and keeps the mode that it had.
    """
    before = getattr(forward_batch, "_original_forward_mode", None)
    return bool(
        forward_batch.forward_mode.is_decode_or_idle()
        or (before is not None and before.is_decode())
    )


def layer_windows(config: Any) -> list[int | None]:
    """Per layer the largest distance of a key that is seen; None: all are.

    speculators counts the query's own position, SGLang does not.

    Raises:
        ValueError: as ``Eagle3Model.complete``.
    """
    layers = config.num_hidden_layers
    kinds = getattr(config, "layer_types", None) or ["full_attention"] * layers
    if len(kinds) != layers:
        raise ValueError(f"{len(kinds)} layer_types for {layers} layers")
    if "sliding_attention" not in kinds:
        return [None] * layers
    size = getattr(config, "sliding_window", None)
    if not size:
        raise ValueError("layer_types has sliding_attention, but no sliding_window")
    return [size - 1 if kind == "sliding_attention" else None for kind in kinds]


class SpecExportEagle3ForCausalLM(stock.LlamaForCausalLMEagle3):
    """EAGLE-3 draft; ``config.json`` as ``ckpt_templates/eagle3-plugin.yaml`` says."""

    _own_window: int | None = None

    def __init__(self, config: Any, quant_config: Any = None, prefix: str = "") -> None:
        bare = copy.copy(config)
        bare.num_hidden_layers = 0
        super().__init__(bare, quant_config, prefix)
        config.draft_vocab_size = bare.draft_vocab_size
        self.config = config
        self.model.__class__ = Eagle3Model
        self.model.complete(config, quant_config, add_prefix("model", prefix))
        flag = super().get_attention_sliding_window_size()
        if flag is not None:  # --speculative-draft-window-size, for all layers
            for layer in self.model.layers:
                layer.self_attn.attn.sliding_window_size = flag
        self._own_window = max(
            (w for w in layer_windows(config) if w is not None), default=None
        )

    def get_attention_sliding_window_size(self) -> int | None:
        """The window for which the attention backends prepare; None: no window."""
        flag: int | None = super().get_attention_sliding_window_size()
        return self._own_window if flag is None else flag

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Load, and refuse what does not fit (``SPEC_EXPORT_STRICT``)."""
        load_weights(self, super().load_weights, weights)


EntryClass = [SpecExportEagle3ForCausalLM]
