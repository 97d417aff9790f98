"""The judge's serving reference is the forward of SGLang's own class, to 1e-5."""

from __future__ import annotations

import itertools
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Qwen3Config

from spec_export.judge.reference import load_reference
from spec_export.judge.reference.attention import ServerKeys
from tests.judge.drafts import Draft, make_draft, write_export
from tests.serving.sglang_process import IMPORTED, run_script

ROWS, STEPS = 12, 4
NORMS = {"none": {}, "fc_norm": {"fc_norm": True}, "before": {"norm_before_fc": True}}
STOCK = {
    f"{layers}l-{'output' if output else 'plain'}-{norms}-v{vocab}": {
        "layers": layers,
        "norm_output": output,
        "draft_vocab": vocab,
        **NORMS[norms],
    }
    for layers, output, norms, vocab in itertools.product(
        (1, 2), (False, True), NORMS, (48, 96)
    )
}
PLUGIN: dict[str, dict[str, Any]] = {
    "plugin-residual": {"layers": 2, "norm_before_residual": True, "fc_norm": True},
    "plugin-qwen3": {
        "layers": 2,
        "arch": Qwen3Config,
        "norm_before_residual": True,
        "norm_output": True,
        "layer": {"attention_bias": True},
    },
    "plugin-biases": {
        "layers": 1,
        "norm_before_fc": True,
        "layer": {"attention_bias": True, "mlp_bias": True},
    },
    "plugin-feature": {"aux_ids": (3,), "norm_output": True},
}
FEW = ["1l-plain-none-v48", "1l-output-before-v96", "2l-output-fc_norm-v48", *PLUGIN]


@dataclass(frozen=True)
class Seen:
    """Logits and hidden states of prefix and steps, of SGLang and of the reference."""

    cls: str
    sglang: dict[str, torch.Tensor]
    reference: dict[str, torch.Tensor]

    def apart(self, what: str) -> float:
        """Largest difference as a share of the range."""
        mine, theirs = self.reference[what], self.sglang[what]
        assert mine.shape == theirs.shape
        return float((mine - theirs).abs().max() / (mine.max() - mine.min()))


def compute(folder: Path, draft: Draft, rows: dict[str, torch.Tensor]) -> Any:
    """The same rows through the reference, keeping its hidden states."""
    reference = load_reference(folder, embed=draft.embed, release="0.5.23")
    keys = ServerKeys(reference, torch.arange(ROWS))
    tokens, state = rows["tokens"], rows["features"]
    logits, hidden = [], []
    for step in range(STEPS + 1):
        with torch.no_grad():
            out, state = reference.step(
                tokens, state, keys.positions, keys.attend, step, lambda *_: None
            )
        logits.append(out[-1:])
        hidden.append(state)
        if step < STEPS:
            tokens = reference.to_target(rows["draft_ids"][step].reshape(1))
            state = state[-1:]
            keys.advance()
    return {"logits": torch.cat(logits), "hidden": torch.cat(hidden)}


def prepare(root: Path, name: str) -> tuple[Path, Draft, dict[str, torch.Tensor]]:
    draft = make_draft(**(STOCK | PLUGIN)[name])
    folder = write_export(root / name, draft, plugin=name in PLUGIN)
    inputs = draft.inputs(positions=ROWS)
    count = draft.module.lm_head.weight.shape[0]
    rows = {
        "tokens": inputs.token_ids,
        "features": inputs.aux,
        "embed": draft.embed,
        "draft_ids": torch.arange(7, 7 + STEPS) * 5 % count,
    }
    torch.save(rows, folder / "rows.pt")
    return folder, draft, rows


def run_sglang(root: Path, names: list[str]) -> dict[str, Seen]:
    """All drafts of a list through SGLang, in one process."""
    target, out = root / "target", root / "out"
    for folder in (target, out):
        folder.mkdir()
    prepared = {name: prepare(root, name) for name in names}
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 8,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "vocab_size": 96,
        "max_position_embeddings": 512,
        "torch_dtype": "float32",
    }
    (target / "config.json").write_text(json.dumps(config))
    folders = (folder for folder, _, _ in prepared.values())
    done = run_script("forward_check.py", target, out, *folders, environment=IMPORTED)
    assert done.returncode == 0, done.stderr[-4000:]
    seen = {}
    for name, (folder, draft, rows) in prepared.items():
        held = torch.load(out / f"{name}.pt")
        seen[name] = Seen(held.pop("class"), held, compute(folder, draft, rows))
    return seen


@pytest.fixture(scope="module")
def few(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Seen]:
    return run_sglang(tmp_path_factory.mktemp("few"), FEW)


@pytest.fixture(scope="module")
def rest(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Seen]:
    names = [name for name in STOCK if name not in FEW]
    return run_sglang(tmp_path_factory.mktemp("rest"), names)


def check(name: str, seen: Seen) -> None:
    wanted = (
        "SpecExportEagle3ForCausalLM" if name in PLUGIN else "LlamaForCausalLMEagle3"
    )
    assert seen.cls == wanted
    apart = {what: seen.apart(what) for what in ("logits", "hidden")}
    print(f"\n{name}: " + ", ".join(f"{k} {v:.1e}" for k, v in apart.items()))
    assert max(apart.values()) <= 1e-5


@pytest.mark.parametrize("name", FEW)
def test_the_reference_is_sglangs_class(few: dict[str, Seen], name: str) -> None:
    check(name, few[name])


@pytest.mark.wide
@pytest.mark.parametrize("name", [name for name in STOCK if name not in FEW])
def test_all_flags(rest: dict[str, Seen], name: str) -> None:
    check(name, rest[name])


def test_two_drafts_are_far_apart(few: dict[str, Seen]) -> None:
    """The control: what passes above is not near to everything."""
    one, other = few["1l-plain-none-v48"], few["2l-output-fc_norm-v48"]
    assert Seen(one.cls, one.sglang, other.reference).apart("logits") > 0.01
