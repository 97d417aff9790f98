"""Run SGLang's own draft class on a CPU: a prefix, then greedy steps behind it.

Runs in SGLang's environment with ``shim/`` and this repository on ``PYTHONPATH``:
``forward_check.py TARGET OUT DRAFT...``. Real are ServerArgs, parallel state, the model
loader, the memory pools, the attention backend, ForwardBatch and the logits processor.
Each draft folder holds ``rows.pt``: token ids and features of a prefix, the target's
embedding, and the draft ids to feed back. Written is ``OUT/<draft's name>.pt``: the
hidden states of the prefix, then logits and hidden state of each step.
"""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from engine import server_args
from runtime import start
from sglang.srt.configs.device_config import DeviceConfig
from sglang.srt.configs.load_config import LoadConfig
from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, ReqToTokenPool
from sglang.srt.model_executor.forward_batch_info import (
    CaptureHiddenMode,
    ForwardBatch,
    ForwardMode,
)
from sglang.srt.model_executor.forward_context import ForwardContext, forward_context
from sglang.srt.model_loader import get_model
from sglang.srt.server_args import ServerArgs

from spec_export.serving.plugin import register

SLOTS = 64


class Draft:
    """A loaded draft with a cache of its own."""

    def __init__(self, args: ServerArgs, folder: Path, embed: torch.Tensor) -> None:
        config = ModelConfig.from_server_args(
            args, model_path=str(folder), is_draft_model=True
        )
        self.model: Any = get_model(
            model_config=config,
            load_config=LoadConfig(),
            device_config=DeviceConfig("cpu"),
        )
        # What EagleDraftWorker.init_lm_head does.
        self.model.set_embed(torch.nn.Parameter(embed, requires_grad=False))
        self.requests = ReqToTokenPool(
            size=4, max_context_len=512, device="cpu", enable_memory_saver=False
        )
        self.requests.req_to_token[1, :SLOTS] = torch.arange(1, SLOTS + 1).int()
        pool = MHATokenToKVPool(
            size=1024,
            page_size=1,
            dtype=torch.float32,
            head_num=config.hf_config.num_key_value_heads,
            head_dim=config.head_dim,
            layer_num=config.hf_config.num_hidden_layers,
            device="cpu",
            enable_memory_saver=False,
        )
        heads = config.hf_config.num_attention_heads
        runner: Any = SimpleNamespace(
            device="cpu",
            req_to_token_pool=self.requests,
            token_to_kv_pool=pool,
            use_mla_backend=False,
            model_config=SimpleNamespace(context_len=512, num_attention_heads=heads),
        )
        self.attention = TorchNativeAttnBackend(runner)
        self.length = 0

    def forward(self, tokens: torch.Tensor, hidden: torch.Tensor) -> Any:
        """More rows of the one request: all of the prefix at once, then one by one."""
        before, count = self.length, len(tokens)
        self.length += count
        mode = ForwardMode.DECODE if before else ForwardMode.EXTEND
        positions = torch.arange(before, self.length)
        batch = ForwardBatch(
            forward_mode=mode,
            batch_size=1,
            input_ids=tokens,
            req_pool_indices=torch.tensor([1]),
            seq_lens=torch.tensor([self.length]),
            out_cache_loc=positions + 1,
            seq_lens_sum=self.length,
            seq_lens_cpu=torch.tensor([self.length]),
            positions=positions,
            return_logprob=False,
        )
        batch.spec_info = SimpleNamespace(
            hidden_states=hidden, is_draft_input=lambda: True
        )
        batch.capture_hidden_mode = CaptureHiddenMode.FULL
        if mode.is_extend():
            batch.extend_seq_lens = torch.tensor([count], dtype=torch.int32)
            batch.extend_seq_lens_cpu = [count]
            batch.extend_prefix_lens = torch.tensor([0], dtype=torch.int32)
            batch.extend_prefix_lens_cpu = [0]
            batch.extend_start_loc = torch.tensor([0], dtype=torch.int32)
            batch.extend_num_tokens = count
        with (
            torch.no_grad(),
            forward_context(ForwardContext(attn_backend=self.attention)),
        ):
            self.attention.init_forward_metadata(batch)
            return self.model.forward(tokens, positions, batch)


def run(args: ServerArgs, folder: Path) -> dict[str, Any]:
    """Prefix and steps of one draft."""
    rows = torch.load(folder / "rows.pt")
    draft = Draft(args, folder, rows["embed"])
    out = draft.forward(rows["tokens"], rows["features"])
    logits, hidden = [out.next_token_logits], [out.hidden_states]
    hot = draft.model.hot_token_id
    for fed in rows["draft_ids"]:
        token = fed.reshape(1) if hot is None else hot[fed].reshape(1)
        out = draft.forward(token, out.hidden_states[-1:])
        logits.append(out.next_token_logits)
        hidden.append(out.hidden_states)
    return {
        "class": type(draft.model).__name__,
        "logits": torch.cat(logits),
        "hidden": torch.cat(hidden),
    }


def main() -> None:
    """All drafts in one process: SGLang's imports are most of the time."""
    target, out, *drafts = sys.argv[1:]
    register()
    job = {"target": target, "extra": {"context_length": 256}}
    args = ServerArgs(**server_args(job, drafts[0]))
    start(args)
    for draft in map(Path, drafts):
        torch.save(run(args, draft), Path(out) / f"{draft.name}.pt")


if __name__ == "__main__":
    main()
