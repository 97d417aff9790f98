"""The plan: every fate, every refusal, every release gate; each with a control."""

from dataclasses import replace
from typing import Any

import pytest

from spec_export.findings import CODES, Severity, SpecExportError
from spec_export.layout.plan import deviations
from spec_export.layout.plan_types import Plan
from spec_export.layout.targets import target_facts
from spec_export.layout.tensors import TensorInfo
from tests.helpers.layout_cases import (
    T0,
    dflash,
    eagle3,
    errors,
    only_error,
    plan_of,
    tensors_of,
)

Config = dict[str, Any]


def _without(config: Config, *names: str) -> dict[str, TensorInfo]:
    return {k: v for k, v in tensors_of(config).items() if k not in names}


def _with(config: Config, **more: tuple[int, ...]) -> dict[str, TensorInfo]:
    added = {n.replace("__", "."): shape for n, shape in more.items()}
    infos = {name: TensorInfo(name, "BF16", shape) for name, shape in added.items()}
    return {**tensors_of(config), **infos}


def _changed(config: Config, name: str, **changes: Any) -> dict[str, TensorInfo]:
    held = tensors_of(config)
    return {**held, name: replace(held[name], **changes)}


def _written(plan: Plan) -> dict[str, tuple[str, ...]]:
    return {p.name: p.sources for p in plan.placements}


# --- fates ------------------------------------------------------------------------

E0_WRITTEN = {
    "fc.weight": "fc.weight",
    "norm.weight": "norm.weight",
    "lm_head.weight": "lm_head.weight",
    "d2t": "d2t",
    **{
        f"midlayer.{part}.weight": f"layers.0.{part}.weight"
        for part in (
            *(f"self_attn.{p}_proj" for p in "qkvo"),
            *(f"mlp.{p}_proj" for p in ("gate", "up", "down")),
            *("hidden_norm", "input_layernorm", "post_attention_layernorm"),
        )
    },
}


def test_every_fate_of_e0() -> None:
    config = eagle3()
    plan = plan_of(config)
    assert plan.ok and not plan.findings
    assert _written(plan) == {k: (v,) for k, v in E0_WRITTEN.items()}
    fates = {f.source: f for f in plan.fates}
    assert set(fates) == set(tensors_of(config))
    assert fates["embed_tokens.weight"].fate == "provided_by_target"
    assert fates["embed_tokens.weight"].counterpart == "embedding"
    assert fates["t2d"].fate == "dropped"
    others = {f.fate for s, f in fates.items() if s in E0_WRITTEN.values()}
    assert others == {"renamed"}
    for fate in plan.fates:
        assert bool(fate.to) is (fate.fate == "renamed")
        assert fate.to or fate.reason
        assert fate.shape == tensors_of(config)[fate.source].shape


def test_origins_of_e0() -> None:
    plan = plan_of(eagle3())
    (embedding,) = plan.from_target
    assert embedding.name == embedding.source == "embed_tokens.weight"
    assert (embedding.shape, embedding.counterpart) == ((32, 8), "embedding")
    placed = {p.name: p for p in plan.placements}
    assert placed["d2t"].kind == "int64" and placed["d2t"].role_hint == "buffer"
    head = placed["lm_head.weight"]
    assert (head.counterpart, head.vocab_axis, head.shape) == ("head", 0, (12, 8))
    assert all(p.kind == "float" for n, p in placed.items() if n != "d2t")


def test_slim_checkpoints_have_no_source_for_the_embedding() -> None:
    config = eagle3()
    plan = plan_of(config, _without(config, "embed_tokens.weight", "t2d"))
    assert plan.ok
    assert plan.from_target[0].source is None


def test_live_modules_hold_the_target_s_tensors() -> None:
    config = eagle3()
    held = _with(config, verifier_norm__weight=(8,), verifier_lm_head__weight=(12, 8))
    plan = plan_of(config, held)
    assert plan.ok and _written(plan) == _written(plan_of(config))
    fates = {f.source: f for f in plan.fates}
    assert fates["verifier_norm.weight"].fate == "dropped"
    assert fates["verifier_norm.weight"].counterpart == "norm"
    assert fates["verifier_lm_head.weight"].counterpart == "head"


@pytest.mark.parametrize("config", [eagle3(norm_before_fc=True), dflash()])
def test_tensors_that_cannot_be_zero(config: Config) -> None:
    # Not the map: offsets of the first tokens are zeros.
    weights = {name for name, t in tensors_of(config).items() if t.is_float}
    assert set(plan_of(config).nonzero) == weights


def test_a_bias_may_be_zero() -> None:
    config = dflash({"attention_bias": True})
    plan = plan_of(config)
    assert plan.ok and set(plan.nonzero) == set(plan_of(dflash()).nonzero)
    assert "layers.1.self_attn.o_proj.bias" in _written(plan)


def test_heads_of_block_drafts_count_draft_tokens() -> None:
    config = dflash(draft_vocab_size=12)
    held = _with(config, verifier_norm__weight=(8,), verifier_lm_head__weight=(12, 8))
    # Newer releases have another class for it (DSPARK).
    plan = plan_of(config, held, release="0.5.18", allow=["reduced-vocabulary"])
    assert plan.ok and plan.architecture == "DFlashDraftModel"
    counterparts = {f.source: f.counterpart for f in plan.fates if f.counterpart}
    assert counterparts == {
        "embed_tokens.weight": "embedding",
        "lm_head.weight": "head",
        "verifier_norm.weight": "norm",
        "verifier_lm_head.weight": "head",
    }
    assert {f.source for f in plan.fates if f.fate == "dropped"} == {
        "d2t",
        "t2d",
        "verifier_norm.weight",
        "verifier_lm_head.weight",
    }


def test_one_layer_is_called_midlayer_in_every_release() -> None:
    for release in ("0.5.9", "0.5.12", "0.5.23"):
        names = _written(plan_of(eagle3(), release=release))
        assert names == {k: (v,) for k, v in E0_WRITTEN.items()}
        assert not any(n.startswith(("layers.", "model.")) for n in names)


def test_several_layers_keep_their_numbers_and_rename_a_norm() -> None:
    written = _written(plan_of(eagle3({"num_hidden_layers": 3})))
    assert not any(name.startswith("midlayer.") for name in written)
    assert written["layers.0.input_layernorm.weight"] == (
        "layers.0.input_layernorm.weight",
    )
    assert written["layers.0.hidden_norm.weight"] == ("layers.0.hidden_norm.weight",)
    for i in (1, 2):
        assert written[f"layers.{i}.hidden_norm.weight"] == (
            f"layers.{i}.input_layernorm.weight",
        )
        assert f"layers.{i}.input_layernorm.weight" not in written
    assert len(written) == len(set(written.values()))


def test_whole_plan_of_f0() -> None:
    config = dflash()
    held = _without(config, "embed_tokens.weight", "lm_head.weight")
    plan = plan_of(config, held)
    assert plan.ok and not plan.findings
    assert (plan.architecture, plan.algorithm) == ("DFlashDraftModel", "DFLASH")
    assert _written(plan) == {name: (name,) for name in held}
    assert {f.fate for f in plan.fates} == {"renamed"}
    origins = {t.name: (t.shape, t.counterpart, t.source) for t in plan.from_target}
    assert origins == {
        "embed_tokens.weight": ((32, 8), "embedding", None),
        "lm_head.weight": ((32, 8), "head", None),
    }
    assert plan.min_version == "0.5.13"
    assert plan.launch == [
        *("--speculative-algorithm", "DFLASH"),
        *("--speculative-draft-model-path", "{draft}"),
    ]
    assert plan.vocab == {"draft_size": 32, "target_size": 32}


def test_f0_with_a_full_checkpoint() -> None:
    plan = plan_of(dflash())
    assert plan.ok
    fates = {f.source: f.fate for f in plan.fates}
    assert fates["embed_tokens.weight"] == "provided_by_target"
    assert fates["lm_head.weight"] == "provided_by_target"
    assert {t.source for t in plan.from_target} == {
        "embed_tokens.weight",
        "lm_head.weight",
    }


def test_launch_line_of_e0() -> None:
    many = {"proposal_methods": [{"speculative_tokens": 5}]}
    assert plan_of(eagle3(speculators_config=many)).launch == [
        *("--speculative-algorithm", "EAGLE3"),
        *("--speculative-draft-model-path", "{draft}"),
        *("--speculative-num-steps", "5"),
        *("--speculative-eagle-topk", "1"),
        *("--speculative-num-draft-tokens", "6"),
    ]
    assert "3" in plan_of(eagle3(speculators_config=...)).launch


# --- what does not add up ---------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "near"),
    [
        ("layers.0.self_attn.q_prj.weight", "layers.0.self_attn.q_proj.weight"),
        ("model.fc.weight", "fc.weight"),
        ("layers.0.mlp._orig_mod.up_proj.weight", "layers.0.mlp.up_proj.weight"),
        ("layers.0.self_attn.q_proj.lora_A.weight", "layers.0.self_attn."),
        ("layers.1.hidden_norm.weight", "layers.0.hidden_norm.weight"),
        ("zzz", None),
    ],
)
def test_unaccounted(name: str, near: str | None) -> None:
    config = eagle3()
    held = {**tensors_of(config), name: TensorInfo(name, "BF16", (8,))}
    found = only_error(plan_of(config, held), "tensor-unaccounted")
    assert found.subject == name
    assert "eagle3-llama" in found.message
    assert (
        (f"nearest known name is {near}" in found.message)
        if near
        else ("nearest" not in found.message)
    )


REQUIRED = [
    n
    for n in tensors_of(eagle3(norm_before_fc=True))
    if n not in ("embed_tokens.weight", "t2d", "lm_head.weight")
]


@pytest.mark.parametrize("name", REQUIRED)
def test_missing(name: str) -> None:
    config = eagle3(norm_before_fc=True)
    found = only_error(plan_of(config, _without(config, name)), "tensor-missing")
    assert found.subject == name


def test_every_missing_tensor_is_named() -> None:
    plan = plan_of(eagle3(), {})
    assert {f.subject for f in errors(plan)} == set(E0_WRITTEN.values()) - {
        "lm_head.weight"
    }


@pytest.mark.parametrize(
    ("config", "added", "flag"),
    [
        (eagle3(), {"input_norm__weight": (24,)}, "norm_before_fc"),
        (eagle3(), {f"fc_norm__{j}__weight": (8,) for j in range(3)}, "fc_norm"),
        (
            eagle3(),
            {f"layers__0__self_attn__{p}_norm__weight": (4,) for p in "qk"},
            "transformer_layer_config.model_type",
        ),
        (
            eagle3(),
            {"layers__0__self_attn__q_proj__bias": (8,)},
            "transformer_layer_config.attention_bias",
        ),
        (
            eagle3(),
            {"layers__0__mlp__up_proj__bias": (16,)},
            "transformer_layer_config.mlp_bias",
        ),
        (eagle3(draft_vocab_size=32), {"d2t": (32,)}, "draft_vocab_size"),
        (eagle3(draft_vocab_size=32), {"t2d": (32,)}, "draft_vocab_size"),
        (dflash(), {"d2t": (32,)}, "draft_vocab_size"),
        (
            dflash(),
            {"layers__1__self_attn__o_proj__bias": (8,)},
            "transformer_layer_config.attention_bias",
        ),
    ],
)
def test_present_although_the_flag_is_off(
    config: Config, added: dict[str, tuple[int, ...]], flag: str
) -> None:
    found = errors(plan_of(config, _with(config, **added)))
    assert {f.subject for f in found} == {n.replace("__", ".") for n in added}
    for one in found:
        assert one.code == "tensor-unexpected"
        assert flag in one.message


@pytest.mark.parametrize(
    ("config", "name", "flag"),
    [
        (eagle3(norm_before_fc=True), "input_norm.weight", "norm_before_fc"),
        (eagle3(fc_norm=True), "fc_norm.2.weight", "fc_norm"),
        (eagle3(), "d2t", "draft_vocab_size"),
        (dflash(draft_vocab_size=12), "d2t", "draft_vocab_size"),
    ],
)
def test_absent_although_the_flag_is_on(config: Config, name: str, flag: str) -> None:
    plan = plan_of(config, _without(config, name), allow=["reduced-vocabulary"])
    found = only_error(plan, "tensor-missing")
    assert found.subject == name and flag in found.message


@pytest.mark.parametrize(
    ("config", "name"),
    [
        (eagle3(), "layers.1.mlp.up_proj.weight"),
        (eagle3(), "layers.00.mlp.up_proj.weight"),
        (eagle3(fc_norm=True), "fc_norm.3.weight"),
        (dflash(), "layers.2.mlp.up_proj.weight"),
        (dflash(), "layers.0.mlp.side_proj.weight"),
    ],
)
def test_more_layers_than_the_configuration_has(config: Config, name: str) -> None:
    held = {**tensors_of(config), name: TensorInfo(name, "BF16", (8,))}
    found = only_error(plan_of(config, held), "tensor-unexpected")
    assert found.subject == name


@pytest.mark.parametrize("config", [eagle3(norm_before_fc=True), dflash()])
def test_every_shape_is_checked(config: Config) -> None:
    for name, info in tensors_of(config).items():
        wrong = (*info.shape[:-1], info.shape[-1] + 1)
        plan = plan_of(config, _changed(config, name, shape=wrong))
        found = only_error(plan, "shape-mismatch")
        assert found.subject == name
        assert str(list(wrong)) in found.message
        assert str(list(info.shape)) in found.message


def test_a_shape_message_explains_itself() -> None:
    config = eagle3()
    held = _changed(config, "fc.weight", shape=(8, 32))
    found = only_error(plan_of(config, held), "shape-mismatch")
    for words in ("[8, 32]", "[8, 24] = [H, A * H]", "A = 3", "H = 8"):
        assert words in found.message
    assert "eagle_aux_hidden_state_layer_ids" in found.message
    held = _changed(config, "layers.0.mlp.down_proj.weight", shape=(128,))
    found = only_error(plan_of(config, held), "shape-mismatch")
    assert "[128]" in found.message and "[8, 16]" in found.message


def test_the_first_layer_is_wider() -> None:
    held = tensors_of(eagle3({"num_hidden_layers": 2}))
    shapes = {n: t.shape for n, t in held.items()}
    for p, rows in (("q", 8), ("k", 4), ("v", 4)):
        assert shapes[f"layers.0.self_attn.{p}_proj.weight"] == (rows, 16)
        assert shapes[f"layers.1.self_attn.{p}_proj.weight"] == (rows, 8)


@pytest.mark.parametrize(
    ("name", "dtype", "code"),
    [
        ("fc.weight", "U8", "dtype-unsupported"),
        ("fc.weight", "F8_E4M3", "dtype-unsupported"),
        ("norm.weight", "I64", "dtype-unsupported"),
        ("d2t", "F32", "vocab-map-invalid"),
        ("d2t", "BOOL", "vocab-map-invalid"),
        ("t2d", "F32", "vocab-map-invalid"),
    ],
)
def test_dtypes(name: str, dtype: str, code: str) -> None:
    config = eagle3()
    found = only_error(plan_of(config, _changed(config, name, dtype=dtype)), code)
    assert found.subject == name and dtype in found.message


@pytest.mark.parametrize(
    ("name", "dtype"),
    [("fc.weight", "F32"), ("norm.weight", "F16"), ("d2t", "I32"), ("t2d", "U8")],
)
def test_dtypes_that_will_do(name: str, dtype: str) -> None:
    config = eagle3()
    assert plan_of(config, _changed(config, name, dtype=dtype)).ok


@pytest.mark.parametrize("head", ["own", "tied"])
def test_a_missing_head_is_the_target_s(head: Any) -> None:
    config = eagle3(draft_vocab_size=32)
    held = _without(config, "lm_head.weight", "embed_tokens.weight")
    plan = plan_of(config, held, target=target_facts(T0, head))
    assert plan.ok and plan.config["draft_vocab_size"] == 32
    assert _written(plan)["lm_head.weight"] == ("target:head",)
    head_ = next(p for p in plan.placements if p.name == "lm_head.weight")
    assert head_.shape == (32, 8) and head_.vocab_axis == 0


@pytest.mark.parametrize(
    ("head", "code"), [("missing", "target-needed"), ("packed", "head-packed")]
)
def test_a_missing_head_that_the_target_cannot_give(head: Any, code: str) -> None:
    config = eagle3(draft_vocab_size=32)
    held = _without(config, "lm_head.weight")
    found = only_error(plan_of(config, held, target=target_facts(T0, head)), code)
    assert found.subject == "lm_head.weight"
    # With a head of its own the draft does not care.
    assert plan_of(config, target=target_facts(T0, head)).ok
    # A block draft never ships one.
    slim = _without(dflash(), "lm_head.weight", "embed_tokens.weight")
    assert plan_of(dflash(), slim, target=target_facts(T0, head)).ok


# --- refusals ---------------------------------------------------------------------

QWEN3: Config = {"model_type": "qwen3"}
SLIDE = "sliding_attention"
FULL = "full_attention"
REFUSALS: list[tuple[str, Config, str, list[str]]] = [
    (
        "norm-before-residual",
        eagle3(norm_before_residual=True),
        "norm_before_residual",
        [],
    ),
    (
        "norm-before-residual-unknown",
        eagle3(norm_before_residual=...),
        "norm_before_residual",
        [],
    ),
    (
        "attention-bias-dropped",
        eagle3({"attention_bias": True}),
        "layers.0.self_attn.{}_proj.bias",
        ["q", "k", "v", "o"],
    ),
    (
        "mlp-bias-dropped",
        eagle3({"mlp_bias": True}),
        "layers.0.mlp.{}_proj.bias",
        ["gate", "up", "down"],
    ),
    ("qk-norm-dropped", eagle3(QWEN3), "layers.0.self_attn.{}_norm.weight", ["q", "k"]),
    (
        "layer-types-mixed",
        eagle3(
            {"num_hidden_layers": 2, "layer_types": [SLIDE, FULL], "sliding_window": 16}
        ),
        "transformer_layer_config.layer_types",
        [],
    ),
    (
        "single-aux-layer",
        eagle3(eagle_aux_hidden_state_layer_ids=[3]),
        "eagle_aux_hidden_state_layer_ids",
        [],
    ),
    ("reduced-vocabulary", dflash(draft_vocab_size=12), "draft_vocab_size", []),
    (
        "sample-from-anchor",
        dflash(
            sample_from_anchor=True,
            speculators_config={"proposal_methods": [{"speculative_tokens": 4}]},
        ),
        "sample_from_anchor",
        [],
    ),
    (
        "sliding-window-extent",
        dflash({"layer_types": [SLIDE, FULL], "sliding_window": 16}),
        "transformer_layer_config.sliding_window",
        [],
    ),
]


# From these on another class takes the draft exactly.
UNTIL = {"reduced-vocabulary": "0.5.18", "sample-from-anchor": "0.5.15"}


@pytest.mark.parametrize(
    ("code", "config", "subject", "parts"), REFUSALS, ids=[r[0] for r in REFUSALS]
)
def test_deviations_are_refused_unless_allowed(
    code: str, config: Config, subject: str, parts: list[str]
) -> None:
    subjects = {subject.format(p) for p in parts} or {subject}
    held = tensors_of({**config, "norm_before_residual": False})
    release = UNTIL.get(code, "0.5.23")

    def planned(*allow: str) -> Plan:
        return plan_of(config, held, release=release, allow=allow)

    found = errors(planned())
    assert {(f.code, f.subject) for f in found} == {(code, s) for s in subjects}
    assert all(f.hint for f in found)
    assert CODES[code].allowable
    allowed = planned(code)
    assert allowed.ok
    accepted = deviations(allowed.findings, [code])
    assert {f.subject for f in accepted} == subjects
    assert {f.severity for f in accepted} == {Severity.WARNING}
    # Another code does not open the door.
    assert not planned("target-differs").ok


INVALID: list[tuple[str, Config, str, list[str]]] = [
    ("activation-unsupported", eagle3({"hidden_act": "gelu"}), "hidden_act", ["gelu"]),
    ("activation-unsupported", dflash({"hidden_act": "gelu"}), "hidden_act", ["gelu"]),
    ("config-invalid", eagle3({"model_type": "gemma"}), "model_type", ["gemma"]),
    ("config-invalid", dflash({"model_type": "llama"}), "model_type", ["llama"]),
    ("config-invalid", dflash(mask_token_id=32), "mask_token_id", ["32"]),
    ("config-invalid", dflash(mask_token_id=None), "mask_token_id", ["missing"]),
    ("config-invalid", dflash(block_size=1), "block_size", ["1"]),
    ("config-invalid", dflash(sample_from_anchor=...), "sample_from_anchor", []),
    ("target-hidden-size", eagle3(target_hidden_size=16), "target_hidden_size", ["16"]),
    ("config-invalid", eagle3(norm_before_fc=True, fc_norm=True), "fc_norm", ["both"]),
    ("config-invalid", eagle3(draft_vocab_size=33), "layer_config", ["33", "32"]),
    ("config-invalid", eagle3(draft_vocab_size=0), "draft_vocab_size", ["0"]),
    ("config-invalid", eagle3(draft_vocab_size=None), "draft_vocab_size", []),
    ("config-invalid", eagle3({"num_key_value_heads": 3}), "layer_config", ["2", "3"]),
    ("config-invalid", dflash({"num_key_value_heads": 3}), "layer_config", ["2", "3"]),
    (
        "config-invalid",
        eagle3({"num_key_value_heads": 0}),
        "num_key_value_heads",
        ["0"],
    ),
    (
        "config-invalid",
        eagle3({"num_attention_heads": 0}),
        "num_attention_heads",
        ["0"],
    ),
    (
        "config-invalid",
        eagle3({"num_attention_heads": 0, "head_dim": None}),
        "num_attention_heads",
        ["0"],
    ),
    ("config-invalid", eagle3({"head_dim": -4}), "head_dim", ["-4"]),
    ("config-invalid", eagle3({"hidden_size": "8"}), "hidden_size", ["'8'"]),
    ("config-invalid", eagle3({"hidden_size": True}), "hidden_size", ["True"]),
    ("config-invalid", eagle3({"hidden_size": 2**40}), "hidden_size", []),
    ("config-invalid", eagle3({"num_hidden_layers": 0}), "num_hidden_layers", ["0"]),
    ("config-invalid", eagle3({"num_hidden_layers": 10**9}), "num_hidden_layers", []),
    ("config-invalid", eagle3({"rms_norm_eps": float("nan")}), "rms_norm_eps", ["nan"]),
    ("config-invalid", eagle3(norm_before_fc="no"), "norm_before_fc", ["'no'"]),
    (
        "config-invalid",
        eagle3({"layer_types": [SLIDE], "sliding_window": 1}),
        "sliding_window",
        ["1"],
    ),
    ("config-invalid", eagle3({"layer_types": [SLIDE]}), "sliding_window", ["0"]),
    (
        "config-invalid",
        dflash({"layer_types": [SLIDE, FULL]}),
        "sliding_window",
        ["0"],
    ),
    (
        "config-invalid",
        eagle3({"layer_types": [FULL] * 5}),
        "layer_types",
        ["5", "1 layers"],
    ),
    ("config-invalid", eagle3({"layer_types": ["chunked"]}), "layer_types", ["0"]),
    ("config-invalid", dflash({"layer_types": [FULL]}), "layer_types", ["1", "2"]),
    (
        "config-invalid",
        eagle3(speculators_config={"proposal_methods": [{"speculative_tokens": "3"}]}),
        "speculative_tokens",
        ["'3'"],
    ),
    (
        "config-invalid",
        eagle3(speculators_config={"proposal_methods": [{"speculative_tokens": 0}]}),
        "speculative_tokens",
        ["0"],
    ),
    (
        "layer-ids-unknown",
        eagle3(eagle_aux_hidden_state_layer_ids=None),
        "layer_ids",
        ["guess"],
    ),
    ("layer-ids-unknown", eagle3(eagle_aux_hidden_state_layer_ids=[]), "layer_ids", []),
    ("layer-ids-unknown", dflash(aux_hidden_state_layer_ids=None), "layer_ids", []),
    ("config-invalid", eagle3(eagle_aux_hidden_state_layer_ids=3), "layer_ids", ["3"]),
]


@pytest.mark.parametrize(("code", "config", "subject", "words"), INVALID)
def test_impossible_configurations(
    code: str, config: Config, subject: str, words: list[str]
) -> None:
    base = eagle3() if config["speculators_model_type"] == "eagle3" else dflash()
    found = [f for f in errors(plan_of(config, tensors_of(base))) if f.code == code]
    assert len([f for f in found if subject in f.subject]) == 1, found
    for word in words:
        assert word in next(f for f in found if subject in f.subject).message


@pytest.mark.parametrize("layer", [None, {}, "llama", [], 7])
def test_a_layer_configuration_that_is_none(layer: Any) -> None:
    for make in (eagle3, dflash):
        config = {**make(), "transformer_layer_config": layer}
        plan = plan_of(config, tensors_of(make()))
        assert not plan.ok and not plan.placements
        subjects = {f.subject for f in errors(plan)}
        assert "transformer_layer_config.hidden_size" in subjects


@pytest.mark.parametrize("kind", ["peagle", "xpress", "mtp", None, 3, ["eagle3"]])
def test_families_without_a_class(kind: Any) -> None:
    plan = plan_of({**eagle3(), "speculators_model_type": kind}, {})
    found = only_error(plan, "family-unsupported")
    assert repr(kind) in found.message and found.hint


def test_the_record_answers_for_a_silent_configuration() -> None:
    config = eagle3(norm_before_residual=...)
    held = tensors_of(eagle3())
    recorded = {"draft": {"norm_before_residual": False}}
    assert plan_of(config, held, recipe=recorded).ok
    recorded = {"draft": {"norm_before_residual": True}}
    plan = plan_of(config, held, recipe=recorded)
    assert only_error(plan, "norm-before-residual")
    # The configuration is asked first.
    assert plan_of(eagle3(), recipe=recorded).ok


def test_scaled_embeddings_of_gemma_targets() -> None:
    config = dflash()
    gemma = {
        **T0,
        "architectures": ["Gemma4ForCausalLM"],
        "model_type": "gemma4_text",
    }
    found = only_error(plan_of(config, target=gemma), "embedding-scale-rounded")
    assert "gemma4_text" in found.message and "2.8284" in found.message
    assert found.hint and "--dtype float32" in found.hint
    assert CODES["embedding-scale-rounded"].allowable
    for plan in (
        plan_of(config, target=gemma, allow=["embedding-scale-rounded"]),
        plan_of(config, target=gemma, dtype="float32"),
    ):
        assert plan.ok and plan.config["rms_norm_eps"] == pytest.approx(8e-5)
        scaled = {p.name: p for p in plan.placements if p.transform == "scale"}
        parts = ("fc", "q_proj", "k_proj", "o_proj", "down_proj")
        assert {name.split(".")[-2] for name in scaled} == set(parts)
        assert all(p.arguments == {"by": 8**0.5} for p in scaled.values())
        (change,) = [c for c in plan.config_changes if c.key == "rms_norm_eps"]
        assert change.from_ == 1e-5 and "scale" in change.rule
    biased = plan_of(dflash({"attention_bias": True}), target=gemma, dtype="float32")
    names = {p.name for p in biased.placements if p.transform == "scale"}
    assert "layers.0.self_attn.o_proj.bias" in names
    assert "layers.0.self_attn.v_proj.bias" not in names
    # EAGLE-3 normalises the embedding first, so the scale is gone.
    assert plan_of(eagle3(), target=gemma).ok
    plain = plan_of(config)
    assert plain.config["rms_norm_eps"] == 1e-5
    assert not any(p.transform for p in plain.placements)


def test_a_gemma_that_nobody_looked_at() -> None:
    other = {**T0, "architectures": ["Gemma9ForCausalLM"], "model_type": "gemma9"}
    plan = plan_of(dflash(), target=other, allow=["target-unknown-family"])
    assert "gemma9" in only_error(plan, "forward-differs").message


def test_a_tied_head_that_is_the_embedding_module() -> None:
    gemma = {
        **T0,
        "architectures": ["Gemma4ForCausalLM"],
        "model_type": "gemma4_text",
        "hidden_size": 16,
    }
    layer = {"hidden_size": 16, "num_attention_heads": 4}
    reduced = dflash(layer, draft_vocab_size=12)
    plan = plan_of(reduced, target=gemma)
    assert plan.template == "dflash-qwen3"
    assert only_error(plan, "reduced-vocabulary")
    (said,) = [f for f in plan.findings if f.severity is Severity.INFO]
    assert said.code == "target-unsupported" and "DSPARK" in said.message
    own = {**gemma, "tie_word_embeddings": False}
    assert plan_of(reduced, target=own).template == "dflash-qwen3-as-dspark"


def test_what_no_class_avoids_forbids_no_exact_class() -> None:
    gemma = {
        **T0,
        "architectures": ["Gemma4ForCausalLM"],
        "model_type": "gemma4_text",
        "tie_word_embeddings": False,
    }
    reduced = dflash(draft_vocab_size=12)
    plan = plan_of(reduced, target=gemma, allow=["embedding-scale-rounded"])
    assert plan.ok and plan.template == "dflash-qwen3-as-dspark"
    (said,) = [f for f in plan.findings if f.code == "exact-rewrite"]
    assert "(reduced-vocabulary)" in said.message
    # Nobody allowed the one that a class does avoid.
    refused = plan_of(reduced, target=gemma, allow=["reduced-vocabulary"])
    assert not refused.ok


# --- releases ---------------------------------------------------------------------

TWO: Config = {"num_hidden_layers": 2}
FOUR: Config = {"eagle_aux_hidden_state_layer_ids": [1, 2, 3, 4]}
# Each row of the table of what LlamaForCausalLMEagle3 reads since when.
GATES: list[tuple[str, Config, str, str, str]] = [
    ("class", eagle3(), "0.4.9", "0.4.5", "architectures"),
    ("layers", eagle3(TWO), "0.5.12", "0.5.11", "num_hidden_layers"),
    ("aux count", eagle3(**FOUR), "0.5.12", "0.5.11", "layer_ids"),
    ("fc_norm", eagle3(fc_norm=True), "0.5.12", "0.5.11", "fc_norm"),
    ("norm_output", eagle3(norm_output=True), "0.5.12", "0.5.11", "norm_output"),
    ("input_norm", eagle3(norm_before_fc=True), "0.5.17", "0.5.16", "norm_before_fc"),
    (
        "window flag",
        eagle3({"layer_types": [SLIDE], "sliding_window": 16}),
        "0.5.12",
        "0.5.11",
        "sliding_window",
    ),
    ("odd head", eagle3(), "0.5.4.post2", "0.5.4.post1", "draft_vocab_size"),
    ("block class", dflash(), "0.5.13", "0.5.12.post1", "architectures"),
    (
        "block window",
        dflash({"layer_types": [SLIDE, FULL], "sliding_window": 64}),
        "0.5.14",
        "0.5.13",
        "sliding_window",
    ),
    (
        "two-sided window",
        dflash(
            {"layer_types": [SLIDE, FULL], "sliding_window": 64},
            sliding_window_non_causal=True,
        ),
        "0.5.17",
        "0.5.16",
        "sliding_window_non_causal",
    ),
]
EVEN: Config = {"draft_vocab_size": 32}  # the whole vocabulary: no padding question
DEFAULT: Config = {"eagle_aux_hidden_state_layer_ids": [2, 3, 4]}
DEEP: Config = {**T0, "num_hidden_layers": 7}  # 2, 3, 4 is its default set


@pytest.mark.parametrize(
    ("config", "since", "before", "subject"),
    [g[1:] for g in GATES],
    ids=[g[0] for g in GATES],
)
def test_release_gates(config: Config, since: str, before: str, subject: str) -> None:
    if since == "0.4.9":
        config = {**config, **EVEN}
    held = tensors_of(config)
    assert plan_of(config, held).ok
    assert plan_of(config, held, release=since).ok
    late = errors(plan_of(config, held, release=before))
    assert {f.code for f in late} == {"release-too-old"}
    (mine,) = [f for f in late if subject in f.subject]
    assert since in mine.message or since in (mine.hint or "")
    assert before in mine.message


@pytest.mark.parametrize(
    ("config", "since", "reason"),
    [
        # Default ids do not suffer from the CUDA-graph reset.
        (eagle3(**DEFAULT, **EVEN), "0.4.9", "LlamaForCausalLMEagle3"),
        (eagle3(**DEFAULT), "0.5.4.post2", "own head of odd size"),
        # They can be avoided by a flag, which the notes name.
        (eagle3(**EVEN), "0.4.9", "LlamaForCausalLMEagle3"),
        (eagle3(TWO, **DEFAULT), "0.5.12", "several layers"),
        (eagle3(**FOUR), "0.5.12", "number of auxiliary layers"),
        (eagle3(fc_norm=True), "0.5.12", "fc_norm"),
        (eagle3(norm_output=True), "0.5.12", "norm_output"),
        (eagle3(norm_before_fc=True, norm_output=True), "0.5.17", "norm_before_fc"),
        (eagle3({"layer_types": [SLIDE], "sliding_window": 16}), "0.5.12", "window"),
        (eagle3(**DEFAULT, **EVEN, quantization_config={"a": 1}), "0.5.7", "quantiz"),
    ],
)
def test_lowest_release(config: Config, since: str, reason: str) -> None:
    plan = plan_of(config, target=DEEP)
    assert plan.ok
    assert plan.min_version == since
    assert any(reason in r for r in plan.reasons)


@pytest.mark.parametrize("size", [64, 128])
def test_a_head_of_whole_blocks_needs_no_newer_release(size: int) -> None:
    layer = {"vocab_size": 256}
    target = {**DEEP, "vocab_size": 256}
    config = eagle3(layer, draft_vocab_size=size, **DEFAULT)
    assert plan_of(config, target=target).min_version == "0.4.9"
    odd = eagle3(layer, draft_vocab_size=size + 1, **DEFAULT)
    assert plan_of(odd, target=target).min_version == "0.5.4.post2"


def test_custom_ids_need_eager_mode_on_old_releases() -> None:
    plan = plan_of(eagle3(), release="0.5.9")
    assert plan.ok and plan.launch[-1] == "--disable-cuda-graph"
    assert [(f.code, f.severity) for f in plan.findings] == [
        ("cuda-graph-layer-ids", Severity.WARNING)
    ]
    assert plan.findings[0].subject == "eagle_aux_hidden_state_layer_ids"
    assert any("--disable-cuda-graph" in note for note in plan.notes)
    # Newer releases do without, and say so to whoever runs an older one.
    newer = plan_of(eagle3(), release="0.5.11")
    assert "--disable-cuda-graph" not in newer.launch and not newer.findings
    assert any("--disable-cuda-graph" in note for note in newer.notes)
    # Default ids never need it.
    default = plan_of(eagle3(**DEFAULT), release="0.5.9", target=DEEP)
    assert "--disable-cuda-graph" not in default.launch and not default.findings
    assert not default.notes


@pytest.mark.parametrize(("window", "flag"), [(2, "1"), (16, "15"), (63, "62")])
def test_window_flag(window: int, flag: str) -> None:
    config = eagle3({"layer_types": [SLIDE], "sliding_window": window})
    plan = plan_of(config)
    assert plan.ok
    assert plan.launch[-2:] == ["--speculative-draft-window-size", flag]
    (found,) = plan.findings
    assert (found.code, found.severity) == ("sliding-window-flag", Severity.WARNING)
    assert str(window) in found.message and flag in (found.hint or "")


@pytest.mark.parametrize(
    "layer",
    [
        {"layer_types": [FULL], "sliding_window": 16},
        {"layer_types": [SLIDE], "sliding_window": 64},
        {"sliding_window": 16},
        {},
    ],
)
def test_no_window_flag(layer: dict[str, Any]) -> None:
    plan = plan_of(eagle3(layer))
    assert "--speculative-draft-window-size" not in plan.launch
    assert not plan.findings


# --- the plug-in ------------------------------------------------------------------


def test_the_plug_in_only_where_it_is_needed() -> None:
    config = eagle3(norm_before_residual=True)
    plan = plan_of(config, plugin="auto")
    assert plan.ok and plan.requires_plugin
    assert [f.code for f in plan.findings] == ["plugin-needed"]
    assert "norm-before-residual" in plan.findings[0].message
    assert not plan_of(eagle3(), plugin="auto").requires_plugin
    assert plan_of(eagle3(), plugin="always").requires_plugin
    assert not plan_of(config, plugin="never").ok


def test_the_plug_in_is_no_way_around_a_broken_draft() -> None:
    config = eagle3()
    plan = plan_of(config, _without(config, "fc.weight"), plugin="auto")
    assert not plan.ok and not plan.requires_plugin


def test_no_plug_in_for_block_drafts() -> None:
    with pytest.raises(SpecExportError) as caught:
        plan_of(dflash(), plugin="always")
    assert caught.value.exit_code == 2
    assert caught.value.findings[0].subject == "--plugin"


def test_a_plan_changes_nothing_that_it_was_given() -> None:
    config, held = eagle3(), tensors_of(eagle3())
    before = repr(config), dict(held)
    plan_of(config, held, allow=["norm-before-residual"])
    assert (repr(config), held) == before
