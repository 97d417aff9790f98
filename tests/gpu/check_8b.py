"""Cast and layout legs of an 8B target's EAGLE-3 on one device: time and memory.

    python tests/gpu/check_8b.py [--device cuda] [--tiny] > figures.json

Needs torch >= 2.11, transformers >= 5.17 and speculators 0.9; reads and writes nothing
outside a temporary folder. The draft has the shapes of one for an 8B target (hidden
4096, inner 14336, vocabulary 128256, draft vocabulary 32000, random weights, norms far
from one) and one or two layers. Its forward is compiled, as speculators' is on CUDA;
the comparison has to go past that. Prints one JSON object; exit 1 if a leg does not
pass, takes over ten seconds on a GPU, or leaves memory behind.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

REPOSITORY = Path(__file__).resolve().parents[2]
LARGE = {
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 128256,
}
TINY = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 512,
}
POSITIONS, STEPS, SECONDS = 256, 3, 10.0
LEFT_BEHIND = 1 << 20  # bytes: allocators keep small things


def checkpoint_config(sizes: dict[str, int], draft_vocab: int, layers: int) -> Any:
    """A speculators ``config.json``."""
    return {
        "speculators_model_type": "eagle3",
        "architectures": ["Eagle3DraftModel"],
        "draft_vocab_size": draft_vocab,
        "eagle_aux_hidden_state_layer_ids": [2, 16, 29],
        "norm_before_residual": False,
        "norm_before_fc": True,
        "norm_output": True,
        "transformer_layer_config": {
            "model_type": "llama",
            "num_hidden_layers": layers,
            "hidden_act": "silu",
            "max_position_embeddings": 8192,
            "rms_norm_eps": 1e-5,
            "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0},
            **sizes,
        },
    }


def values_of(empty: torch.nn.Module, vocab: int, draft_vocab: int) -> dict[str, Any]:
    """Random values, in bfloat16 as they are saved."""
    torch.manual_seed(0)
    kept = torch.arange(draft_vocab) * (vocab // draft_vocab)
    out: dict[str, Any] = {
        "d2t": kept - torch.arange(draft_vocab),
        "t2d": torch.zeros(vocab, dtype=torch.bool).index_fill(0, kept, True),
    }
    for name, slot in empty.named_parameters():
        if name.startswith("verifier_"):
            continue
        if "norm" in name:
            value = torch.exp2(torch.rand(slot.shape) * 2 - 1)
        else:
            value = torch.randn(slot.shape) / slot.shape[-1] ** 0.5
        out[name] = value.bfloat16()
    return out


def write_export(folder: Path, config: Any, values: dict[str, Any]) -> None:
    """Names and keys of SGLang's class, written down here once more."""
    layer = config["transformer_layer_config"]
    many = layer["num_hidden_layers"] > 1
    tensors = {}
    for name, value in values.items():
        if name in ("t2d", "embed_tokens.weight"):
            continue
        if not name.startswith("layers.0.") and "input_layernorm" in name:
            name = name.replace("input_layernorm", "hidden_norm")
        tensors[name if many else name.replace("layers.0.", "midlayer.")] = value
    save_file(tensors, folder / "model.safetensors")
    written = {
        **{k: v for k, v in layer.items() if k != "model_type"},
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "dtype": "bfloat16",
        "torch_dtype": "bfloat16",
        "draft_vocab_size": config["draft_vocab_size"],
        "norm_before_fc": True,
        "norm_output": True,
        "tie_word_embeddings": False,
        "rope_theta": layer["rope_parameters"]["rope_theta"],
        "eagle_config": {
            "eagle_aux_hidden_state_layer_ids": [1, 15, 28],
            "norm_before_fc": True,
        },
    }
    (folder / "config.json").write_text(json.dumps(written))


class Memory:
    """Bytes on the device before, at most, and after; on a CPU nothing is known."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def __enter__(self) -> Memory:
        self.peak = self.left = self.before = 0
        if self.device.type == "cuda":
            gc.collect()
            torch.cuda.synchronize(self.device)
            torch.cuda.reset_peak_memory_stats(self.device)
            self.before = torch.cuda.memory_allocated(self.device)
        return self

    def __exit__(self, *_: object) -> None:
        if self.device.type == "cuda":
            gc.collect()
            torch.cuda.synchronize(self.device)
            self.peak = torch.cuda.max_memory_allocated(self.device) - self.before
            self.left = torch.cuda.memory_allocated(self.device) - self.before


def one(
    config: Any, values: dict[str, Any], dtype: torch.dtype, device: torch.device
) -> list[dict[str, Any]]:
    """Both legs at one dtype of the computation."""
    from spec_export.judge import Inputs, cast_leg, layout_leg, training_module

    module: Any = training_module(
        config, values.__getitem__, list(values), dtype, device=device
    )
    # As in a training on CUDA; a comparison that ran it compiled would be slow and
    # might ignore hooks.
    module.forward = torch.compile(type(module).forward).__get__(module)
    inputs = Inputs.for_config(config, positions=POSITIONS)
    rows = []
    with tempfile.TemporaryDirectory() as name:
        write_export(Path(name), config, values)
        legs: list[tuple[str, Any]] = [
            ("cast", lambda: cast_leg(module, inputs, torch.bfloat16, STEPS)),
            (
                "layout",
                lambda: layout_leg(
                    Path(name),
                    module,
                    inputs,
                    embed=values["embed_tokens.weight"],
                    device=device,
                    steps=STEPS,
                    write_probe=True,
                ),
            ),
        ]
        for what, run in legs:
            began = time.perf_counter()
            with Memory(device) as memory:
                leg = run()
            seconds = time.perf_counter() - began
            rows.append(
                {
                    "leg": what,
                    "layers": config["transformer_layer_config"]["num_hidden_layers"],
                    "dtype": str(dtype).removeprefix("torch."),
                    "verdict": leg.verdict,
                    "reason": leg.reason,
                    "positions": leg.positions,
                    "seconds": round(seconds, 2),
                    "max_rel": max((m.max_rel for m in leg.metrics), default=None),
                    "kl_max": max((m.kl_max for m in leg.metrics), default=None),
                    "top1": min((m.top1 for m in leg.metrics), default=None),
                    "tolerance": leg.tolerance and leg.tolerance.max_rel,
                    "tolerance_from": leg.tolerance and leg.tolerance.source,
                    "bytes_before": memory.before,
                    "bytes_more_at_most": memory.peak,
                    "bytes_left": memory.left,
                }
            )
            if what == "layout" and leg.passed:
                probe = Path(name) / "probe"
                size = sum(file.stat().st_size for file in probe.iterdir())
                rows[-1]["probe_bytes"] = size
    return rows


def check(device: torch.device, tiny: bool) -> dict[str, Any]:
    """All cells, with what went wrong in words."""
    from spec_export.judge.probe import empty_module

    sizes, draft_vocab = (TINY, 128) if tiny else (LARGE, 32000)
    rows: list[dict[str, Any]] = []
    for layers in (1, 2):
        config = checkpoint_config(sizes, draft_vocab, layers)
        values = values_of(empty_module(config), sizes["vocab_size"], draft_vocab)
        for dtype in (torch.float32, torch.bfloat16):
            rows += one(config, values, dtype, device)
            print(json.dumps(rows[-2:]), file=sys.stderr, flush=True)
    wrong = []
    for row in rows:
        what = f"{row['leg']}, {row['layers']} layers, {row['dtype']}"
        if row["verdict"] != "pass":
            wrong.append(f"{what}: {row['verdict']}: {row['reason']}")
        if device.type == "cuda" and row["seconds"] > SECONDS:
            wrong.append(f"{what}: {row['seconds']} s")
        if row["bytes_left"] > LEFT_BEHIND:
            wrong.append(f"{what}: {row['bytes_left']} bytes left on the device")
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    return {"device": name, "torch": torch.__version__, "rows": rows, "wrong": wrong}


def main(argv: list[str] | None = None) -> int:
    """Exit code 0 if all is well."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true", help="small shapes, for a test")
    options = parser.parse_args(argv)
    if REPOSITORY.joinpath("spec_export").is_dir():
        sys.path.insert(0, str(REPOSITORY))
    result = check(torch.device(options.device), options.tiny)
    print(json.dumps(result, indent=2))
    return 1 if result["wrong"] else 0


if __name__ == "__main__":
    raise SystemExit(main())
