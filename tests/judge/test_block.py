"""Block drafts: what SGLang computes from our exports is what speculators computes.

Each option goes through the whole pipeline (template, transforms, writer), and the
judge compares the folder with speculators' own module. Each mistake that an export can
make has to fail.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from spec_export.artifact.source import CheckpointSource
from spec_export.artifact.target import open_target
from spec_export.comparison import judge_of_checkpoint, leg_of_probe
from spec_export.export import ExportResult
from spec_export.findings import SpecExportError
from spec_export.judge.compare import largest
from spec_export.judge.verdict import Leg
from tests.helpers.blocks import HIDDEN, MIXED, SLIDING, make_block_draft, make_target
from tests.helpers.judging import Config, Tensors, exported, judged_again
from tests.helpers.record import record

JUDGED = 1e-5
YARN = {
    "rope_parameters": {
        "rope_type": "yarn",
        "rope_theta": 5000.0,
        "factor": 4.0,
        "original_max_position_embeddings": 64,
    }
}
# Option -> (arguments of make_block_draft, class, lowest release).
OPTIONS: dict[str, tuple[dict[str, Any], str, str]] = {
    "dflash": ({}, "DFlashDraftModel", "0.5.13"),
    "dflash, mixed layers": ({"layer": MIXED}, "DFlashDraftModel", "0.5.14"),
    "dflash, sliding layers": ({"layer": SLIDING}, "DFlashDraftModel", "0.5.14"),
    "dflash, non-causal window": (
        {"layer": MIXED, "sliding_window_non_causal": True},
        "DFlashDraftModel",
        "0.5.17",
    ),
    "dflash, q/k/v/o biases": (
        {"layer": {"attention_bias": True}},
        "DFlashDraftModel",
        "0.5.13",
    ),
    "dflash, yarn": ({"layer": YARN}, "DFlashDraftModel", "0.5.13"),
    "dflash, sample_from_anchor": (
        {"sample_from_anchor": True},
        "Qwen3DSparkModel",
        "0.5.16",
    ),
    "dflash, draft vocabulary": ({"reduced": True}, "Qwen3DSparkModel", "0.5.19"),
    "dflash, draft vocabulary and sample_from_anchor": (
        {"reduced": True, "sample_from_anchor": True},
        "Qwen3DSparkModel",
        "0.5.16",
    ),
    "dflash2": ({"kind": "dflash2"}, "DFlash2DraftModel", "0.5.19"),
    "dflash2, sliding layers": (
        {"kind": "dflash2", "layer": SLIDING},
        "DFlash2DraftModel",
        "0.5.19",
    ),
}
for _head in ("vanilla", "gated", "rnn"):
    for _reduced in (False, True):
        for _anchor in (True, False):
            if _head == "rnn" and not _anchor:
                continue
            _name = ", ".join(
                [
                    f"dspark {_head}",
                    *(["draft vocabulary"] if _reduced else []),
                    *([] if _anchor else ["no sample_from_anchor"]),
                ]
            )
            OPTIONS[_name] = (
                {
                    "kind": "dspark",
                    "markov_head_type": _head,
                    "reduced": _reduced,
                    "sample_from_anchor": _anchor,
                },
                "Qwen3DSparkModel",
                "0.5.16" if _anchor else "0.5.19",
            )
OPTIONS |= {
    "dspark, markov_rank 0": (
        {
            "kind": "dspark",
            "markov_rank": 0,
            "confidence_head_with_markov": False,
        },
        "Qwen3DSparkModel",
        "0.5.16",
    ),
    "dspark, markov_rank 0, draft vocabulary": (
        {
            "kind": "dspark",
            "markov_rank": 0,
            "confidence_head_with_markov": False,
            "reduced": True,
        },
        "Qwen3DSparkModel",
        "0.5.16",
    ),
    "dspark, no confidence head": (
        {"kind": "dspark", "enable_confidence_head": False},
        "Qwen3DSparkModel",
        "0.5.16",
    ),
}


def export(root: Path, options: Config, **more: Any) -> tuple[ExportResult, Leg]:
    """Checkpoint -> export, with the judge's verdict on it."""
    make_block_draft(root / "checkpoint", make_target(root / "target"), **options)
    return exported(root, **more)


@pytest.mark.parametrize("name", OPTIONS)
def test_option_is_exact(tmp_path: Path, name: str) -> None:
    options, architecture, since = OPTIONS[name]
    result, leg = export(tmp_path, options)
    assert leg.passed, (leg.reason, leg.diagnosis)
    assert largest(leg.metrics) <= JUDGED
    assert largest(leg.free_running) <= JUDGED
    assert len(leg.metrics) == (
        4 if options.get("sample_from_anchor", options.get("kind") == "dspark") else 3
    )
    record("judge", name, f"{largest((*leg.metrics, *leg.free_running)):.1e}")
    serving = result.manifest.serving
    assert (serving.architecture, serving.min_version) == (architecture, since)
    again = leg_of_probe(result.folder, open_target(tmp_path / "target"), "cpu", None)
    assert again.passed, again.reason


def _swap(a: str, b: str) -> Callable[[Tensors, Config], None]:
    def mistake(tensors: Tensors, config: Config) -> None:
        for one, two in [
            (a.replace("*", str(i)), b.replace("*", str(i))) for i in (0, 1)
        ]:
            tensors[one], tensors[two] = tensors[two], tensors[one]
            if "*" not in a:
                return

    return mistake


def _drop(part: str) -> Callable[[Tensors, Config], None]:
    def mistake(tensors: Tensors, config: Config) -> None:
        for name in [n for n in tensors if part in n]:
            del tensors[name]

    return mistake


def _set(**keys: Any) -> Callable[[Tensors, Config], None]:
    def mistake(tensors: Tensors, config: Config) -> None:
        for key, value in keys.items():
            place = (
                config["dflash_config"] if key in config["dflash_config"] else config
            )
            place[key] = value
            if value is None:
                del place[key]

    return mistake


def _reverse_fc(tensors: Tensors, config: Config) -> None:
    chunks = tensors["fc.weight"].split(HIDDEN, 1)
    tensors["fc.weight"] = torch.cat(list(chunks)[::-1], 1)


def _prefix(tensors: Tensors, config: Config) -> None:
    for name in list(tensors):
        tensors[f"drafter.{name}"] = tensors.pop(name)


def _nest_markov(tensors: Tensors, config: Config) -> None:
    for key in ("markov_rank", "markov_head_type"):
        config["dflash_config"][key] = config.pop(key)


# What an export can do wrong; the ids of the target's layers are the plan's matter.
BACKBONE: dict[str, Callable[[Tensors, Config], None]] = {
    "fc reversed": _reverse_fc,
    "fc missing": _drop("fc.weight"),
    "unknown prefix": _prefix,
    "hidden_norm missing": _drop("hidden_norm"),
    "norms swapped": _swap("norm.weight", "hidden_norm.weight"),
    "layer norms swapped": _swap(
        "layers.*.input_layernorm.weight", "layers.*.post_attention_layernorm.weight"
    ),
    "q and k norm swapped": _swap(
        "layers.*.self_attn.q_norm.weight", "layers.*.self_attn.k_norm.weight"
    ),
    "q/k norms missing": _drop("k_norm"),
    "rope base": _set(
        rope_theta=1e6,
        rope_parameters={"rope_type": "default", "rope_theta": 1e6},
    ),
    "mask token": lambda t, c: (
        c.update(mask_token_id=7),
        c["dflash_config"].update(mask_token_id=7),
    ),
    "mask token missing": lambda t, c: (
        c.pop("mask_token_id"),
        c["dflash_config"].pop("mask_token_id"),
    ),
    "no layer ids": _set(target_layer_ids=None),
    "one layer id less": _set(target_layer_ids=[1, 3]),
    "block one longer": lambda t, c: c.update(block_size=c["block_size"] + 1),
    "is_causal false": _set(is_causal=False),
    "layer_types dropped": _set(layer_types=None),
    "no use_sliding_window": _set(use_sliding_window=None),
    "eps": _set(rms_norm_eps=1e-2),
}
MARKOV: dict[str, Callable[[Tensors, Config], None]] = {
    "w1 and w2 swapped": _swap(
        "markov_head.markov_w1.weight", "markov_head.markov_w2.weight"
    ),
    "Markov weights missing": _drop("markov_head"),
    "confidence weights missing": _drop("confidence_head"),
    "confidence weights stale": lambda t, c: t.update(
        {"confidence_head.proj.weight": t["confidence_head.proj.weight"] * 1.1}
    ),
    "Markov keys nested": _nest_markov,
    "sample_from_anchor": _set(sample_from_anchor=False),
}
SELECTOR: dict[str, Callable[[Tensors, Config], None]] = {
    "codebooks swapped": _swap(
        "candidate_selector.predecessor_codebook",
        "candidate_selector.successor_codebook",
    ),
    "selector missing": _drop("candidate_selector"),
    "convolutions missing": _drop("_conv"),
    "selector_top_k": _set(selector_top_k=4),
    "conv keys at the top": lambda t, c: [
        c.update({k: c["dflash_config"].pop(k)})
        for k in ("selector_rank", "selector_top_k")
    ],
}
MISTAKES = [
    *[("dflash, sliding layers", name, m) for name, m in BACKBONE.items()],
    *[("dspark vanilla", name, m) for name, m in MARKOV.items()],
    *[("dflash2, sliding layers", name, m) for name, m in SELECTOR.items()],
]
# The same file, spelled otherwise: SGLang takes it.
HARMLESS = {
    "model. prefix": lambda t, c: [t.update({f"model.{n}": t.pop(n)}) for n in list(t)],
    "num_target_layers missing": _set(num_target_layers=None),
    "nothing": lambda t, c: None,
}


@pytest.fixture(scope="module")
def exports(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Folder with ``export`` and ``target`` of an option, made once."""
    made: dict[str, Path] = {}

    def get(name: str) -> Path:
        if name not in made:
            made[name] = tmp_path_factory.mktemp("block")
            export(made[name], OPTIONS[name][0])
        return made[name]

    return get


@pytest.mark.parametrize(
    ("option", "name", "mistake"), MISTAKES, ids=[f"{o}: {n}" for o, n, _ in MISTAKES]
)
def test_mistake_is_caught(
    tmp_path: Path,
    exports: Callable[[str], Path],
    option: str,
    name: str,
    mistake: Callable[[Tensors, Config], Any],
) -> None:
    leg = judged_again(exports(option), tmp_path / "broken", mistake)
    assert not leg.passed
    assert leg.verdict == "fail" or "layer_ids" in (leg.reason or "")


@pytest.mark.parametrize("name", HARMLESS)
def test_harmless_change_passes(
    tmp_path: Path, exports: Callable[[str], Path], name: str
) -> None:
    leg = judged_again(
        exports("dflash, sliding layers"), tmp_path / "same", HARMLESS[name]
    )
    assert leg.passed, leg.reason


def test_diagnosis_names_the_tensor(
    tmp_path: Path, exports: Callable[[str], Path]
) -> None:
    root = exports("dflash, sliding layers")
    leg = judged_again(root, tmp_path / "broken", BACKBONE["layer norms swapped"])
    assert "layers.0.input_layernorm" in leg.diagnosis[0]


def test_window_shorter_than_the_context_differs(tmp_path: Path) -> None:
    layer = {**SLIDING, "sliding_window": 6}
    with pytest.raises(SpecExportError) as caught:
        export(tmp_path / "refused", {"layer": layer})
    assert [f.code for f in caught.value.findings] == ["sliding-window-extent"]
    result, leg = export(
        tmp_path / "allowed", {"layer": layer}, allow=("sliding-window-extent",)
    )
    # Allowed by name: recorded as a deviation, and the judge sees that it is one.
    assert [d.code for d in result.manifest.deviations] == ["sliding-window-extent"]
    assert not leg.passed and largest(leg.metrics) > 1e-3


def test_without_the_target_s_weights_nothing_is_compared(tmp_path: Path) -> None:
    target = make_target(tmp_path / "target")
    checkpoint = make_block_draft(tmp_path / "checkpoint", target)
    (target / "model.safetensors").unlink()
    source, opened = CheckpointSource.open(checkpoint), open_target(target)
    leg = judge_of_checkpoint(source, opened, "cpu", None)(tmp_path)["layout"]
    assert leg.verdict == "not run"
    assert "embed_tokens.weight, lm_head.weight" in leg.reason
