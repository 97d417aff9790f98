"""Templates: the shipped ones hold, mutated ones do not, and speculators agrees.

The only file of the layout's tests that imports speculators.
"""

import copy
import json
import re
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
import yaml
from packaging.version import Version
from pydantic import BaseModel
from safetensors import safe_open

from spec_export.findings import CODES
from spec_export.layout.accounting import expected_tensors
from spec_export.layout.catalog import (
    families,
    load_template,
    template_of_class,
    templates,
)
from spec_export.layout.data import data_path
from spec_export.layout.inherit import extend
from spec_export.layout.proof import patterns_overlap, prove
from spec_export.layout.releases import instead_of, newest_known, oldest_known
from spec_export.layout.template import (
    Capture,
    ConfigRule,
    Derived,
    Deviation,
    Feature,
    Flag,
    Loader,
    LoaderParameter,
    Parameter,
    Refusal,
    Serves,
    Spelling,
    Template,
    TemplateError,
    TensorRule,
    Variable,
)
from spec_export.layout.tensors import TensorInfo
from spec_export.layout.variables import read_variables
from tests.helpers.layout_cases import T0, dflash, eagle3, plan_of, tensors_of

FOLDER = data_path("ckpt_templates")
Raw = dict[str, Any]


@lru_cache
def _text(name: str) -> Raw:
    raw: Raw = yaml.safe_load((FOLDER / f"{name}.yaml").read_text())
    return raw


def _raw(name: str = "eagle3-llama") -> Raw:
    return copy.deepcopy(_text(name))


def _load(raw: Raw) -> Template:
    """The two steps of loading: the grammar, then the proof."""
    template = Template.model_validate(raw)
    prove(template)
    return template


def _rule(raw: Raw, source: str) -> Raw:
    found: Raw = next(r for r in raw["tensors"] if r["source"] == source)
    return found


@pytest.mark.parametrize("kind", ["eagle3", "dflash"])
def test_shipped_templates_hold(kind: str) -> None:
    assert kind in families()
    found = templates(kind)
    assert not found[0].serves.plugin
    assert all(t.speculators_type == kind for t in found)


def test_a_transform_in_place_of_a_rename_loads() -> None:
    raw = _raw()
    _derive(raw)
    assert _load(raw).derived[0].transform == "insert"


def test_unmutated_files_load() -> None:
    for name in ("eagle3-llama", "dflash-qwen3"):
        assert _load(_raw(name)).template == name


def test_releases_of_the_templates_are_known() -> None:
    oldest, newest = Version(oldest_known()), Version(newest_known())
    for kind in families():
        for template in templates(kind):
            since = [template.serves.since, *(f.since for f in template.features)]
            assert all(oldest <= Version(v) <= newest for v in since)


@pytest.mark.parametrize("kind", ["mtp", "peagle", "xpress"])
def test_what_to_train_instead_is_served(kind: str) -> None:
    hint = instead_of(kind) or ""
    advised = re.match(r"train --speculator-type (\w+) or (\w+) ", hint + " ")
    assert advised is not None and {*advised.groups()} <= {*families()} - {kind}
    layers = {name for t in templates(kind) for name in t.serves.layers or []}
    assert layers == {name for name in re.findall(r"\b\w+\b", hint) if "_" in name}


def test_class_lookup() -> None:
    found = template_of_class("LlamaForCausalLMEagle3")
    assert found is not None and found.template == "eagle3-llama"
    assert template_of_class("NobodyForCausalLM") is None


def _duplicate_rule(raw: Raw) -> None:
    raw["tensors"].append(copy.deepcopy(_rule(raw, "fc.weight")))


def _overlapping_rule(raw: Raw) -> None:
    rule = {"source": "layers.{k}.mlp.up_proj.weight", "each": {"k": "N"}}
    raw["tensors"].append({**rule, "fate": "dropped", "reason": "twice"})


def _two_to_one(raw: Raw) -> None:
    rule = _rule(raw, "layers.{i}.mlp.up_proj.weight")
    rule["export"] = "{layer}.mlp.gate_proj.weight"


def _norm_kept(raw: Raw) -> None:
    rule = _rule(raw, "layers.{i}.input_layernorm.weight")
    rule["export"] = "{layer}.input_layernorm.weight"


def _always_midlayer(raw: Raw) -> None:
    raw["names"]["layer"] = [{"is": "midlayer"}]


def _never_midlayer(raw: Raw) -> None:
    # layers.0.hidden_norm.weight has a spelling of its own, so the two disagree.
    raw["names"]["layer"] = [{"is": "layers.{i}"}]


def _nobody_fills(raw: Raw) -> None:
    parameter = {"name": "extra_norm.weight", "shape": ["H"]}
    raw["parameters"].append(parameter)


def _nobody_takes(raw: Raw) -> None:
    raw["parameters"] = [p for p in raw["parameters"] if p["name"] != "norm.weight"]


def _conditional_parameter(raw: Raw) -> None:
    _rule(raw, "input_norm.weight")["exists"] = "fc_norm"


def _shape_differs(raw: Raw) -> None:
    _rule(raw, "fc.weight")["shape"] = ["A * H", "H"]


def _shape_of_layer(raw: Raw) -> None:
    rule = _rule(raw, "layers.{i}.self_attn.k_proj.weight")
    rule["shape"] = ["KV * D", "2 * H"]


def _unknown_in_shape(raw: Raw) -> None:
    _rule(raw, "fc.weight")["shape"] = ["H", "A * WIDTH"]


def _unknown_in_when(raw: Raw) -> None:
    raw["refuse"][0]["when"] = "norm_after_residual"


def _unknown_in_config(raw: Raw) -> None:
    raw["config"].append({"key": "x", "expr": "XX"})


def _unknown_in_spelling(raw: Raw) -> None:
    raw["names"]["layer"][0]["when"] = "layers == 1"


def _unknown_in_message(raw: Raw) -> None:
    raw["refuse"][0]["message"] = "is {norm}"


def _unknown_in_hint(raw: Raw) -> None:
    raw["refuse"][0]["hint"] = "use {norm}"


def _unknown_in_why(raw: Raw) -> None:
    raw["features"][0]["why"] = "{count} layers"


def _unknown_in_launch(raw: Raw) -> None:
    raw["serves"]["launch"].append("{steps}")


def _unknown_in_argv(raw: Raw) -> None:
    raw["flags"][0]["argv"] = ["--window", "{size}"]


def _attribute_in_message(raw: Raw) -> None:
    raw["refuse"][0]["message"] = "{act.__class__}"


def _later_variable(raw: Raw) -> None:
    raw["variables"] = {"HALF": {"expr": "H // 2"}, **raw["variables"]}


def _unknown_absent(raw: Raw) -> None:
    raw["variables"]["KV"]["absent"] = "HEADS"


def _two_origins(raw: Raw) -> None:
    raw["variables"]["H"]["target"] = "hidden_size"


def _unknown_placeholder(raw: Raw) -> None:
    rule = _rule(raw, "layers.{i}.mlp.up_proj.weight")
    rule["export"] = "{block}.mlp.up_proj.weight"


def _index_without_each(raw: Raw) -> None:
    del _rule(raw, "layers.{i}.mlp.up_proj.weight")["each"]


def _each_without_index(raw: Raw) -> None:
    _rule(raw, "fc.weight")["each"] = {"i": "N"}


def _no_reason(raw: Raw) -> None:
    del _rule(raw, "embed_tokens.weight")["reason"]


def _no_reason_dropped(raw: Raw) -> None:
    del _rule(raw, "t2d")["reason"]


def _no_counterpart(raw: Raw) -> None:
    del _rule(raw, "embed_tokens.weight")["counterpart"]


def _dropped_with_name(raw: Raw) -> None:
    _rule(raw, "t2d")["export"] = "t2d"


def _renamed_without_name(raw: Raw) -> None:
    del _rule(raw, "fc.weight")["export"]


def _transformed_with_name(raw: Raw) -> None:
    _rule(raw, "fc.weight")["fate"] = "transformed"


def _transformed_without_transform(raw: Raw) -> None:
    rule = _rule(raw, "fc.weight")
    rule["fate"] = "transformed"
    del rule["export"]


def _derive(raw: Raw, **changes: Any) -> None:
    """fc.weight through a transform instead of a rename."""
    _transformed_without_transform(raw)
    rule = {
        "name": "fc.weight",
        "transform": "insert",
        "sources": ["fc.weight"],
        "arguments": {"value": 0},
        "shape": ["H", "A * H"],
    }
    raw["derived"] = [{**rule, **changes}]


def _unknown_transform(raw: Raw) -> None:
    _derive(raw, transform="fold")


def _derived_of_nothing(raw: Raw) -> None:
    _derive(raw, sources=["fc2.weight"])


def _derived_of_another_shape(raw: Raw) -> None:
    _derive(raw, shape=["H", "H"])


def _derived_argument(raw: Raw) -> None:
    _derive(raw, arguments={"by": 2})


def _derived_twice(raw: Raw) -> None:
    _derive(raw)
    raw["derived"] *= 2


def _not_invertible(raw: Raw) -> None:
    _rule(raw, "fc.weight")["invertible"] = False


def _regex(raw: Raw) -> None:
    _rule(raw, "norm.weight")["source"] = r"norm\.weight"


def _glob(raw: Raw) -> None:
    _rule(raw, "norm.weight")["source"] = "norm.*"


def _regex_of_layers(raw: Raw) -> None:
    rule = _rule(raw, "layers.{i}.mlp.up_proj.weight")
    rule["source"] = "layers.([0-9]+).mlp.up_proj.weight"


def _call_in_expression(raw: Raw) -> None:
    _rule(raw, "fc.weight")["shape"] = ["H", "max(A, 3) * H"]


def _no_expression(raw: Raw) -> None:
    raw["refuse"][0]["when"] = "A =="


def _unknown_code(raw: Raw) -> None:
    raw["refuse"][0]["code"] = "no-such-code"


def _unknown_missing_code(raw: Raw) -> None:
    raw["variables"]["A"]["missing"] = "no-such-code"


def _unknown_deviation(raw: Raw) -> None:
    rule = _rule(raw, "layers.{i}.self_attn.q_norm.weight")
    rule["deviation"]["code"] = "no-such-code"


def _no_release(raw: Raw) -> None:
    raw["features"][0]["since"] = "soon"


def _release_as_number(raw: Raw) -> None:
    raw["serves"]["since"] = 0.5


def _unknown_function(raw: Raw) -> None:
    raw["config"].append({"key": "x", "function": "attention"})


def _two_ways(raw: Raw) -> None:
    raw["config"].append({"key": "x", "value": 1, "expr": "H"})


def _unknown_key(raw: Raw) -> None:
    _rule(raw, "fc.weight")["regex"] = True


def _unknown_fate(raw: Raw) -> None:
    _rule(raw, "t2d")["fate"] = "lost"


def _unknown_in_loader(raw: Raw) -> None:
    raw["loader"]["refuse"][0]["when"] = "tied_embedding"


def _loader_lacks_a_size(raw: Raw) -> None:
    del raw["loader"]["variables"]["NH"]


MUTATIONS: list[tuple[Callable[[Raw], None], str]] = [
    (_duplicate_rule, "fc.weight and fc.weight match the same name"),
    (_overlapping_rule, "match the same name"),
    (_two_to_one, "both become midlayer.mlp.gate_proj.weight"),
    (_norm_kept, "written but not taken: ['layers.1.input_layernorm.weight']"),
    (_always_midlayer, "both become midlayer."),
    (_never_midlayer, "midlayer.hidden_norm.weight"),
    (_nobody_fills, "taken but not written: ['extra_norm.weight']"),
    (_nobody_takes, "written but not taken: ['norm.weight']"),
    (_conditional_parameter, "input_norm.weight"),
    (_shape_differs, "fc.weight has the shape"),
    (_shape_of_layer, "layers.1.self_attn.k_proj.weight has the shape"),
    (_unknown_in_shape, "WIDTH"),
    (_unknown_in_when, "norm_after_residual"),
    (_unknown_in_config, "XX"),
    (_unknown_in_spelling, "layers"),
    (_unknown_in_message, "'norm'"),
    (_unknown_in_hint, "'norm'"),
    (_unknown_in_why, "'count'"),
    (_unknown_in_launch, "'steps'"),
    (_unknown_in_argv, "'size'"),
    (_attribute_in_message, "is not a name"),
    (_later_variable, "variable HALF"),
    (_unknown_absent, "HEADS"),
    (_two_origins, "exactly one of source, target, expr"),
    (_unknown_placeholder, "'block'"),
    (_index_without_each, "layers.{i}.mlp.up_proj.weight"),
    (_each_without_index, "fc.weight"),
    (_no_reason, "needs a reason"),
    (_no_reason_dropped, "needs a reason"),
    (_no_counterpart, "which of the target's tensors"),
    (_dropped_with_name, "only what is written has an export name"),
    (_renamed_without_name, "only what is written has an export name"),
    (_transformed_with_name, "only what is written has an export name"),
    (_transformed_without_transform, "fc.weight"),
    (_unknown_transform, "no transform 'fold'"),
    (_derived_of_nothing, "fc2.weight"),
    (_derived_of_another_shape, "the rule says"),
    (_derived_argument, "insert takes ['value']"),
    (_derived_twice, "two transforms write fc.weight"),
    (_not_invertible, "why the rule is not invertible"),
    (_regex, "is no tensor name"),
    (_glob, "is no tensor name"),
    (_regex_of_layers, "layers.([0-9]+)"),
    (_call_in_expression, "max"),
    (_no_expression, "is not an expression"),
    (_unknown_code, "no-such-code"),
    (_unknown_missing_code, "no-such-code"),
    (_unknown_deviation, "no-such-code"),
    (_no_release, "'soon' is no release"),
    (_release_as_number, "since"),
    (_unknown_function, "function"),
    (_two_ways, "one of value, expr, copy, function"),
    (_unknown_key, "regex"),
    (_unknown_fate, "fate"),
    (_unknown_in_loader, "tied_embedding"),
    (_loader_lacks_a_size, "NH"),
]


@pytest.mark.parametrize(
    ("mutate", "words"), MUTATIONS, ids=lambda m: getattr(m, "__name__", "")
)
def test_a_mutated_template_does_not_load(
    mutate: Callable[[Raw], None], words: str
) -> None:
    raw = _raw()
    mutate(raw)
    # TemplateError, or pydantic's error, which load_template turns into one.
    with pytest.raises(ValueError, match=re.escape(words)):
        _load(raw)


def test_the_grammar_s_error_names_the_file(tmp_path: Path) -> None:
    raw = _raw("dflash-qwen3")
    raw["tensors"][0]["regex"] = True
    path = tmp_path / "mutated.yaml"
    path.write_text(yaml.safe_dump(raw))
    with pytest.raises(TemplateError, match=r"(?s)mutated\.yaml.*regex"):
        load_template(path)


@pytest.mark.parametrize("text", ["", "- a list\n", "template: [unclosed\n", "\x00"])
def test_a_file_that_is_no_template(text: str, tmp_path: Path) -> None:
    path = tmp_path / "broken.yaml"
    path.write_text(text)
    with pytest.raises(TemplateError, match=r"broken\.yaml"):
        load_template(path)


@pytest.mark.parametrize(
    ("a", "b", "overlap"),
    [
        ("fc.weight", "fc.weight", True),
        ("fc.weight", "fc.bias", False),
        ("layers.{i}.x", "layers.0.x", True),
        ("layers.{i}.x", "layers.0.y", False),
        ("layers.{i}.{p}_proj.x", "layers.{k}.q_proj.x", True),
        ("layers.{i}.{p}_proj.x", "layers.{k}.q_norm.x", False),
        ("layers.{i}.{p}_proj.x", "layers.{i}.q_{r}.x", True),
        ("a.{i}", "a.{i}.b", False),
        ("d2t", "t2d", False),
    ],
)
def test_overlap_of_patterns(a: str, b: str, overlap: bool) -> None:
    assert patterns_overlap(a, b) is overlap
    assert patterns_overlap(b, a) is overlap


def test_extends_replaces_adds_and_removes() -> None:
    base = {
        "template": "a",
        "serves": {"since": "1", "plugin": False},
        "tensors": [{"source": "x", "fate": "dropped"}, {"source": "y"}],
    }
    child = {
        "extends": "a",
        "template": "b",
        "serves": {"plugin": True},
        "tensors": [{"source": "x"}, {"source": "y", "remove": True}, {"source": "z"}],
    }
    assert extend(base, child) == {
        "template": "b",
        "serves": {"since": "1", "plugin": True},
        "tensors": [{"source": "x"}, {"source": "z"}],
    }


def test_extends_refuses_what_it_cannot_tell() -> None:
    gone = {"tensors": [{"source": "y", "remove": True}]}
    with pytest.raises(ValueError, match="not there"):
        extend({"tensors": [{"source": "x"}]}, gone)
    twice = {"flags": [{"argv": ["--x"], "when": 1}, {"argv": ["--x"], "when": 2}]}
    with pytest.raises(ValueError, match="two rules"):
        extend(twice, {"flags": []})


def test_codes_of_deviations_can_be_allowed() -> None:
    codes = {
        rule.deviation.code
        for kind in families()
        for template in templates(kind)
        for rule in template.tensors
        if rule.deviation is not None
    }
    assert codes and all(CODES[code].allowable for code in codes)


# --- what speculators really saves -----------------------------------------------


def _saved(model: Any, folder: Path) -> dict[str, TensorInfo]:
    model.save_pretrained(folder)
    out = {}
    with safe_open(folder / "model.safetensors", "np") as file:
        for name in file.keys():  # noqa: SIM118  (no mapping)
            part = file.get_slice(name)
            out[name] = TensorInfo(name, part.get_dtype(), tuple(part.get_shape()))
    return out


def _layer_config(kind: str, **more: Any) -> Any:
    from transformers import LlamaConfig, Qwen3Config

    layer = {"llama": LlamaConfig, "qwen3": Qwen3Config}[kind](
        hidden_size=8,
        intermediate_size=16,
        num_attention_heads=2,
        head_dim=4,
        vocab_size=32,
        max_position_embeddings=64,
        rope_parameters={"rope_type": "default", "rope_theta": 5e5},
        **{"num_key_value_heads": 1, "num_hidden_layers": 1, **more},
    )
    layer._attn_implementation = "eager"
    return layer


def _speculators_config() -> Any:
    from speculators.config import SpeculatorsConfig, VerifierConfig
    from speculators.proposals.greedy import GreedyTokenProposalConfig

    return SpeculatorsConfig(
        algorithm="any",
        proposal_methods=[GreedyTokenProposalConfig(speculative_tokens=3)],
        default_proposal_method="greedy",
        verifier=VerifierConfig(name_or_path=None, architectures=["LlamaForCausalLM"]),
    )


def _agree(kind: str, model: Any, folder: Path) -> tuple[Raw, dict[str, TensorInfo]]:
    """Compare the rules with what the class saves, and return what is on disk."""
    model.bfloat16()
    saved = _saved(model, folder)
    config: Raw = json.loads((folder / "config.json").read_text())
    for template in templates(kind):
        values, problems = read_variables(template, config, T0, None)
        assert not problems
        names = expected_tensors(template, values)
        # What a slim checkpoint lacks may be absent; everything else may not.
        assert saved.items() <= names.items()
        needed = expected_tensors(template, values, optional=False)
        assert needed.items() <= saved.items()
    return config, saved


EAGLE3: list[tuple[str, Raw, Raw]] = [
    ("llama", {}, {}),
    ("llama", {"num_hidden_layers": 2}, {"norm_before_fc": True}),
    ("llama", {"num_hidden_layers": 3, "num_key_value_heads": 2}, {"fc_norm": True}),
    ("llama", {}, {"draft_vocab_size": 32, "norm_output": True}),
    (
        "llama",
        {"attention_bias": True, "mlp_bias": True},
        {"norm_before_residual": True},
    ),
    ("llama", {}, {"eagle_aux_hidden_state_layer_ids": [1, 2, 3, 4], "fc_norm": True}),
    ("qwen3", {}, {}),
    ("qwen3", {"num_hidden_layers": 2, "attention_bias": True}, {"fc_norm": True}),
]


@pytest.mark.parametrize(("arch", "layer", "flags"), EAGLE3)
def test_eagle3_as_speculators_saves_it(
    arch: str, layer: Raw, flags: Raw, tmp_path: Path
) -> None:
    from speculators.models.eagle3 import Eagle3SpeculatorConfig
    from speculators.models.eagle3.core import Eagle3DraftModel

    given = {
        "draft_vocab_size": 12,
        "eagle_aux_hidden_state_layer_ids": [1, 3, 4],
        **flags,
    }
    model = Eagle3DraftModel(
        Eagle3SpeculatorConfig(
            transformer_layer_config=_layer_config(arch, **layer),
            speculators_config=_speculators_config(),
            **given,
        )
    )
    config, saved = _agree("eagle3", model, tmp_path)
    # EAGLE-3 saves the embedding and the head always, the map when there is one.
    assert saved == tensors_of(config)
    plan = plan_of(config, saved)
    servable = arch == "llama" and not layer.get("attention_bias")
    assert plan.ok is servable
    assert {f.source for f in plan.fates} == set(saved)
    plugged = plan_of(config, saved, plugin="always")
    assert plugged.ok and plugged.requires_plugin


DFLASH: list[tuple[Raw, Raw]] = [
    ({}, {}),
    ({"num_hidden_layers": 2, "attention_bias": True}, {}),
    ({"num_hidden_layers": 2}, {"draft_vocab_size": 12}),
    ({"num_key_value_heads": 2}, {"aux_hidden_state_layer_ids": [3]}),
]


@pytest.mark.parametrize(("layer", "flags"), DFLASH)
def test_dflash_as_speculators_saves_it(layer: Raw, flags: Raw, tmp_path: Path) -> None:
    from speculators.models.dflash import DFlashSpeculatorConfig
    from speculators.models.dflash.core import DFlashDraftModel

    given = {
        "draft_vocab_size": 32,
        "aux_hidden_state_layer_ids": [2, 3, 5],
        "block_size": 4,
        "mask_token_id": 31,
        **flags,
    }
    model = DFlashDraftModel(
        DFlashSpeculatorConfig(
            transformer_layer_config=_layer_config("qwen3", **layer),
            speculators_config=_speculators_config(),
            **given,
        )
    )
    config, saved = _agree("dflash", model, tmp_path)
    absent = {"embed_tokens.weight"}
    if given["draft_vocab_size"] == 32:
        absent.add("lm_head.weight")
    expected = tensors_of(config)
    assert saved == {k: v for k, v in expected.items() if k not in absent}
    plan = plan_of(config, saved, allow=["reduced-vocabulary"])
    assert plan.ok
    assert {f.source for f in plan.fates} == set(saved)


def test_the_comparison_sees_another_configuration() -> None:
    assert tensors_of(eagle3()) != tensors_of(eagle3(fc_norm=True))
    assert tensors_of(dflash()) != tensors_of(dflash({"attention_bias": True}))
    shapes = {n: t.shape for n, t in tensors_of(eagle3({"head_dim": 2})).items()}
    assert shapes != {n: t.shape for n, t in tensors_of(eagle3()).items()}


def test_the_example_of_the_readme_holds() -> None:
    text = (FOLDER / "README.md").read_text()
    example = text.split("```yaml\n")[1].split("```")[0]
    assert _load(yaml.safe_load(example)).template == "tiny"


def test_the_readme_names_every_key() -> None:
    text = (FOLDER / "README.md").read_text()
    models: list[type[BaseModel]] = [
        *(Template, Serves, Variable, Capture, TensorRule, Derived, Deviation),
        *(Parameter, ConfigRule, Refusal, Feature, Flag),
        *(Loader, LoaderParameter, Spelling),
    ]
    keys = {f.alias or n for model in models for n, f in model.model_fields.items()}
    words = set(re.findall(r"[a-z_]+", " ".join(re.findall(r"`([^`]+)`", text))))
    assert keys - words == set()
