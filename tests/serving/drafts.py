"""A tiny target and under-trained EAGLE-3 drafts for it, one per variant.

The drafts are speculators' own modules, trained with their own loss on the target's
continuations and saved in speculators' checkpoint form. They are trained only until
they are right now and then, and their norms are far from one: a draft that is as good
as its vocabulary allows, or one whose norms are ones, would not notice half of the
mistakes that an export can make.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from speculators.losses import resolve_loss_config
from speculators.models.eagle3 import Eagle3DraftModel
from speculators.train.checkpointer import convert_float_dtype, patch_config_dtype
from torch import Tensor, nn
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PretrainedConfig,
    PreTrainedModel,
)

from tests.serving.simulate import (
    STEPS,
    Continuation,
    accept_length,
    oracle,
    pack,
    simulate,
)

VOCAB, DRAFT_VOCAB, HIDDEN, LAYERS = 512, 128, 64, 8
LAYER_IDS = [1, 4, 6]  # speculators' counting; not the default ones
NORM_SPREAD = 0.4  # deviation of the logarithm of the weights that norms start with
WEAK, STRONG = 1.4, 0.75  # see train(): accept length, share of the oracle's gain


@dataclass(frozen=True)
class Variant:
    """What speculators' EAGLE-3 flags can make of a draft that SGLang serves."""

    layers: int
    norm_output: bool
    fc: str  # none | fc_norm | norm_before_fc
    vocab: int
    until: ClassVar[float] = WEAK  # accept length at which its training ends

    @property
    def name(self) -> str:
        """Name of its folder and of its test."""
        output = "norm_output" if self.norm_output else "plain_output"
        return f"{self.layers}l-{output}-{self.fc}-v{self.vocab}"

    def layer_config(self) -> PretrainedConfig:
        """Configuration of its decoder layers."""
        return llama_config(self.layers)

    def more_flags(self) -> dict[str, Any]:
        """Further arguments of ``Eagle3DraftModel.from_training_args``."""
        return {"norm_before_residual": False, "target_layer_ids": list(LAYER_IDS)}


VARIANTS = [
    Variant(*flags)
    for flags in itertools.product(
        (1, 2),
        (False, True),
        ("none", "fc_norm", "norm_before_fc"),
        (DRAFT_VOCAB, VOCAB),
    )
]
# Six in which every flag takes every value, and most pairs of values meet.
SPREAD = [
    Variant(1, False, "none", DRAFT_VOCAB),
    Variant(1, False, "norm_before_fc", VOCAB),
    Variant(1, True, "fc_norm", DRAFT_VOCAB),
    Variant(2, False, "fc_norm", VOCAB),
    Variant(2, True, "none", VOCAB),
    Variant(2, True, "norm_before_fc", DRAFT_VOCAB),
]


def llama_config(layers: int) -> LlamaConfig:
    """Shapes shared by the target and the decoder layers of its drafts."""
    return LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=HIDDEN,
        intermediate_size=128,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=512,
        rms_norm_eps=1e-5,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        initializer_range=0.25,
        bos_token_id=VOCAB - 2,
        eos_token_id=VOCAB - 1,
        tie_word_embeddings=False,
    )


def make_target(folder: Path, seed: int = 0) -> PreTrainedModel:
    """Save a random Llama, its weights fp32 with values that bfloat16 holds too.

    A checkpoint keeps the target's embedding in bfloat16; here that loses nothing.
    """
    torch.manual_seed(seed)
    target = LlamaForCausalLM(llama_config(LAYERS)).eval()
    for parameter in target.parameters():
        parameter.data = parameter.data.bfloat16().float()
    target.save_pretrained(folder)
    return target


def random_prompts(count: int) -> list[list[int]]:
    """Prompts of 4 to 11 random tokens."""
    generator = torch.Generator().manual_seed(1)
    return [
        torch.randint(0, VOCAB - 2, (4 + i % 8,), generator=generator).tolist()
        for i in range(count)
    ]


def token_maps(texts: list[Continuation]) -> tuple[Tensor, Tensor]:
    """t2d (bool) and d2t (offsets) of the ids that the target emits most often."""
    emitted = torch.cat([text.tokens[text.prompt :] for text in texts])
    often = emitted.bincount(minlength=VOCAB).argsort(descending=True, stable=True)
    kept = often[:DRAFT_VOCAB].sort().values
    t2d = torch.zeros(VOCAB, dtype=torch.bool)
    t2d[kept] = True
    return t2d, kept - torch.arange(DRAFT_VOCAB)


def new_draft(
    variant: Variant, target: Path, texts: list[Continuation]
) -> Eagle3DraftModel:
    """An untrained draft, built the way speculators' command line builds it."""
    torch.manual_seed(2)
    t2d, d2t = token_maps(texts)
    draft = Eagle3DraftModel.from_training_args(
        variant.layer_config(),
        t2d=t2d,
        d2t=d2t,
        draft_vocab_size=variant.vocab,
        norm_before_fc=variant.fc == "norm_before_fc",
        fc_norm=variant.fc == "fc_norm",
        norm_output=variant.norm_output,
        verifier_name_or_path=str(target),
        ttt_steps=STEPS,
        draft_attn_impl="eager",
        **variant.more_flags(),
    )
    fixed = ["q_norm.weight", "k_norm.weight"]  # spread_norms() cannot move them
    if draft.config.norm_before_residual:
        fixed.append("hidden_norm.weight")
    for name, parameter in draft.named_parameters():
        if name == "norm.weight" or name.endswith(tuple(fixed)):
            parameter.data = torch.exp(NORM_SPREAD * torch.randn_like(parameter))
        if name.endswith(".bias"):  # they start at zero
            parameter.data = torch.randn_like(parameter)
    return draft


def train(
    draft: Eagle3DraftModel, texts: list[Continuation], until: float = WEAK
) -> None:
    """Train until the draft is useful and far from done: accept length ``until``.

    Raises:
        AssertionError: if it got too good (more than ``STRONG`` of what an oracle
            gains over no draft at all), or was not good enough after 200 steps.
    """
    batch = pack(draft, texts)
    lasts = torch.cat([text.last[1:] for text in texts])
    masks = [torch.arange(1, len(text.tokens)) >= text.prompt for text in texts]
    loss_config = resolve_loss_config("kl_div", "eager")
    parameters = [p for p in draft.parameters() if p.requires_grad]
    optimizer = torch.optim.Adam(parameters, lr=1e-2)
    reached, steps = 1.0, 0
    while reached < until and steps < 200:
        for _ in range(10):
            _, loss, _ = draft(
                **batch,
                verifier_last_hidden_states=lasts[None],
                loss_mask=torch.cat(masks)[None],
                ttt_steps=STEPS,
                loss_config=loss_config,
            )
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        steps += 10
        reached = accept_length(simulate(draft, texts))
    best = accept_length(oracle(draft, texts))
    assert reached >= until, f"accept length {reached:.2f} after {steps} steps"
    assert reached - 1 <= STRONG * (best - 1), f"saturated: {reached:.2f} of {best:.2f}"


def spread_norms(draft: Eagle3DraftModel) -> None:
    """Move norms away from one without changing the function, not even a bit of it.

    Each channel is multiplied by a power of two, and the columns that read it in the
    linear layers behind the norm are divided by it. That cannot be done to the last
    norm, whose output may also be the draft's next state, nor to a first hidden_norm
    whose output is the residual, nor to q and k norms, which attention reads; those
    start far from one instead.
    """
    if draft.config.norm_before_residual:
        # Only hidden_norm reads what fc writes, so its size is nothing to the draft.
        draft.fc.weight.data *= 8
    for norm, linears, first in _norms_and_readers(draft):
        size = norm.weight.numel()
        scale = 2.0 ** torch.randint(-2, 3, (size,))
        norm.weight.data *= scale
        for linear in linears:
            linear.weight.data[:, first : first + size] /= scale


def _norms_and_readers(
    draft: Eagle3DraftModel,
) -> Iterator[tuple[nn.Module, list[nn.Linear], int]]:
    """Each norm, the linear layers behind it, and the first column that reads it."""
    if draft.input_norm is not None:
        yield draft.input_norm, [draft.fc], 0
    for j, norm in enumerate(draft.fc_norm or []):
        yield norm, [draft.fc], j * HIDDEN
    for i, layer in enumerate(draft.layers):
        attention, mlp = layer.self_attn, layer.mlp
        qkv = [attention.q_proj, attention.k_proj, attention.v_proj]
        yield layer.input_layernorm, qkv, 0
        # It reads the token's embedding and the state, side by side.
        if i == 0 and not draft.config.norm_before_residual:
            yield layer.hidden_norm, qkv, HIDDEN
        yield layer.post_attention_layernorm, [mlp.gate_proj, mlp.up_proj], 0


def save_checkpoint(draft: Eagle3DraftModel, folder: Path) -> None:
    """Save as speculators' trainer does: bfloat16 weights, corrected config."""
    state = convert_float_dtype(draft.state_dict(), torch.bfloat16)
    draft.save_pretrained(folder, state_dict=state)
    patch_config_dtype(folder / "config.json", torch.bfloat16)


def make_checkpoint(
    variant: Variant, target: Path, texts: list[Continuation], folder: Path
) -> None:
    """Build, train and save the draft of a variant."""
    draft = new_draft(variant, target, texts)
    train(draft, texts, variant.until)
    spread_norms(draft)
    save_checkpoint(draft, folder)
