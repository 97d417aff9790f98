"""Load a draft with the model loader of one SGLang release, and run its forward.

Runs in SGLang's Python. The release comes first on ``PYTHONPATH`` as an unpacked wheel;
its own pins of torch and transformers are not installed, so this is no server: the
attention kernel is a plain one, and the forward is called by hand, once over a prefix
and then token by token. Prints one JSON object.

    python release_check.py TARGET DRAFT...
"""

from __future__ import annotations

import importlib
import inspect
import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from transformers.models.auto import configuration_auto

from spec_export.judge.reference.eagle3 import PluginEagle3Reference

os.environ["SGLANG_USE_CPU_ENGINE"] = "1"


def tolerate_newer_transformers() -> None:
    """Older releases register configs that transformers has by now, and fail."""
    mapping = configuration_auto._LazyConfigMapping
    register = mapping.register

    def again(self: Any, key: str, value: Any, exist_ok: bool = False) -> None:
        register(self, key, value, exist_ok=True)

    mapping.register = again


def start_runtime(args: Any) -> None:
    """One process, no accelerator, whatever the release calls it."""
    from sglang.srt.configs.model_config import ModelConfig

    server_args = importlib.import_module("sglang.srt.server_args")
    config = ModelConfig.from_server_args(args)
    try:
        bootstrap = importlib.import_module("sglang.srt.distributed.bootstrap")
        runtime = importlib.import_module("sglang.srt.runtime_context")
        ranks = runtime.SpawnRanks(world_rank=0, gpu_id=0)
    except (ImportError, AttributeError):
        start_older_runtime(server_args, args, config)
        return
    runtime.publish(args, role="scheduler", ranks=ranks)
    bootstrap.init_parallel_runtime(server_args=args, device="cpu", dist_port=free())
    bootstrap.init_layer_runtime(model_config=config)


def start_older_runtime(server_args: Any, args: Any, config: Any) -> None:
    """Before 0.5.22: the parts of ``init_torch_distributed``."""
    from sglang.srt.distributed import (
        init_distributed_environment,
        initialize_model_parallel,
    )
    from sglang.srt.layers.dp_attention import initialize_dp_attention

    try:
        runtime = importlib.import_module("sglang.srt.runtime_context")
        runtime.publish(args, role="scheduler")
    except (ImportError, AttributeError):
        pass
    server_args.set_global_server_args_for_scheduler(args)
    init_distributed_environment(
        world_size=1,
        rank=0,
        local_rank=0,
        backend="gloo",
        distributed_init_method=f"tcp://127.0.0.1:{free()}",
    )
    initialize_model_parallel()
    initialize_dp_attention(args, config)


def free() -> int:
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class PlainAttention(torch.nn.Module):
    """Stands in for the attention kernel and its cache; one request."""

    def __init__(self, kernel: Any) -> None:
        super().__init__()
        self.heads, self.width = kernel.tp_q_head_num, kernel.head_dim
        self.window = kernel.sliding_window_size
        self.keys = self.values = torch.empty(0)

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, forward_batch: Any
    ) -> torch.Tensor:
        q, k, v = (x.view(len(x), -1, self.width) for x in (q, k, v))
        self.keys, self.values = torch.cat([self.keys, k]), torch.cat([self.values, v])
        rows = torch.arange(len(self.keys))
        distance = rows[-len(q) :, None] - rows
        seen = distance >= 0
        if self.window is not None and self.window >= 0:
            seen &= distance <= self.window
        group = self.heads // k.shape[1]
        out = F.scaled_dot_product_attention(
            q.transpose(0, 1),
            self.keys.repeat_interleave(group, 1).transpose(0, 1),
            self.values.repeat_interleave(group, 1).transpose(0, 1),
            attn_mask=seen,
        )
        return out.transpose(0, 1).reshape(len(q), -1)


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
    from sglang.srt.configs.device_config import DeviceConfig
    from sglang.srt.configs.load_config import LoadConfig
    from sglang.srt.configs.model_config import ModelConfig
    from sglang.srt.model_loader import get_model_loader
    from sglang.srt.server_args import ServerArgs

    args = ServerArgs(
        model_path=target,
        device="cpu",
        dtype="float32",
        attention_backend="torch_native",
        disable_cuda_graph=True,
        skip_tokenizer_init=True,
        context_length=512,
        speculative_algorithm="EAGLE3",
        speculative_draft_model_path=drafts[0],
        speculative_num_steps=3,
        speculative_eagle_topk=1,
        speculative_num_draft_tokens=4,
    )
    start_runtime(args)
    answers = {}
    for draft in drafts:
        config = ModelConfig.from_server_args(
            args, model_path=draft, is_draft_model=True
        )
        two = len(inspect.signature(get_model_loader).parameters) > 1
        loader = get_model_loader(LoadConfig(), *([config] if two else []))
        try:
            model = loader.load_model(
                model_config=config, device_config=DeviceConfig("cpu")
            )
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
    output = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    tolerate_newer_transformers()
    output.write(json.dumps(load(*sys.argv[1:])) + "\n")
    output.flush()
    os._exit(0)  # threads of SGLang would keep the process
