"""The target in transformers: is this how it continues, and which features are these?

A process of its own, executed by its path, with the files of a job and of its answer
as arguments: the largest model of a comparison is gone with it.

Job: {"model": folder, "device", "dtype": "float32" or "auto", "layers": [id, ...],
"texts": [[id, ...]], "prompts": [length, ...], "more": n, "output": file}. The ids of
``layers`` are speculators': k is the input of decoder layer k, and the number of layers
the output of the last, before the final norm.

Answer: {"dtype": name}, and tensors in ``output``, of each text i:
    tokens.i  [n + more] int64: the text, and ``more`` tokens that follow greedily
    aux.i     [n, layers * width] float32: the features of its tokens
    exact.i   the same, computed in float32; only if it is another dtype
    gap.i     [n - prompt] float32: by how much the best token of the target was better
              than the text's, as a share of the range of its logits
"""

from __future__ import annotations

import json
import runpy
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM


@torch.no_grad()
def look(model: Any, ids: torch.Tensor, layers: list[int]) -> tuple[Any, torch.Tensor]:
    """A forward with the features [n, layers * width] of one text."""
    last: list[torch.Tensor] = []
    norm = model.get_decoder().norm
    hook = norm.register_forward_pre_hook(lambda _, x: last.append(x[0].detach()))
    try:
        out = model(ids, output_hidden_states=True, use_cache=True)
    finally:
        hook.remove()
    inputs = [*out.hidden_states[:-1], last[0]]
    return out, torch.cat([inputs[k][0] for k in layers], -1).float().cpu()


@torch.no_grad()
def follow(model: Any, out: Any, count: int) -> list[int]:
    """The next tokens behind a forward, greedily."""
    found: list[int] = []
    while True:
        best = out.logits[:, -1:].argmax(-1)
        found.append(int(best))
        if len(found) >= count:
            return found
        out = model(best, past_key_values=out.past_key_values, use_cache=True)


def main(job: dict[str, Any]) -> dict[str, Any]:
    """Do a job."""
    model = AutoModelForCausalLM.from_pretrained(job["model"], dtype=job["dtype"])
    model = model.eval().to(job["device"])
    dtype = str(model.dtype).removeprefix("torch.")
    tensors: dict[str, torch.Tensor] = {}
    for i, (text, prompt) in enumerate(zip(job["texts"], job["prompts"], strict=True)):
        ids = torch.tensor([text], device=job["device"])
        out, tensors[f"aux.{i}"] = look(model, ids, job["layers"])
        scores = out.logits[0, prompt - 1 : -1].float()
        best, least = scores.amax(-1), scores.amin(-1)
        chosen = scores.gather(-1, ids[0, prompt:, None])[:, 0]
        tensors[f"gap.{i}"] = ((best - chosen) / (best - least)).cpu()
        more = follow(model, out, job["more"])
        tensors[f"tokens.{i}"] = torch.tensor([*text, *more])
    if dtype != "float32":
        model = model.float()
        for i, text in enumerate(job["texts"]):
            ids = torch.tensor([text], device=job["device"])
            _, tensors[f"exact.{i}"] = look(model, ids, job["layers"])
    save_file(tensors, job["output"])
    return {"dtype": dtype}


if __name__ == "__main__":
    runpy.run_path(str(Path(__file__).with_name("process.py")))["end_with_asker"]()
    answer = json.dumps(main(json.loads(Path(sys.argv[1]).read_text())))
    Path(sys.argv[2]).write_text(answer)
