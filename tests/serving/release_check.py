"""Load a draft with the model loader of one SGLang release, and run its forward.

Runs in SGLang's Python. The release comes first on ``PYTHONPATH`` as an unpacked wheel;
its own pins of torch and transformers are not installed, so this is no server: the
attention kernel is a plain one, and the forward is called by hand, once over a prefix
and then token by token. Prints one JSON object.

    python release_check.py TARGET DRAFT...
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from runtime import PlainAttention, load_draft, plain_args, print_answer, start
from safetensors.torch import load_file
from transformers.models.auto import configuration_auto

from spec_export.judge.reference.eagle3 import PluginEagle3Reference


def tolerate_newer_transformers() -> None:
    """Older releases register configs that transformers has by now, and fail."""
    mapping = configuration_auto._LazyConfigMapping
    register = mapping.register

    def again(self: Any, key: str, value: Any, exist_ok: bool = False) -> None:
        register(self, key, value, exist_ok=True)

    mapping.register = again


@torch.no_grad()
def difference(model: Any, target: Path, draft: Path, steps: int = 4) -> float:
    """Largest difference of the class's logits and the judge's, over their range."""
    from sglang.srt.model_executor.forward_batch_info import ForwardMode

    config = json.loads((draft / "config.json").read_text())
    embed = load_file(target / "model.safetensors")["model.embed_tokens.weight"]
    reference = PluginEagle3Reference(
        draft,
        config,
        embed=embed,
        head=None,
        release="0.5.23",
        dtype=torch.float32,
        device=torch.device("cpu"),
        window=None,
    )
    torch.manual_seed(3)
    tokens = torch.randint(0, len(embed), (24,))
    state = torch.randn(24, config["num_aux_hidden_states"] * embed.shape[1])
    positions = torch.arange(24)
    wanted, chosen = reference.free_running(tokens, state, positions + 1, steps)
    # set_embed of older releases empties a CUDA cache.
    model.model.embed_tokens.weight.data = embed
    for layer in model.model.layers:
        layer.self_attn.attn = PlainAttention(layer.self_attn.attn)
    found = []
    for step in range(steps):
        batch = SimpleNamespace(
            forward_mode=ForwardMode.DECODE if step else ForwardMode.EXTEND,
            spec_info=SimpleNamespace(hidden_states=state),
            mm_input_embeds=None,
            contains_mm_inputs=lambda: False,
        )
        hidden, (state,) = model.model(tokens, positions, batch)
        found.append(F.linear(hidden[-1], model.lm_head.weight)[: wanted.shape[1]])
        tokens, state = reference.to_target(chosen[step].reshape(1)), state[-1:]
        positions = positions[-1:] + 1
    gap = (torch.stack(found) - wanted).abs().max() / (wanted.max() - wanted.min())
    return float(gap)


def load(target: str, *drafts: str) -> dict[str, Any]:
    """One answer for each draft; ``error`` is what loading raised."""
    import sglang
    from sglang.srt.plugins import load_plugins

    load_plugins()  # as the scheduler does before anything else
    args = plain_args(
        target,
        speculative_algorithm="EAGLE3",
        speculative_draft_model_path=drafts[0],
        speculative_num_steps=3,
        speculative_eagle_topk=1,
        speculative_num_draft_tokens=4,
    )
    start(args)
    answers = {}
    for draft in drafts:
        try:
            model = load_draft(args, draft)
        except Exception as problem:
            answers[draft] = {"error": f"{type(problem).__name__}: {problem}"}
            continue
        answers[draft] = {
            "error": None,
            "class": type(model).__name__,
            "window": model.get_attention_sliding_window_size(),
            "compared": getattr(model, "_spec_export_loaded", False),
        }
        if answers[draft]["class"].startswith("SpecExport"):
            answers[draft]["difference"] = difference(model, Path(target), Path(draft))
    return {"sglang": sglang.__version__, "drafts": answers}


if __name__ == "__main__":
    tolerate_newer_transformers()
    print_answer(lambda: load(*sys.argv[1:]))
