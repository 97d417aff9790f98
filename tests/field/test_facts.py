"""What is known to go wrong silently between training and server, row by row.

``GATES``: what `LlamaForCausalLMEagle3` has since which release; asked for an older
one, the export is refused or spelled so that it serves. ``KNOBS``: settings that
training and SGLang read differently. ``TRAPS``: what others have been caught by.
Ids of layers per target class and the rules of RoPE have unit tests of their own.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.field.desk import Answer, Desk, Row, copy_export
from tests.field.test_cases import HEAD, IDS, NEVER, NO, norm, wide_fc
from tests.field.test_neighbours import LAYER, TWO_LAYERS, second_layer
from tests.helpers.field import VOCAB, H, draft_tensors, make_target

SLIDING = {"layer_types": ["sliding_attention"], "sliding_window": 16}
Make = Callable[[Desk], dict[str, Any]]


def whole(desk: Desk) -> dict[str, Any]:
    """The whole vocabulary: no question of padding in old releases."""
    head = load_file(desk.target / "model.safetensors")["lm_head.weight"]
    return {
        "add": {HEAD: head},
        "drop": ("d2t", "t2d"),
        "draft_vocab_size": VOCAB,
    }


def chunks(count: int = 3) -> dict[str, torch.Tensor]:
    return {f"fc_norm.{j}.weight": norm(H) for j in range(count)}


def two(desk: Desk) -> dict[str, Any]:
    return {"add": second_layer(), "layer": TWO_LAYERS}


def four(desk: Desk) -> dict[str, Any]:
    return {"add": wide_fc(desk, 32), IDS: [1, 2, 3, 4]}


def with_(**changes: Any) -> Make:
    return lambda desk: dict(changes)


# Row -> draft, first release, newest release that lacks it, subject.
GATES: dict[str, tuple[Make, str, str, str]] = {
    "fc bias, optional d2t": (whole, "0.4.9", "0.4.8.post1", "architectures"),
    "explicit layer ids": (whole, "0.4.9", "0.4.8.post1", "architectures"),
    "layers.{i}, several layers": (
        two,
        "0.5.12",
        "0.5.11",
        f"{LAYER}.num_hidden_layers",
    ),
    "num_aux_hidden_states": (four, "0.5.12", "0.5.11", IDS),
    "fc_norm": (with_(add=chunks(), fc_norm=True), "0.5.12", "0.5.11", "fc_norm"),
    "norm_output": (with_(norm_output=True), "0.5.12", "0.5.11", "norm_output"),
    "norm_before_fc": (
        with_(add={"input_norm.weight": norm(24)}, norm_before_fc=True),
        "0.5.17",
        "0.5.16",
        "norm_before_fc",
    ),
    "logits cropped to the draft's": (
        with_(),
        "0.5.4.post2",
        "0.5.4.post1",
        "draft_vocab_size",
    ),
    "window flag": (
        with_(layer=SLIDING),
        "0.5.12",
        "0.5.11",
        f"{LAYER}.sliding_window",
    ),
}


@pytest.mark.parametrize("row", GATES)
def test_release_gates(desk: Desk, row: str) -> None:
    make, since, before, subject = GATES[row]
    source = desk.draft(**make(desk))
    answer = desk.finalize(source, "--sglang", since, *NEVER)
    desk.ok(f"gate {row}, {since}", answer)
    old = desk.finalize(source, NO, "--sglang", before, *NEVER)
    desk.fails(f"gate {row}, {before}", old, subject, since, before)
    # A deployer who has the export and an older server is told the same, once.
    assert answer.output is not None
    told = desk.verify(answer.output, "--sglang", before)
    (why,) = [f for f in told.of("error") if since in f["message"]]
    assert told.code == 1 and why["code"] == "release-too-old"
    subjects = [f["subject"] for f in told.data["findings"]]
    assert len(subjects) == len(set(subjects))
    folder = copy_export(answer.output, desk.new("hand"))
    found = desk.verify(folder, "--sglang", before)
    if row != "window flag":  # nothing in such a folder says that a flag is needed
        said = [f for f in found.of("error") if before in f["message"]]
        assert said and found.code == 1, found.data["findings"]
        case = f"gate {row}, hand-made, {before}"
        desk.rows.append(Row(case, "FAIL", 1, said[0]["subject"]))


@pytest.mark.parametrize("release", ["0.4.9", "0.5.9", "0.5.10.post1", "0.5.11"])
def test_layer_ids_in_cuda_graphs(desk: Desk, release: str) -> None:
    answer = desk.finalize(desk.draft(**whole(desk)), NO, "--sglang", release)
    assert answer.code == 0
    launch = answer.manifest["serving"]["launch"]
    assert ("--disable-cuda-graph" in launch) == (release != "0.5.11")
    desk.ok(f"gate ids in CUDA graphs, {release}", answer)


# ------------------------------------------------------- settings that disagree
def sizes_of(desk: Desk, answer: Answer) -> None:
    """Keys that are always written, and those that never are."""
    config = answer.config
    for key in ("head_dim", "rms_norm_eps", "dtype", "torch_dtype", "rope_theta"):
        assert config[key] is not None
    assert config["rms_norm_eps"] == 1e-5
    assert config["eagle_config"]["use_aux_hidden_state"] is True
    never = {"target_hidden_size", "num_nextn_predict_layers", "auto_map", "bias"}
    assert not never & config.keys()
    assert "sliding_window" not in config and "layer_types" not in config
    assert None not in config.values()


def has_window(desk: Desk, answer: Answer) -> None:
    launch = answer.manifest["serving"]["launch"]
    assert launch[launch.index("--speculative-draft-window-size") + 1] == "15"
    assert "layer_types" not in answer.config


def has_biases(desk: Desk, answer: Answer) -> None:
    assert answer.data["requires_plugin"] is True
    assert "midlayer.self_attn.v_proj.bias" in answer.tensors


def needs_plugin(desk: Desk, answer: Answer) -> None:
    assert answer.data["requires_plugin"] is True


def biases(*names: str) -> dict[str, torch.Tensor]:
    wide = ("mlp.gate_proj", "mlp.up_proj")
    return {f"layers.0.{n}.bias": norm(16 if n in wide else H) for n in names}


QKVO = biases(*(f"self_attn.{p}_proj" for p in "qkvo"))
MLP = biases("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")
PER_HEAD = {f"layers.0.self_attn.{p}_norm.weight": norm(4) for p in "qk"}
MIXED = {
    **TWO_LAYERS,
    "layer_types": ["sliding_attention", "full_attention"],
    "sliding_window": 16,
}

# Row -> draft, subject and words of the stock class's refusal (None: it serves), and
# what the export must look like, the plug-in's where the stock class refuses.
KNOBS: dict[str, tuple[Make, tuple[str, str] | None, Any]] = {
    "norm_before_residual": (
        with_(norm_before_residual=True),
        ("norm_before_residual", "true"),
        needs_plugin,
    ),
    "keys that are written or not": (
        with_(layer={"rms_norm_eps": 1e-5}),
        None,
        sizes_of,
    ),
    "q/k norms": (
        with_(add=PER_HEAD, layer={"model_type": "qwen3"}),
        ("layers.0.self_attn.k_norm.weight", "drops"),
        needs_plugin,
    ),
    "q, k, v and o biases": (
        with_(add=QKVO, layer={"attention_bias": True}),
        ("layers.0.self_attn.v_proj.bias", "drops"),
        has_biases,
    ),
    "mlp_bias": (
        with_(add=MLP, layer={"mlp_bias": True}),
        ("layers.0.mlp.up_proj.bias", "drops"),
        needs_plugin,
    ),
    "uniform sliding window": (with_(layer=SLIDING), None, has_window),
    "mixed sliding and full layers": (
        with_(add=second_layer(), layer=MIXED),
        (f"{LAYER}.layer_types", "1 of 2"),
        needs_plugin,
    ),
    "single aux layer": (
        lambda desk: {"add": wide_fc(desk, 8), IDS: [3]},
        (IDS, "skips fc"),
        needs_plugin,
    ),
}
REFUSED: dict[str, tuple[Make, str, str]] = {
    "hidden_act": (with_(layer={"hidden_act": "gelu"}), f"{LAYER}.hidden_act", "gelu"),
    "dynamic NTK": (
        with_(
            layer={
                "rope_parameters": {
                    "rope_type": "dynamic",
                    "factor": 2.0,
                    "rope_theta": 1e4,
                }
            }
        ),
        f"{LAYER}.rope_parameters",
        "dynamic",
    ),
    "longrope": (
        with_(
            layer={
                "rope_parameters": {
                    "rope_type": "longrope",
                    "factor": 2.0,
                    "rope_theta": 1e4,
                }
            }
        ),
        f"{LAYER}.rope_parameters",
        "longrope",
    ),
    "partial rotary": (
        with_(
            layer={
                "rope_parameters": {
                    "rope_type": "default",
                    "rope_theta": 1e4,
                    "partial_rotary_factor": 0.5,
                }
            }
        ),
        f"{LAYER}.rope_parameters",
        "0.5",
    ),
    "target_hidden_size": (with_(target_hidden_size=16), "target_hidden_size", "16"),
    "draft_vocab_size missing": (
        with_(draft_vocab_size=...),
        "draft_vocab_size",
        "missing",
    ),
    "P-EAGLE": (
        with_(speculators_model_type="peagle"),
        "speculators_model_type",
        "peagle",
    ),
}


@pytest.mark.parametrize("row", KNOBS)
def test_settings_that_disagree_silently(desk: Desk, row: str) -> None:
    make, refusal, check = KNOBS[row]
    source = desk.draft(**make(desk))
    if refusal is not None:
        answer = desk.finalize(source, NO, *NEVER)
        desk.fails(f"knob {row}, stock", answer, *refusal)
    answer = desk.finalize(source)
    if refusal is not None:
        assert answer.code == 0, answer.data["findings"]
    desk.ok(f"knob {row}", answer)
    check(desk, answer)


@pytest.mark.parametrize("row", REFUSED)
def test_settings_that_no_class_computes(desk: Desk, row: str) -> None:
    make, subject, says = REFUSED[row]
    answer = desk.finalize(desk.draft(**make(desk)), NO)
    desk.fails(f"knob {row}", answer, subject, says)


ROPE = {
    "yarn, attention_factor": {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 16,
        "rope_theta": 1e4,
        "attention_factor": 0.8,
    },
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
        "rope_theta": 5e5,
    },
    "linear": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4},
}


@pytest.mark.parametrize("row", ROPE)
def test_rope_types_that_both_sides_compute(desk: Desk, row: str) -> None:
    source = desk.draft(layer={"rope_parameters": ROPE[row]})
    for release in ("0.5.9", "0.5.23"):
        answer = desk.finalize(source, "--sglang", release)
        desk.ok(f"knob rope {row}, {release}", answer)


# ------------------------------------------------------------ what caught others
def test_trap_a_missing_head_is_random_and_the_server_answers(desk: Desk) -> None:
    export = desk.finalize(desk.draft(), NO).output
    assert export is not None
    folder = copy_export(export, desk.new("hand"))
    held = load_file(folder / "model.safetensors")
    del held[HEAD]
    save_file(held, folder / "model.safetensors", {"format": "pt"})
    desk.fails("trap missing head", desk.verify(folder), HEAD, "uninitialised")


def test_trap_another_class_is_selected_silently(desk: Desk) -> None:
    export = desk.finalize(desk.draft(), NO).output
    assert export is not None
    for names in (["Eagle3DraftModel"], ["LlamaForCausalLM"], [], None, "x", [7]):
        folder = copy_export(export, desk.new("hand"), architectures=names)
        answer = desk.verify(folder)
        desk.fails(f"trap architectures {names}", answer, "architectures", str(names))
    both = ["LlamaForCausalLMEagle3", "LlamaForCausalLM"]
    folder = copy_export(export, desk.new("hand"), architectures=both)
    desk.fails("trap two architectures", desk.verify(folder), "architectures", "first")


def test_trap_a_speculators_checkpoint_is_no_draft_for_sglang(desk: Desk) -> None:
    answer = desk.verify(desk.draft())
    desk.fails("trap raw checkpoint", answer, "architectures", "Eagle3DraftModel")


def test_trap_a_map_of_target_ids_instead_of_offsets(desk: Desk) -> None:
    """SGLang adds the position: the ids themselves leave the vocabulary."""
    tensors = draft_tensors(desk.target)
    ids = tensors["d2t"] + torch.arange(len(tensors["d2t"]))
    answer = desk.finalize(desk.draft(add={"d2t": ids}), NO)
    desk.fails("trap ids instead of offsets", answer, "d2t", "32")


def test_trap_folders_that_would_stop_the_server(desk: Desk) -> None:
    export = desk.finalize(desk.draft(), NO).output
    assert export is not None

    def hand(**config: Any) -> Answer:
        return desk.verify(copy_export(export, desk.new("hand"), **config))

    answer = hand(target_hidden_size=None)
    desk.fails("trap target_hidden_size null", answer, "target_hidden_size", "null")
    answer = hand(num_nextn_predict_layers=1)
    desk.fails("trap nextn", answer, "num_nextn_predict_layers", "1")
    answer = hand(dtype=..., torch_dtype=...)
    desk.warned("trap no dtype", answer, "dtype", "float16")
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]}
    answer = hand(rope_parameters=rope)
    desk.warned("trap mrope_section", answer, "mrope_section", "3-D")
    folder = copy_export(export, desk.new("hand"), rope_theta=...)
    answer = desk.verify(folder, "--sglang", "0.5.9")
    desk.fails("trap rope_parameters alone", answer, "rope_parameters", "10000")


def test_trap_a_target_that_old_releases_cannot_tap(desk: Desk) -> None:
    qwen = make_target(desk.root / "qwen", architectures=["Qwen2ForCausalLM"])
    source = desk.draft(target=qwen, **whole(desk))
    desk.ok("trap qwen2 hook, 0.5.2", desk.finalize(source, NO, "--sglang", "0.5.2"))
    answer = desk.finalize(source, NO, "--sglang", "0.5.1")
    desk.fails("trap qwen2 hook, 0.5.1", answer, IDS, "0.5.2", "0.5.1")


def test_the_launch_line_is_complete(desk: Desk) -> None:
    export = desk.finalize(desk.draft(), NO).output
    assert export is not None
    answer = desk.run("show", export, "--launch")
    argv = answer.data["launch"]
    assert json.loads(json.dumps(argv)) == argv
    for flag, value in (
        ("--speculative-algorithm", "EAGLE3"),
        ("--speculative-num-steps", "3"),
        ("--speculative-eagle-topk", "1"),
        ("--speculative-num-draft-tokens", "4"),
    ):
        assert argv[argv.index(flag) + 1] == value
    assert str(export) in argv
