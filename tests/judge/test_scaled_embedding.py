"""Targets that scale their embedding: block drafts get scaled rows in SGLang.

Training saw the rows as they are. The export makes that good: what is added to the
residual and what else goes into a norm is written as much larger, and eps by its
square. The target here is transformers' own Gemma-4 class, as it saves itself.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import Gemma4ForCausalLM, Gemma4TextConfig

from spec_export.artifact.source import CheckpointSource
from spec_export.artifact.target import open_target
from spec_export.comparison import judge_of_checkpoint, leg_of_probe
from spec_export.export import ExportOptions, ExportResult, export_source
from spec_export.findings import SpecExportError
from spec_export.judge import Inputs, layout_leg, training_module
from spec_export.judge.compare import largest
from spec_export.judge.reference.block_config import served_scale
from spec_export.judge.verdict import Leg
from tests.helpers import blocks
from tests.helpers.judging import Config, Tensors, exported, judged_again
from tests.helpers.record import record

JUDGED = 1e-5
ROUNDED = "embedding-scale-rounded"
# A width whose root is a power of two, and one whose root is none.
EXACT, ROUGH = 16, 32


def make_gemma(folder: Path, hidden: int = EXACT, **changes: Any) -> Path:
    """A Gemma-4 of 8 layers with an own head, which DSPARK and DFlash2 need."""
    torch.manual_seed(3)
    config = Gemma4TextConfig(
        **{
            "vocab_size": blocks.VOCAB,
            "hidden_size": hidden,
            "intermediate_size": 48,
            "num_hidden_layers": blocks.LAYERS,
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "head_dim": 8,
            "global_head_dim": 8,
            "hidden_size_per_layer_input": 0,
            "num_kv_shared_layers": 0,
            "max_position_embeddings": 256,
            "rms_norm_eps": 1e-6,
            "tie_word_embeddings": False,
            "bos_token_id": 1,
            "eos_token_id": 2,
            "pad_token_id": 0,
            "initializer_range": 0.3,
            **changes,
        }
    )
    Gemma4ForCausalLM(config).bfloat16().save_pretrained(folder)
    return folder


@pytest.fixture
def width(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """Width of target and draft."""
    hidden = int(getattr(request, "param", EXACT))
    monkeypatch.setattr(blocks, "HIDDEN", hidden)
    return hidden


def export(
    root: Path, width: int, target: dict[str, Any] | None = None, **more: Any
) -> tuple[ExportResult, Leg]:
    """Draft -> export for a Gemma-4 of that width, with the judge's verdict."""
    options = {k: more.pop(k) for k in ("dtype", "allow") if k in more}
    gemma = make_gemma(root / "target", width, **(target or {}))
    blocks.make_block_draft(root / "checkpoint", gemma, **more)
    return exported(root, **options)


BIASED = {"attention_bias": True}
DRAFTS: dict[str, dict[str, Any]] = {
    "dflash": {},
    "dflash, q/k/v/o biases": {"layer": BIASED},
    "dflash, mixed layers": {"layer": blocks.MIXED},
    "dflash, draft vocabulary": {"reduced": True},
    "dflash2": {"kind": "dflash2"},
    "dspark vanilla": {"kind": "dspark"},
    "dspark gated": {"kind": "dspark", "markov_head_type": "gated"},
    "dspark rnn, draft vocabulary": {
        "kind": "dspark",
        "markov_head_type": "rnn",
        "reduced": True,
    },
}


def test_the_real_module_scales_as_the_judge_says(tmp_path: Path) -> None:
    folder = make_gemma(tmp_path, ROUGH)
    model = Gemma4ForCausalLM.from_pretrained(folder, dtype=torch.float32)
    rows = model.get_input_embeddings()
    ids = torch.arange(blocks.VOCAB)
    scale = served_scale(json.loads((folder / "config.json").read_text()))
    assert scale == math.sqrt(ROUGH)
    assert torch.allclose(rows(ids), rows.weight * scale, rtol=1e-6, atol=0)
    inner = {"architectures": ["Gemma4ForConditionalGeneration"]}
    inner["text_config"] = {"hidden_size": 64}  # type: ignore[assignment]
    assert served_scale(inner) == 8
    llama = {"architectures": ["LlamaForCausalLM"], "hidden_size": 64}
    assert served_scale(llama) == served_scale(None) == 1


@pytest.mark.parametrize("name", DRAFTS)
def test_a_power_of_two_is_exact(tmp_path: Path, width: int, name: str) -> None:
    result, leg = export(tmp_path, width, **DRAFTS[name])
    assert leg.passed, (leg.reason, leg.diagnosis)
    assert largest((*leg.metrics, *leg.free_running)) <= JUDGED
    record("judge", f"{name}, Gemma-4 target", f"{largest(leg.metrics):.1e}")
    assert not result.manifest.deviations
    trained = load_file(tmp_path / "checkpoint" / "model.safetensors")
    written = load_file(result.folder / "model.safetensors")
    entry = result.manifest.tensors["layers.0.mlp.down_proj.weight"]
    assert (entry.role, entry.transform) == ("derived", "scale(by=4.0)")
    for tensor in ("fc.weight", "layers.1.self_attn.k_proj.weight"):
        assert torch.equal(written[tensor], trained[tensor] * 4)
    for tensor in ("layers.1.self_attn.v_proj.weight", "norm.weight"):
        assert torch.equal(written[tensor], trained[tensor])
    again = leg_of_probe(result.folder, open_target(tmp_path / "target"), "cpu", None)
    assert again.passed, again.reason


@pytest.mark.parametrize("width", [ROUGH], indirect=True)
def test_no_power_of_two_is_exact_in_float32(tmp_path: Path, width: int) -> None:
    result, leg = export(tmp_path, width, dtype="float32")
    assert leg.passed, (leg.reason, leg.diagnosis)
    assert largest(leg.metrics) <= JUDGED and not result.manifest.deviations


@pytest.mark.parametrize("width", [ROUGH], indirect=True)
def test_no_power_of_two_is_rounded_twice_in_bfloat16(
    tmp_path: Path, width: int
) -> None:
    with pytest.raises(SpecExportError) as caught:
        export(tmp_path / "refused", width)
    (found,) = caught.value.findings
    assert found.code == ROUNDED and "5.6569" in found.message
    result, leg = export(tmp_path / "allowed", width, allow=(ROUNDED,))
    assert [d.code for d in result.manifest.deviations] == [ROUNDED]
    # Compared as it is rounded; what that costs is said.
    assert leg.passed and largest(leg.metrics) <= JUDGED
    (said,) = [note for note in leg.notes if "rounded twice" in note]
    cost = float(said.split("by up to ")[1].split()[0])
    assert 1e-4 < cost < 3e-2
    record("judge", "dflash, Gemma-4 target, rounded twice", f"{cost:.1e}")


@pytest.mark.parametrize("width", [ROUGH], indirect=True)
def test_a_float32_module_is_rounded_as_its_checkpoint_is(
    tmp_path: Path, width: int
) -> None:
    """As in training: weights are float32 and the export is bfloat16."""
    gemma = make_gemma(tmp_path / "target", width)
    checkpoint = blocks.make_block_draft(tmp_path / "checkpoint", gemma)
    rounded = load_file(checkpoint / "model.safetensors")
    live = {name: value.float() * 1.001 for name, value in rounded.items()}
    save_file(live, checkpoint / "model.safetensors", {"format": "pt"})
    source, opened = CheckpointSource.open(checkpoint), open_target(gemma)
    options = ExportOptions(dtype="bfloat16", allow=(ROUNDED,))
    result = export_source(source, opened, options, tmp_path / "export")
    leg = judge_of_checkpoint(source, opened, "cpu", None)(result.folder)["layout"]
    assert leg.passed, leg.reason
    # The live module itself, rounded where it is used.
    head = load_file(gemma / "model.safetensors")
    both = live | {
        "embed_tokens.weight": head["model.embed_tokens.weight"],
        "lm_head.weight": head["lm_head.weight"],
    }
    leg = layout_leg(
        result.folder,
        training_module(source.config, both.__getitem__, list(both)),
        Inputs.for_config(source.config, positions=64),
        target=gemma,
        saved_dtype=torch.bfloat16,
    )
    assert leg.passed, leg.reason


def test_what_the_saved_dtype_cannot_hold(tmp_path: Path, width: int) -> None:
    gemma = make_gemma(tmp_path / "target", width)
    checkpoint = blocks.make_block_draft(tmp_path / "checkpoint", gemma)
    held = load_file(checkpoint / "model.safetensors")
    held["layers.0.mlp.down_proj.weight"][0, 0] = 2.0**15  # times 4 is too large
    save_file(held, checkpoint / "model.safetensors", {"format": "pt"})
    source, opened = CheckpointSource.open(checkpoint), open_target(gemma)
    export_source(source, opened, ExportOptions(), tmp_path / "wide")
    with pytest.raises(SpecExportError) as caught:
        half = ExportOptions(dtype="float16")
        export_source(source, opened, half, tmp_path / "half")
    (found,) = [f for f in caught.value.findings if f.severity == "error"]
    assert found.code == "non-finite"
    assert found.subject == "layers.0.mlp.down_proj.weight"


def _times(name: str, factor: float) -> Callable[[Tensors, Config], None]:
    def change(tensors: Tensors, config: Config) -> None:
        tensors[name] = (tensors[name].float() * factor).to(tensors[name].dtype)

    return change


def _unscaled(tensors: Tensors, config: Config) -> None:
    for name in tensors:
        if name.split(".")[-2] in ("fc", "q_proj", "k_proj", "o_proj", "down_proj"):
            tensors[name] = tensors[name] / 4
    config["rms_norm_eps"] /= 16


MISTAKES: dict[str, Callable[[Tensors, Config], None]] = {
    "no scale": _unscaled,
    "eps not scaled": lambda t, c: c.update(rms_norm_eps=c["rms_norm_eps"] / 16),
    "eps scaled once": lambda t, c: c.update(rms_norm_eps=c["rms_norm_eps"] / 4),
    **{
        f"{name} not scaled": _times(name, 1 / 4)
        for name in (
            "fc.weight",
            "layers.0.self_attn.q_proj.weight",
            "layers.1.self_attn.k_proj.weight",
            "layers.0.self_attn.o_proj.weight",
            "layers.1.mlp.down_proj.weight",
            "layers.0.self_attn.o_proj.bias",
            "layers.1.self_attn.q_proj.bias",
        )
    },
    "v_proj scaled too": _times("layers.0.self_attn.v_proj.weight", 4),
    "rounded once more": _times("layers.0.mlp.down_proj.weight", 1.004),
}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Target, checkpoint and export that the mistakes are made in."""
    root = tmp_path_factory.mktemp("gemma")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(blocks, "HIDDEN", EXACT)
        export(root, EXACT, layer=BIASED)
    return root


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_caught(tmp_path: Path, made: Path, name: str) -> None:
    leg = judged_again(made, tmp_path / "broken", MISTAKES[name])
    assert leg.verdict == "fail"


def test_nothing_changed_passes(tmp_path: Path, made: Path) -> None:
    assert judged_again(made, tmp_path / "same", lambda t, c: None).passed


def test_the_diagnosis_names_the_tensor(tmp_path: Path, made: Path) -> None:
    name = "layers.1.mlp.down_proj"
    leg = judged_again(made, tmp_path / "broken", MISTAKES[f"{name}.weight not scaled"])
    assert name in leg.diagnosis[0]


@pytest.mark.parametrize("width", [ROUGH], indirect=True)
def test_what_was_allowed_excuses_no_mistake(
    tmp_path: Path, width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    from spec_export.artifact import transforms

    wrong = transforms._RULES["scale"]
    monkeypatch.setitem(
        transforms._RULES,
        "scale",
        lambda s, a, shape, dtype: wrong(s, {"by": 1.01 * a["by"]}, shape, dtype),
    )
    with pytest.raises(SpecExportError) as caught:
        export(tmp_path, width, allow=(ROUNDED,))
    errors = [f.code for f in caught.value.findings if f.severity == "error"]
    assert errors == ["comparison-failed"]


@pytest.mark.parametrize("reduced", [False, True])
def test_without_the_target_s_weights(
    tmp_path: Path, width: int, reduced: bool
) -> None:
    """The scale is in its config.json; a whole head is training's, a reduced is not."""
    gemma = make_gemma(tmp_path / "target", width)
    checkpoint = blocks.make_block_draft(
        tmp_path / "checkpoint", gemma, reduced=reduced
    )
    theirs = load_file(gemma / "model.safetensors")
    held = load_file(checkpoint / "model.safetensors")
    # As speculators 0.7 saved it.
    held["embed_tokens.weight"] = theirs["model.embed_tokens.weight"]
    held.setdefault("lm_head.weight", theirs["lm_head.weight"])
    save_file(held, checkpoint / "model.safetensors", {"format": "pt"})
    (gemma / "model.safetensors").unlink()
    source, opened = CheckpointSource.open(checkpoint), open_target(gemma)
    result = export_source(source, opened, ExportOptions(), tmp_path / "export")
    leg = judge_of_checkpoint(source, opened, "cpu", None)(result.folder)["layout"]
    assert leg.verdict == ("not run" if reduced else "pass"), leg.reason


@pytest.mark.parametrize("kind", ["dflash2", "dspark"])
def test_a_tied_head_is_refused(tmp_path: Path, width: int, kind: str) -> None:
    tied = {"tie_word_embeddings": True}
    with pytest.raises(SpecExportError) as caught:
        export(tmp_path / "refused", width, tied, kind=kind)
    (found,) = [f for f in caught.value.findings if f.severity == "error"]
    assert found.code == "target-unsupported" and "org_vocab_size" in found.message
    _, leg = export(tmp_path / "dflash", width, tied)
    assert leg.passed, leg.reason
