"""SGLang's engine on a CPU, as a small server for the tests. Runs in its environment.

Reads one JSON job per line from standard input and writes one JSON answer per
line to standard output, until the input ends. Every job runs in a forked child,
so that the import of SGLang (about ten seconds) is paid once and no state passes
from one draft to the next. Inside the child SGLang starts its own processes; they
are forked as well instead of spawned, for the same reason. The HTTP test starts
the server the ordinary way and gets the same numbers.

Jobs:
    {"do": "serve", "target": dir, "draft": dir or null, "prompts": [[id, ...]],
     "max_new_tokens": n, "steps": n, "topk": n, "draft_tokens": n, "extra": {...}}
        -> {"prompts": [{"output_ids", "rounds", "histogram", "accept_length"}]}
        ``extra`` are further ``ServerArgs`` fields. Without a draft the last three
        are null.
    {"do": "load", "target": dir, "drafts": [dir, ...]}
        -> {"reports": {dir: {"class", "ignored", "unset"}}}
A job that fails is answered by {"error": text}. A job may have an "environment" of
variables that are set before anything of SGLang runs in the child.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ["SGLANG_USE_CPU_ENGINE"] = "1"

import sglang
import sglang.srt.managers.scheduler
import sglang.srt.models.registry
import torch
from runtime import start
from safetensors.torch import load_file

CONTEXT = 512  # tokens; the tiny targets allow no more
ANSWERS = "spec_verify_ct", "spec_correct_drafts_histogram", "spec_accept_length"


def server_args(job: dict[str, Any], draft: str | None) -> dict[str, Any]:
    """Arguments of ``sglang.Engine`` and ``ServerArgs`` for a CPU, in fp32.

    ``intel_amx`` given as ``attention_backend`` would be replaced on a CPU without
    AMX; the two narrower flags are taken as they are.
    """
    args = {
        "model_path": job["target"],
        "device": "cpu",
        "dtype": "float32",
        "attention_backend": "torch_native",
        "prefill_attention_backend": "intel_amx",
        "decode_attention_backend": "intel_amx",
        "disable_cuda_graph": True,
        "skip_tokenizer_init": True,
        "context_length": CONTEXT,
        "max_total_tokens": 16 * CONTEXT,
        "chunked_prefill_size": 8 * CONTEXT,
        "max_running_requests": 16,
        "log_level": "error",
    }
    if draft is not None:
        args |= {
            "speculative_algorithm": "EAGLE3",
            "speculative_draft_model_path": draft,
            "speculative_num_steps": job.get("steps", 3),
            "speculative_eagle_topk": job.get("topk", 1),
            "speculative_num_draft_tokens": job.get("draft_tokens", 4),
        }
    return args | job.get("extra", {})


def serve(job: dict[str, Any]) -> dict[str, Any]:
    """Generate greedily for all prompts in one batch."""
    multiprocessing.set_start_method("fork", force=True)
    multiprocessing.set_start_method = _keep_fork
    engine = sglang.Engine(**server_args(job, job["draft"]))
    outputs = engine.generate(
        input_ids=job["prompts"],
        sampling_params={
            "temperature": 0,
            "max_new_tokens": job["max_new_tokens"],
            "ignore_eos": True,
        },
    )
    engine.shutdown()
    rows = []
    for output in outputs:
        rounds, histogram, accept = (output["meta_info"].get(key) for key in ANSWERS)
        rows.append(
            {
                "output_ids": output["output_ids"],
                "rounds": rounds,
                "histogram": histogram,
                "accept_length": accept,
            }
        )
    return {"prompts": rows}


def _keep_fork(*args: object, **kwargs: object) -> None:
    """Stand in for ``set_start_method``: SGLang would switch back to spawning."""


def load(job: dict[str, Any]) -> dict[str, Any]:
    """Load drafts as SGLang's loader does and report what it would not say.

    SGLang drops unknown tensors and leaves parameters without a tensor as they
    are, both without a word. Here every parameter starts as NaN and the tensors
    are loaded one by one: a tensor after which as many NaNs are left as before
    was ignored, a parameter that still holds one was not set.
    """
    from sglang.srt.configs.model_config import ModelConfig
    from sglang.srt.model_loader.utils import (
        get_model_architecture,
        set_default_torch_dtype,
    )
    from sglang.srt.server_args import ServerArgs

    args = ServerArgs(**server_args(job, job["drafts"][0]))
    start(args)
    reports = {}
    for draft in job["drafts"]:
        config = ModelConfig.from_server_args(
            args, model_path=draft, is_draft_model=True
        )
        with set_default_torch_dtype(torch.float32):
            model = get_model_architecture(config)[0](config.hf_config)
        reports[draft] = _load_report(model, Path(draft))
    return {"reports": reports}


def _load_report(model: torch.nn.Module, draft: Path) -> dict[str, Any]:
    for parameter in model.parameters():
        parameter.data.fill_(float("nan"))
    unset, ignored = _nan_counts(model), []
    tensors: dict[str, torch.Tensor] = {}
    for file in sorted(draft.glob("*.safetensors")):
        tensors |= load_file(file)
    for name, tensor in tensors.items():
        token_map = getattr(model, "hot_token_id", None)  # EAGLE-3 only
        model.load_weights([(name, tensor)])
        left = _nan_counts(model)
        if left == unset and getattr(model, "hot_token_id", None) is token_map:
            ignored.append(name)
        unset = left
    return {
        "class": type(model).__name__,
        "ignored": sorted(ignored),
        "unset": sorted(name for name, count in unset.items() if count),
    }


def _nan_counts(model: torch.nn.Module) -> dict[str, int]:
    return {name: int(p.isnan().sum()) for name, p in model.named_parameters()}


JOBS: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {
    "serve": serve,
    "load": load,
}


def in_child(job: dict[str, Any]) -> dict[str, Any]:
    """Run a job in a forked child; SGLang kills its whole process when it fails."""
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(read)
        os.environ.update(job.get("environment", {}))
        try:
            answer = JOBS[job["do"]](job)
        except BaseException:
            answer = {"error": traceback.format_exc()}
        with os.fdopen(write, "w") as pipe:
            json.dump(answer, pipe)
        sys.stderr.flush()
        os._exit(0)  # no clean-up of things that belong to the parent
    os.close(write)
    with os.fdopen(read) as pipe:
        text = pipe.read()
    _, status = os.waitpid(pid, 0)
    if text:
        return json.loads(text)
    return {"error": f"the engine's process ended, exit status {status}"}


def main() -> None:
    """Answer jobs; what SGLang prints goes to standard error."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    answers.write(json.dumps({"sglang": sglang.__version__}) + "\n")
    answers.flush()
    for line in sys.stdin:
        answers.write(json.dumps(in_child(json.loads(line))) + "\n")
        answers.flush()


if __name__ == "__main__":
    main()
