"""SGLang's model classes without a server: its runtime started, a draft loaded.

For the scripts of this folder, which run in SGLang's Python and find this module beside
themselves. SGLang is imported where it is needed: some of them have to prepare that.
"""

from __future__ import annotations

import importlib
import inspect
import json
import os
import socket
from collections.abc import Callable
from typing import Any, NoReturn

import torch
import torch.nn.functional as F

os.environ["SGLANG_USE_CPU_ENGINE"] = "1"


def print_answer(make: Callable[[], Any]) -> NoReturn:
    """Print what ``make`` returns as one JSON object and end the process.

    What SGLang prints meanwhile goes to standard error.
    """
    output = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    output.write(json.dumps(make()) + "\n")
    output.flush()
    os._exit(0)  # threads of SGLang would keep the process


def plain_args(target: str, **more: Any) -> Any:
    """``ServerArgs`` for a CPU, in float32; ``more`` are further ones."""
    from sglang.srt.server_args import ServerArgs

    return ServerArgs(
        model_path=target,
        device="cpu",
        dtype="float32",
        attention_backend="torch_native",
        disable_cuda_graph=True,
        skip_tokenizer_init=True,
        context_length=512,
        **more,
    )


def start(args: Any) -> None:
    """One process, no accelerator, whatever the release calls it."""
    from sglang.srt.configs.model_config import ModelConfig

    config = ModelConfig.from_server_args(args)
    try:
        bootstrap = importlib.import_module("sglang.srt.distributed.bootstrap")
        runtime = importlib.import_module("sglang.srt.runtime_context")
        ranks = runtime.SpawnRanks(world_rank=0, gpu_id=0)
    except (ImportError, AttributeError):
        _start_older(args, config)
        return
    runtime.publish(args, role="scheduler", ranks=ranks)
    bootstrap.init_parallel_runtime(server_args=args, device="cpu", dist_port=_free())
    bootstrap.init_layer_runtime(model_config=config)


def _start_older(args: Any, config: Any) -> None:
    """Before 0.5.22: the parts of ``init_torch_distributed``."""
    from sglang.srt.distributed import (
        init_distributed_environment,
        initialize_model_parallel,
    )
    from sglang.srt.layers.dp_attention import initialize_dp_attention

    server_args = importlib.import_module("sglang.srt.server_args")
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
        distributed_init_method=f"tcp://127.0.0.1:{_free()}",
    )
    initialize_model_parallel()
    initialize_dp_attention(args, config)


def _free() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def load_draft(args: Any, folder: str) -> Any:
    """The class that SGLang takes for a draft, filled by its own loader."""
    from sglang.srt.configs.device_config import DeviceConfig
    from sglang.srt.configs.load_config import LoadConfig
    from sglang.srt.configs.model_config import ModelConfig
    from sglang.srt.model_loader import get_model_loader

    config = ModelConfig.from_server_args(args, model_path=folder, is_draft_model=True)
    two = len(inspect.signature(get_model_loader).parameters) > 1
    loader = get_model_loader(LoadConfig(), *([config] if two else []))
    return loader.load_model(model_config=config, device_config=DeviceConfig("cpu"))


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
