"""Layer ids per target family: the tables of what SGLang's classes capture."""

import json
from pathlib import Path
from typing import Any

import pytest
from packaging.version import Version

from spec_export.findings import CODES, SpecExportError
from spec_export.judge.checks import captured_layers
from spec_export.judge.reference.block_config import served_scale
from spec_export.layout.releases import newest_known, parse_release
from spec_export.layout.targets import (
    Captured,
    Hook,
    capture_ids,
    context_length,
    served_embedding,
    target_classes,
    target_facts,
)
from tests.helpers.layout_cases import T0, dflash, eagle3, errors, only_error, plan_of

FIXTURES = Path(__file__).parents[1] / "fixtures" / "targets"
KEY = "eagle_aux_hidden_state_layer_ids"


def _target(architecture: str, depth: int = 12) -> Any:
    return target_facts(
        {**T0, "architectures": [architecture], "num_hidden_layers": depth}
    )


def _ids(
    architecture: str,
    ids: list[Any],
    release: str = "0.5.23",
    hook: Hook = "eagle3",
    depth: int = 12,
) -> Captured:
    return capture_ids(ids, _target(architecture, depth), hook, KEY, Version(release))


def _captured_points(rule: str, written: list[int], depth: int) -> list[int]:
    """SGLang's set_eagle3_layers_to_capture: residuals entering which layers."""
    shifted = [i + 1 for i in written]
    if rule == "deepseek":
        shifted = shifted if written[0] == 1 else written
    if rule == "gpt_oss":
        shifted = written if max(written) == depth else shifted
    return sorted(shifted)


# First release with the EAGLE-3 hook, with the DFlash hook: looked for in all wheels.
HOOKS = [
    ("LlamaForCausalLM", "0.4.5", "0.5.11"),
    ("Llama4ForConditionalGeneration", "0.4.9", "0.5.11"),
    ("Qwen2ForCausalLM", "0.5.2", None),
    ("Qwen2MoeForCausalLM", "0.5.2", None),
    ("Qwen2_5_VLForConditionalGeneration", "0.5.2", None),
    ("Qwen3ForCausalLM", "0.4.9", "0.5.11"),
    ("Qwen3MoeForCausalLM", "0.4.9", "0.5.11"),
    ("Qwen3NextForCausalLM", "0.5.9", "0.5.11"),
    ("Qwen3_5ForConditionalGeneration", "0.5.22", "0.5.11"),
    ("Qwen3_5MoeForConditionalGeneration", "0.5.22", "0.5.11"),
    ("Qwen3_5ForCausalLM", "0.5.22", "0.5.22"),
    ("Qwen3_5MoeForCausalLM", "0.5.22", "0.5.22"),
    ("Qwen3VLForConditionalGeneration", "0.5.11", "0.5.11"),
    ("DeepseekV2ForCausalLM", "0.5.4.post2", "0.5.11"),
    ("KimiK25ForConditionalGeneration", "0.5.10", "0.5.11"),
    ("Glm4MoeForCausalLM", "0.5.5", None),
    ("Glm4MoeLiteForCausalLM", "0.5.13", "0.5.13"),
    ("Glm5NextForConditionalGeneration", "0.5.20", "0.5.20"),
    ("GptOssForCausalLM", "0.5.1", "0.5.11"),
    ("MiniMaxM2ForCausalLM", "0.5.5.post1", None),
    ("MiniMaxM3SparseForCausalLM", "0.5.16", None),
    ("MiniMaxM3SparseForConditionalGeneration", "0.5.18", "0.5.23"),
    ("Gemma3ForCausalLM", "0.5.12", None),
    ("Gemma3ForConditionalGeneration", "0.5.12", None),
    ("Gemma4ForCausalLM", "0.5.12", "0.5.14"),
    ("Gemma4ForConditionalGeneration", "0.5.12", "0.5.14"),
    ("ApertusForCausalLM", "0.5.3", None),
    ("BailingMoEForCausalLM", "0.5.9", None),
    ("ExaoneMoEForCausalLM", "0.5.9", None),
    ("LongcatFlashForCausalLM", "0.5.6", None),
]
# Ids that every rule spells id - 1: the first becomes 1, the last layer is not there.
PLAIN = [2, 6, 9]


@pytest.mark.parametrize(("architecture", "eagle", "block"), HOOKS)
def test_hooks(architecture: str, eagle: str, block: str | None) -> None:
    found = _ids(architecture, PLAIN)
    assert (found.ids, found.min_version) == ([1, 5, 8], eagle)
    assert not found.findings and found.default
    known = target_classes()[architecture]
    assert (known.eagle3, known.dflash) == (eagle, block)
    found = _ids(architecture, PLAIN, hook="dflash")
    if block is None:
        assert [f.code for f in found.findings] == ["target-unsupported"]
        assert architecture in found.findings[0].message
    else:
        assert (found.ids, found.min_version) == ([1, 5, 8], block)
        assert not found.findings


@pytest.mark.parametrize(
    "architecture", [a for a, since, _ in HOOKS if since > "0.4.9"]
)
def test_a_release_without_the_hook(architecture: str) -> None:
    found = _ids(architecture, PLAIN, "0.4.9")
    assert [f.code for f in found.findings] == ["release-too-old"]
    assert found.min_version in found.findings[0].message
    assert "0.4.9" in found.findings[0].message
    assert not _ids(architecture, PLAIN, found.min_version).findings


@pytest.mark.parametrize(
    ("architecture", "since"),
    [
        ("LlamaForCausalLM", "0.5.22"),
        ("Llama4ForConditionalGeneration", "0.5.21"),
        ("Glm4MoeForCausalLM", "0.5.21"),
        ("GptOssForCausalLM", "0.5.17"),
        ("Qwen2ForCausalLM", "0.5.2"),
        ("Qwen2MoeForCausalLM", "0.5.2"),
        ("Qwen3ForCausalLM", "0.4.9"),
        ("Qwen3MoeForCausalLM", "0.4.9"),
        ("Qwen3VLForConditionalGeneration", "0.5.11"),
        ("Gemma3ForCausalLM", "0.5.12"),
    ],
)
def test_embedding_output(architecture: str, since: str) -> None:
    found = _ids(architecture, [0, 3, 5])
    assert (found.ids, found.min_version, found.findings) == ([-1, 2, 4], since, [])
    assert not found.default
    if since > "0.4.9":
        late = _ids(architecture, [0, 3, 5], "0.4.9").findings
        assert [f.code for f in late] == ["release-too-old"]
        assert since in late[0].message


@pytest.mark.parametrize(
    "architecture",
    ["MiniMaxM2ForCausalLM", "Qwen3NextForCausalLM", "ApertusForCausalLM"],
)
def test_embedding_output_that_nobody_saw(architecture: str) -> None:
    found = _ids(architecture, [0, 3, 5]).findings
    assert [f.code for f in found] == ["layer-id-uncapturable"]
    assert "id 0" in found[0].message and architecture in found[0].message


@pytest.mark.parametrize("architecture", [a for a, _, block in HOOKS if block])
def test_no_block_draft_takes_the_embedding_output(architecture: str) -> None:
    found = _ids(architecture, [0, 3, 5], hook="dflash").findings
    assert [f.code for f in found] == ["layer-id-uncapturable"]
    assert "id 0" in found[0].message and "dflash" in found[0].message


@pytest.mark.parametrize(
    ("architecture", "since", "written"),
    [
        ("Gemma3ForCausalLM", "0.5.12", [2, 4, 11]),
        ("Gemma3ForConditionalGeneration", "0.5.12", [2, 4, 11]),
        ("Gemma4ForCausalLM", "0.5.12", [2, 4, 11]),
        ("MiniMaxM3SparseForCausalLM", "0.5.16", [2, 4, 11]),
        ("GptOssForCausalLM", "0.5.17", [3, 5, 12]),
    ],
)
def test_last_layer(architecture: str, since: str, written: list[int]) -> None:
    found = _ids(architecture, [3, 5, 12])
    assert (found.ids, found.min_version, found.findings) == (written, since, [])
    late = _ids(architecture, [3, 5, 12], "0.5.11").findings
    assert [f.code for f in late] == ["release-too-old"]
    assert since in late[0].message


@pytest.mark.parametrize(
    ("architecture", "note"),
    [
        ("LlamaForCausalLM", "fc fails"),
        ("Llama4ForConditionalGeneration", ""),
        ("Qwen2ForCausalLM", ""),
        ("Qwen3ForCausalLM", "fc fails"),
        ("Glm4MoeForCausalLM", ""),
        ("Glm4MoeLiteForCausalLM", ""),
        ("MiniMaxM2ForCausalLM", "missing"),
        ("Qwen3VLForConditionalGeneration", ""),
        ("DeepseekV3ForCausalLM", "captured x of y"),
        ("KimiK25ForConditionalGeneration", "captured x of y"),
        ("Qwen2MoeForCausalLM", "IndexError"),
        ("Qwen3MoeForCausalLM", "IndexError"),
        ("Qwen3NextForCausalLM", "IndexError"),
        ("Qwen3_5ForCausalLM", "IndexError"),
    ],
)
def test_last_layer_that_is_never_captured(architecture: str, note: str) -> None:
    found = _ids(architecture, [2, 5, 12]).findings
    assert [f.code for f in found] == ["layer-id-uncapturable"]
    assert "id 12 of [2, 5, 12] is the last layer's output, which SGLang's " in (
        found[0].message
    )
    assert architecture in found[0].message and note in found[0].message


def test_last_layer_of_a_block_draft() -> None:
    # models/gpt_oss.py: the DFlash hook always adds one, the exception is EAGLE-3's.
    assert _ids("GptOssForCausalLM", [3, 12], hook="dflash").ids == [2, 11]
    assert _ids("Gemma4ForCausalLM", [3, 12], hook="dflash").ids == [2, 11]


@pytest.mark.parametrize(
    "architecture",
    [
        "DeepseekV2ForCausalLM",
        "DeepseekV3ForCausalLM",
        "DeepseekV32ForCausalLM",
        "KimiK25ForConditionalGeneration",
        "Glm4MoeLiteForCausalLM",
    ],
)
@pytest.mark.parametrize(
    ("ids", "written", "exceptional"),
    [
        ([2, 6, 9], [1, 5, 8], False),
        ([2], [1], False),
        ([3, 6, 9], [3, 6, 9], True),
        ([1, 6, 9], [6, 1, 9], True),
        ([1, 2], [2, 1], True),
        ([1, 2, 3, 4], [2, 1, 3, 4], True),
        ([9, 6, 2], [1, 5, 8], False),
    ],
)
def test_first_id_rule(
    architecture: str, ids: list[int], written: list[int], exceptional: bool
) -> None:
    found = _ids(architecture, ids)
    assert found.ids == written and not found.findings
    assert _captured_points("deepseek", written, 12) == sorted(ids)
    if exceptional:
        assert found.min_version == "0.5.13"
        late = _ids(architecture, ids, "0.5.12").findings
        assert [f.code for f in late] == ["release-too-old"]
    # DFlash hooks of these classes always add one.
    assert _ids(architecture, ids, hook="dflash").ids == sorted(i - 1 for i in ids)


def test_first_id_rule_with_the_embedding_output() -> None:
    for ids in ([0, 3, 5], [0, 1, 5], [0, 2]):
        found = _ids("DeepseekV3ForCausalLM", ids)
        assert not found.findings and found.ids is not None
        assert found.ids[0] != 1 and -1 not in found.ids
        assert _captured_points("deepseek", found.ids, 12) == ids
        assert found.min_version == "0.5.13"


def test_first_id_rule_without_a_spelling() -> None:
    found = _ids("DeepseekV3ForCausalLM", [1]).findings
    assert [f.code for f in found] == ["layer-id-uncapturable"]
    assert "[1]" in found[0].message


def test_before_the_first_id_rule() -> None:
    # The default set is read alike by all releases.
    assert not _ids("DeepseekV3ForCausalLM", PLAIN, "0.5.9").findings


@pytest.mark.parametrize("ids", [[2, 6, 9], [3, 5, 11], [11], [3, 5, 12], [0, 12]])
def test_contains_last_rule(ids: list[int]) -> None:
    found = _ids("GptOssForCausalLM", ids)
    assert not found.findings and found.ids is not None
    assert _captured_points("gpt_oss", found.ids, 12) == ids


def test_shifted_default_is_written_out() -> None:
    # minimax_m3_vl moves its default set by one, so the ids always stand there.
    config = _read("minimax_m3_vl")
    depth = target_facts(config).num_hidden_layers
    found = capture_ids(
        [2, depth // 2, depth - 3], target_facts(config), "eagle3", KEY, _newest()
    )
    assert found.ids == [1, depth // 2 - 1, depth - 4] and found.default


def _newest() -> Version:
    return Version(newest_known())


def _read(name: str) -> dict[str, Any]:
    config: dict[str, Any] = json.loads((FIXTURES / name / "config.json").read_text())
    return config


@pytest.mark.parametrize(
    "folder", sorted(p.name for p in FIXTURES.iterdir() if p.is_dir())
)
def test_every_fixture_is_known(folder: str) -> None:
    facts = target_facts(_read(folder))
    n = facts.num_hidden_layers
    found = capture_ids([2, n // 2, n - 3], facts, "eagle3", KEY, _newest())
    assert not found.findings and found.default
    assert found.ids == [1, n // 2 - 1, n - 4]


@pytest.mark.parametrize(
    ("ids", "words"),
    [
        (
            [2, 4, 13],
            "id 13 of [2, 4, 13]: the target has 12 layers, ids go from 0 to 12",
        ),
        ([-1, 4], "id -1 of [-1, 4]"),
        ([3, 3, 5], "id 3 stands twice in [3, 3, 5]"),
        ([], "not a list of layer numbers"),
        ([True, 3], "not a list of layer numbers"),
        (["3", 4], "not a list of layer numbers"),
        ([3.0, 4], "not a list of layer numbers"),
        ([[3], 4], "not a list of layer numbers"),
        ([None], "not a list of layer numbers"),
    ],
)
def test_invalid_ids(ids: list[Any], words: str) -> None:
    found = _ids("LlamaForCausalLM", ids)
    assert found.ids is None
    assert [f.code for f in found.findings] == ["layer-ids-invalid"]
    assert words in found.findings[0].message
    assert found.findings[0].subject == KEY


def test_list_order_does_not_matter() -> None:
    # Both sides concatenate in layer order, whatever the list says.
    assert _ids("LlamaForCausalLM", [9, 2, 6]).ids == [1, 5, 8]


@pytest.mark.parametrize("hook", ["eagle3", "dflash"])
def test_unknown_family(hook: Hook) -> None:
    found = _ids("NobodyForCausalLM", PLAIN, hook=hook)
    assert [f.code for f in found.findings] == ["target-unknown-family"]
    assert "NobodyForCausalLM" in found.findings[0].message
    assert found.ids == [1, 5, 8]


MUSE = ["MuseGlimmerForCausalLM", "MuseGlimmerForConditionalGeneration"]


@pytest.mark.parametrize("architecture", MUSE)
@pytest.mark.parametrize(
    ("draft", "written"),
    [
        ("DFlashDraftModel", [2, 3, 5]),
        ("Qwen3DSparkModel", [2, 3, 5]),
        ("DFlash2DraftModel", [1, 2, 4]),
    ],
)
def test_a_target_that_counts_capture_points(
    architecture: str, draft: str, written: list[int]
) -> None:
    found = capture_ids(
        [2, 3, 5], _target(architecture), "dflash", KEY, _newest(), draft=draft
    )
    assert (found.ids, found.min_version, found.findings) == (written, "0.5.18", [])
    # models/muse_glimmer.py captures before layer i; the runner adds one for DFlash2.
    assert [i + (draft == "DFlash2DraftModel") for i in written] == [2, 3, 5]
    export = {"architectures": [draft], "dflash_config": {"target_layer_ids": written}}
    target = {**T0, "architectures": [architecture]}
    assert captured_layers(export, target, "0.5.23") == [2, 3, 5]


def test_capture_points_in_a_plan() -> None:
    target = {**T0, "architectures": MUSE[:1]}
    plan = plan_of(dflash(), target=target)
    assert plan.ok and plan.config["dflash_config"]["target_layer_ids"] == [2, 3, 5]
    assert plan.min_version == "0.5.18"
    late = only_error(plan_of(dflash(), target=target, release="0.5.17"), TOO_OLD)
    assert "0.5.18" in late.message
    last = dflash(aux_hidden_state_layer_ids=[2, 3, 6])
    found = only_error(plan_of(last, target=target), "layer-id-uncapturable")
    assert "out of range" in found.message
    assert only_error(plan_of(eagle3(), target=target), "target-unsupported")


TOO_OLD = "release-too-old"


SCALED = ["Gemma4ForCausalLM", "Gemma4ForConditionalGeneration"]


@pytest.mark.parametrize("architecture", [a for a, _, block in HOOKS if block])
def test_what_block_drafts_get_of_an_embedding(architecture: str) -> None:
    found = served_embedding(_target(architecture), "bfloat16")
    scaled = architecture in SCALED
    assert found["embedding_scale_squared"] == (8 if scaled else 1)
    assert found["embedding_scale"] == pytest.approx(8**0.5 if scaled else 1)
    assert found["scale_rounds"] is scaled and found["bare_head"] is scaled
    assert not served_embedding(_target(architecture), "float32")["scale_rounds"]
    # What the judge knows of it was written down a second time.
    config = {**T0, "architectures": [architecture]}
    assert served_scale(config) == found["embedding_scale"]


@pytest.mark.parametrize(
    ("width", "rounds"), [(1024, False), (4096, False), (2560, True)]
)
def test_a_power_of_two_rounds_nothing(width: int, rounds: bool) -> None:
    config = {**T0, "architectures": SCALED[:1], "hidden_size": width}
    found = served_embedding(target_facts(config), "bfloat16")
    assert found["scale_rounds"] is rounds
    assert found["embedding_scale_squared"] == width


def test_a_hostile_width_overflows_nothing() -> None:
    config = {**T0, "architectures": SCALED[:1], "hidden_size": 10**400}
    plan = plan_of(dflash(), target=config, allow=["embedding-scale-rounded"])
    assert only_error(plan, "target-hidden-size")


def test_a_scale_inside_a_multimodal_configuration() -> None:
    text = {**T0, "hidden_size": 64, "tie_word_embeddings": False}
    config = {"architectures": SCALED[1:], "text_config": text}
    found = served_embedding(target_facts(config), "bfloat16")
    assert found["embedding_scale"] == 8 and not found["bare_head"]
    assert served_scale(config) == 8
    unknown = served_embedding(None, "bfloat16")
    assert unknown["embedding_scale"] == 1 and not unknown["scale_rounds"]


def test_a_rope_that_the_class_of_the_target_passes_over() -> None:
    """Whatever the draft is; its own configuration is right in both spellings."""
    rope = {"rope_type": "default", "rope_theta": 1e7}
    target = {**T0, "rope_parameters": rope, "architectures": ["Qwen3NextForCausalLM"]}
    for draft in (eagle3(), dflash()):
        found = only_error(plan_of(draft, target=target), "target-rope-unread")
        assert "10000.0" in found.message and "10000000.0" in found.message
        assert plan_of(draft, target=target, allow=[found.code]).ok
        assert plan_of(draft, target={**target, "rope_theta": 1e7}).ok
        assert plan_of(draft, target={**T0, "rope_parameters": rope}).ok
        assert plan_of(draft, target={**target, "rope_parameters": None}).ok
        yarn = {**rope, "rope_type": "yarn", "factor": 4.0}
        both = {**target, "rope_theta": 1e7, "rope_scaling": yarn}
        assert plan_of(draft, target={**both, "rope_parameters": None}).ok
        plan = plan_of(draft, target={**both, "rope_parameters": yarn})
        assert "does not start" in only_error(plan, found.code).message


def test_unknown_family_is_allowed_by_name() -> None:
    target = {**T0, "architectures": ["NobodyForCausalLM"]}
    config = eagle3()
    assert only_error(plan_of(config, target=target), "target-unknown-family")
    assert CODES["target-unknown-family"].allowable
    plan = plan_of(config, target=target, allow=["target-unknown-family"])
    assert plan.ok
    assert plan.config["eagle_config"][KEY] == [0, 2, 3]


def test_case_10_of_the_field() -> None:
    plan = plan_of(dflash(aux_hidden_state_layer_ids=[2, 4, 6]))
    found = only_error(plan, "layer-id-uncapturable")
    assert "id 6" in found.message and "LlamaForCausalLM" in found.message
    gemma = {**T0, "architectures": ["Gemma3ForCausalLM"]}
    plan = plan_of(eagle3(eagle_aux_hidden_state_layer_ids=[2, 4, 6]), target=gemma)
    assert plan.ok and plan.config["eagle_config"][KEY] == [1, 3, 5]
    plan = plan_of(dflash(aux_hidden_state_layer_ids=[2, 4, 7]))
    assert "7" in only_error(plan, "layer-ids-invalid").message
    config = eagle3(eagle_aux_hidden_state_layer_ids=[0, 3, 5])
    plan = plan_of(config)
    assert plan.ok and plan.min_version == "0.5.22"
    assert plan_of(config, release="0.5.22").ok
    found = only_error(plan_of(config, release="0.5.21"), "release-too-old")
    assert "0.5.22" in found.message
    plan = plan_of(dflash(aux_hidden_state_layer_ids=[0, 3, 5]))
    assert "id 0" in only_error(plan, "layer-id-uncapturable").message


def test_target_facts_of_a_multimodal_target() -> None:
    facts = target_facts(_read("gemma3_4b"))
    assert facts.architecture == "Gemma3ForConditionalGeneration"
    assert facts.num_hidden_layers == 34
    assert facts.text["model_type"] == "gemma3_text"


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("num_hidden_layers", ...),
        ("num_hidden_layers", "6"),
        ("hidden_size", 0),
        ("vocab_size", True),
        ("architectures", []),
        ("architectures", None),
        ("architectures", [7]),
    ],
)
def test_target_without_what_is_needed(key: str, value: Any) -> None:
    config = {k: v for k, v in {**T0, key: value}.items() if v is not ...}
    with pytest.raises(SpecExportError) as caught:
        target_facts(config)
    assert [f.code for f in caught.value.findings] == ["target-needed"]
    assert key in caught.value.findings[0].subject
    assert caught.value.exit_code == 1


@pytest.mark.parametrize(
    ("config", "tokens"),
    [
        ({"max_position_embeddings": 64}, 64),
        ({"max_position_embeddings": 64, "seq_length": 32}, 32),
        ({}, 2048),
        (
            {
                "max_position_embeddings": 64,
                "rope_scaling": {"rope_type": "linear", "factor": 4.0},
            },
            256,
        ),
        (
            {
                "max_position_embeddings": 64,
                "rope_parameters": {"rope_type": "linear", "factor": 4.0},
            },
            256,
        ),
        (
            {
                "max_position_embeddings": 64,
                "rope_scaling": {"rope_type": "llama3", "factor": 8.0},
            },
            64,
        ),
        (
            {
                "max_position_embeddings": 64,
                "rope_scaling": {
                    "rope_type": "yarn",
                    "factor": 4.0,
                    "original_max_position_embeddings": 16,
                },
            },
            64,
        ),
        ({"max_position_embeddings": 64, "rope_scaling": {"factor": "x"}}, 64),
        ({"max_position_embeddings": 64, "rope_scaling": {"factor": None}}, 64),
    ],
)
def test_context_length(config: dict[str, Any], tokens: int) -> None:
    assert context_length(config) == tokens


def test_context_of_the_draft_is_that_of_the_written_file() -> None:
    # The source names no original length, so SGLang would multiply; the export does.
    rope = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0}
    layer = {"rope_parameters": rope, "max_position_embeddings": 32}
    plan = plan_of(eagle3(layer))
    assert [f.code for f in plan.findings] == ["context-too-short"]
    assert "32 tokens" in plan.findings[0].message
    assert "64" in plan.findings[0].message
    assert context_length(plan.config) == 32
    assert not plan_of(eagle3({**layer, "max_position_embeddings": 64})).findings


def test_target_of_another_size() -> None:
    plan = plan_of(eagle3(), target={**T0, "hidden_size": 16})
    found = only_error(plan, "target-hidden-size")
    assert "8" in found.message and "16" in found.message
    plan = plan_of(eagle3(), target={**T0, "vocab_size": 64})
    found = only_error(plan, "config-invalid")
    assert found.subject == "transformer_layer_config.vocab_size"
    assert "32" in found.message and "64" in found.message


def test_without_a_target() -> None:
    for config in (eagle3(), dflash()):
        plan = plan_of(config, target=None)
        assert "target-needed" in {f.code for f in errors(plan)}


@pytest.mark.parametrize("text", ["latest", "", "0.4.4", "0.5.x"])
def test_no_release(text: str) -> None:
    with pytest.raises(SpecExportError) as caught:
        parse_release(text)
    assert caught.value.exit_code == 2
    assert caught.value.findings[0].subject == "--sglang"


def test_releases() -> None:
    assert parse_release(None) == (_newest(), [])
    assert parse_release("0.4.5") == (Version("0.4.5"), [])
    release, findings = parse_release("0.9.0")
    assert release == Version("0.9.0")
    assert [f.code for f in findings] == ["release-unknown"]
    assert plan_of(eagle3(), release="0.9.0").ok
