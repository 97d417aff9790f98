"""Drafts that stock SGLang computes wrongly, and how they are served all the same."""

from __future__ import annotations

import hashlib
import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from safetensors.torch import load_file, save_file
from transformers import PretrainedConfig, Qwen3Config

from spec_export.artifact.manifest import FileEntry, Manifest, weights_metadata
from spec_export.judge.reference.eagle3 import Eagle3Reference, PluginEagle3Reference
from tests.serving.drafts import DRAFT_VOCAB, LAYER_IDS, VOCAB, Variant, llama_config
from tests.serving.sglang_process import HERE, REPOSITORY, Engine, serve_job
from tests.serving.simulate import STEPS, Continuation, Rounds, rounds_of

MANIFEST, WEIGHTS = "spec_export_manifest.json", "model.safetensors"
WINDOW = 16  # shorter than the texts
PLUGIN_OFF = {"SGLANG_PLUGINS": "none"}
LONG = 2048  # speculators' default, longer than they are


@dataclass(frozen=True)
class PluginVariant(Variant):
    """Flags of speculators that only our class computes.

    Attributes:
        label: Name of folder and test.
        sliding: Indices of the layers with a window of ``window`` tokens.
    """

    label: str = ""
    norm_before_residual: bool = False
    arch: str = "llama"
    attention_bias: bool = False
    mlp_bias: bool = False
    window: int = LONG
    sliding: tuple[int, ...] = ()
    layer_ids: tuple[int, ...] = tuple(LAYER_IDS)
    stock: bool = False  # whether the stock class computes it too
    # Good enough for a wrong forward to cost something, and far from the oracle's 3.5.
    until: ClassVar[float] = 2.2

    @property
    def name(self) -> str:
        return self.label

    def layer_config(self) -> PretrainedConfig:
        config = llama_config(self.layers)
        more = {
            "attention_bias": self.attention_bias,
            "sliding_window": self.window if self.sliding else None,
            "layer_types": [
                "sliding_attention" if i in self.sliding else "full_attention"
                for i in range(self.layers)
            ],
        }
        if self.arch == "qwen3":
            shared = config.to_dict()
            for key in ("model_type", "architectures", "mlp_bias", "layer_types"):
                shared.pop(key, None)
            return Qwen3Config(**shared | more, use_sliding_window=bool(self.sliding))
        config.mlp_bias = self.mlp_bias
        for key, value in more.items():
            setattr(config, key, value)
        return config

    def more_flags(self) -> dict[str, Any]:
        return {
            "norm_before_residual": self.norm_before_residual,
            "target_layer_ids": list(self.layer_ids),
        }


def _one(label: str, fc: str = "none", **flags: Any) -> PluginVariant:
    base = {"layers": 1, "norm_output": False, "vocab": DRAFT_VOCAB}
    return PluginVariant(**base | {"fc": fc, "label": label} | flags)


# speculators 0.9 without any flag: what most people will have trained.
DEFAULT = _one(
    "defaults-of-0.9",
    "norm_before_fc",
    norm_output=True,
    norm_before_residual=True,
    sliding=(0,),
)
BIASED = _one(
    "qwen3-biased-2l",
    layers=2,
    norm_before_residual=True,
    arch="qwen3",
    attention_bias=True,
    sliding=(0,),
)
SINGLE = _one("single-aux-mlp-bias", layer_ids=(4,), mlp_bias=True, vocab=VOCAB)
EACH = [
    _one("nbr", norm_before_residual=True),
    _one("qk-norm", arch="qwen3"),
    _one("attention-bias", attention_bias=True),
    _one("mlp-bias", mlp_bias=True),
    _one("two-layers", layers=2, stock=True),
    _one("fc-norm", "fc_norm", stock=True),
    _one("norm-before-fc", "norm_before_fc", stock=True),
    _one("norm-output", norm_output=True, stock=True),
    _one("single-aux", layer_ids=(4,)),
    _one("single-aux-norm-before-fc", "norm_before_fc", layer_ids=(4,)),
]
WINDOWED = _one(
    "window-16-of-2l",
    layers=2,
    norm_before_residual=True,
    window=WINDOW,
    sliding=(1,),
)
# All layers alike: the stock class takes the window from the launch line.
UNIFORM = _one("window-16", window=WINDOW, sliding=(0,), stock=True)


def install(folder: Path) -> dict[str, str]:
    """Install the package as a person would, into a folder of its own.

    Returns:
        Variables that let SGLang's Python find it beside the stand-in.
    """
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps"]
    subprocess.run(
        [*pip, "--no-index", "--no-build-isolation", "--target", folder, REPOSITORY],
        check=True,
        timeout=120,
    )
    return {"PYTHONPATH": f"{HERE / 'shim'}:{folder}"}


class PluginEngine(Engine):
    """The engine server with the package installed beside SGLang."""

    def attempt(
        self,
        target: Path,
        draft: Path | None,
        prompts: list[list[int]],
        new_tokens: int,
        environment: dict[str, str] | None = None,
        **extra: Any,
    ) -> dict[str, Any]:
        """As ``serve``, and what happens if it fails: ``error`` and ``log``."""
        job = serve_job(target, draft, prompts, new_tokens, STEPS, extra)
        return self.send(job | {"environment": environment or {}})

    def send(self, job: dict[str, Any]) -> dict[str, Any]:
        """The answer to any job, with what SGLang logged meanwhile as ``log``."""
        before = self._log.stat().st_size
        self._process.stdin.write(json.dumps(job).encode() + b"\n")
        self._process.stdin.flush()
        answer = self._answer(120)
        with self._log.open("rb") as log:
            log.seek(before)
            return answer | {"log": log.read().decode(errors="replace")}


def rewrite(
    export: Path,
    out: Path,
    change: Callable[[dict[str, torch.Tensor]], None],
    entries: Callable[[dict[str, Any]], None],
) -> Path:
    """A copy of an export that was wrong when it was written.

    Its files and digests agree with its manifest; only the names are not those that
    the class takes. ``entries`` changes the manifest's tensors as ``change`` changes
    the tensors.
    """
    shutil.copytree(export, out)
    tensors = load_file(out / WEIGHTS)
    change(tensors)
    manifest = Manifest.read(out)
    entries(manifest.tensors)
    save_file(tensors, out / WEIGHTS, metadata=weights_metadata(manifest))
    data = (out / WEIGHTS).read_bytes()
    manifest.files[WEIGHTS] = FileEntry(
        sha256=hashlib.sha256(data).hexdigest(), size=len(data)
    )
    (out / MANIFEST).unlink()
    manifest.write(out)
    return out


def renamed(export: Path, out: Path, old: str, new: str) -> Path:
    """``rewrite`` with one tensor under another name."""

    def move(items: dict[str, Any]) -> None:
        items[new] = items.pop(old)

    return rewrite(export, out, move, move)


def without(export: Path, out: Path, name: str) -> Path:
    """``rewrite`` with one tensor less."""

    def drop(items: dict[str, Any]) -> None:
        del items[name]

    return rewrite(export, out, drop, drop)


def flipped(export: Path, out: Path) -> Path:
    """A copy with one bit of one weight changed."""
    shutil.copytree(export, out)
    data = bytearray((out / WEIGHTS).read_bytes())
    data[-3] ^= 1
    (out / WEIGHTS).write_bytes(data)
    return out


def as_stock(export: Path, out: Path) -> Path:
    """The same weights under the stock class's name, without a manifest."""
    shutil.copytree(export, out, ignore=shutil.ignore_patterns(MANIFEST, "probe"))
    config = json.loads((out / "config.json").read_text())
    config["architectures"] = ["LlamaForCausalLMEagle3"]
    (out / "config.json").write_text(json.dumps(config))
    return out


def served_rounds(
    export: Path,
    target: Path,
    texts: list[Continuation],
    kind: type[Eagle3Reference] = PluginEagle3Reference,
    window: int | None = None,
) -> list[Rounds]:
    """The rounds of a server whose windows move with the drafted tokens.

    Computed by the judge's reference of the class, one round start after the other.
    ``window`` is that of the launch line, which the stock class takes.
    """
    config = json.loads((export / "config.json").read_text())
    reference = kind(
        export,
        config,
        embed=load_file(target / "model.safetensors")["model.embed_tokens.weight"],
        head=None,
        release="0.5.23",
        dtype=torch.float32,
        device=torch.device("cpu"),
        window=window,
    )
    ids = [i + 1 for i in config["eagle_config"]["eagle_aux_hidden_state_layer_ids"]]
    rounds = []
    for text in texts:
        right, features = [0], text.features(ids)
        for newest in range(1, len(text.tokens) - STEPS):
            _, chosen = reference.free_running(
                text.tokens[1 : newest + 1],
                features[:newest],
                torch.arange(1, newest + 1),
                STEPS,
            )
            proposed = reference.to_target(chosen)
            wanted = text.tokens[newest + 1 : newest + 1 + STEPS]
            right.append([*(proposed == wanted).tolist(), False].index(False))
        rounds.append(rounds_of(right, text))
    return rounds
