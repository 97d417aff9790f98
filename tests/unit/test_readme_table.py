"""The README's table of families and options, made from plans and recorded results.

``SPEC_EXPORT_RECORD=1 pytest tests/unit/test_readme_table.py`` writes it.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from packaging.version import Version

from spec_export.findings import CODES, Severity
from spec_export.layout.plan import make_plan
from spec_export.layout.plan_types import Plan
from spec_export.layout.targets import target_facts
from tests.helpers.layout_cases import T0, dflash, eagle3, tensors_of
from tests.helpers.record import results

README = Path(__file__).resolve().parents[2] / "README.md"
BEGIN, END = "<!-- families: begin -->", "<!-- families: end -->"
HEAD = ("Draft", "Option", "Served by", "SGLang", "Judge", "Engine")
FULL, SLIDE = "full_attention", "sliding_attention"


@dataclass(frozen=True)
class Row:
    """One line: a configuration, and under which names long tests recorded it."""

    draft: str
    option: str
    config: dict[str, Any] = field(hash=False)
    judge: str = ""
    engine: str = ""
    target: dict[str, Any] = field(default_factory=lambda: T0, hash=False)


def _dspark(**changes: Any) -> dict[str, Any]:
    anchor = changes.get("sample_from_anchor", True)
    count = 4 if anchor else 3
    return dflash(
        **{
            "speculators_model_type": "dspark",
            "markov_rank": 4,
            "markov_head_type": "vanilla",
            "enable_confidence_head": True,
            "confidence_head_with_markov": True,
            "sample_from_anchor": True,
            "speculators_config": {"proposal_methods": [{"speculative_tokens": count}]},
            **changes,
        }
    )


def _dflash2(**changes: Any) -> dict[str, Any]:
    return dflash(
        speculators_model_type="dflash2",
        conv_kernel_size=2,
        conv_group_size=4,
        selector_rank=8,
        selector_top_k=4,
        **changes,
    )


ANCHOR = {
    "sample_from_anchor": True,
    "speculators_config": {"proposal_methods": [{"speculative_tokens": 4}]},
}
NO_HEAD = {
    "markov_rank": 0,
    "enable_confidence_head": False,
    "confidence_head_with_markov": False,
}
WINDOW = {"layer_types": [SLIDE, FULL], "sliding_window": 64}
SHORT = {"layer_types": [SLIDE, FULL], "sliding_window": 16}
SHORT_EAGLE = {"layer_types": [SLIDE], "sliding_window": 16}


def _mtp(layers: str) -> Row:
    architecture = {
        "qwen3_next": "Qwen3NextForCausalLM",
        "qwen3_5_text": "Qwen3_5ForCausalLM",
        "qwen3_5_moe_text": "Qwen3_5MoeForCausalLM",
    }.get(layers, "Qwen3ForCausalLM")
    sizes = {"vocab_size": 32, "hidden_size": 8, "num_attention_heads": 2}
    sizes |= {"head_dim": 4, "intermediate_size": 16}
    if layers in ("qwen3_next", "qwen3_5_moe_text"):
        sizes |= {"num_experts": 3, "moe_intermediate_size": 4}
        sizes |= {"shared_expert_intermediate_size": 4}
    config = {
        "speculators_model_type": "mtp",
        "transformer_layer_config": {"model_type": layers, **sizes},
    }
    target = {**T0, "architectures": [architecture], "model_type": layers}
    judged = "" if layers == "qwen3" else layers
    return Row("MTP", f"{layers} layers", config, judged, judged, target)


def _gemma(option: str, width: int) -> Row:
    """A target whose embedding SGLang hands over scaled by the root of its width."""
    target = {**T0, "architectures": ["Gemma4ForCausalLM"], "hidden_size": width}
    target["model_type"] = "gemma4_text"
    exact = "dflash, Gemma-4 target" if width == 16 else ""
    layer = {"hidden_size": width}
    return Row("DFlash", option, dflash(layer), exact, exact, target)


PLAIN = "{}l-plain_output-{}-v{}"  # as tests/serving/drafts.py names them


def _eagle3(option: str, config: dict[str, Any], variant: str) -> Row:
    """A row whose judge and engine results one serving test recorded."""
    return Row("EAGLE-3", option, config, variant, variant)


ROWS = [
    _eagle3(
        "one Llama layer, draft vocabulary", eagle3(), PLAIN.format(1, "none", 128)
    ),
    _eagle3(
        "whole vocabulary", eagle3(draft_vocab_size=32), PLAIN.format(1, "none", 512)
    ),
    _eagle3(
        "several layers", eagle3({"num_hidden_layers": 2}), PLAIN.format(2, "none", 128)
    ),
    _eagle3("fc_norm", eagle3(fc_norm=True), PLAIN.format(1, "fc_norm", 128)),
    _eagle3("norm_output", eagle3(norm_output=True), "1l-norm_output-none-v128"),
    _eagle3(
        "norm_before_fc",
        eagle3(norm_before_fc=True),
        PLAIN.format(1, "norm_before_fc", 128),
    ),
    _eagle3("norm_before_residual", eagle3(norm_before_residual=True), "nbr"),
    _eagle3("Qwen3 layers (q/k norm)", eagle3({"model_type": "qwen3"}), "qk-norm"),
    _eagle3("attention_bias", eagle3({"attention_bias": True}), "attention-bias"),
    _eagle3("mlp_bias", eagle3({"mlp_bias": True}), "mlp-bias"),
    _eagle3("one window for all layers", eagle3(SHORT_EAGLE), "window-16"),
    _eagle3(
        "mixed windows", eagle3({"num_hidden_layers": 2, **SHORT}), "window-16-of-2l"
    ),
    Row("DFlash", "full attention", dflash(), "dflash", "dflash"),
    Row(
        "DFlash",
        "mixed sliding and full layers",
        dflash(WINDOW),
        "dflash, mixed layers",
        "dflash-mixed",
    ),
    Row(
        "DFlash",
        "sliding_window_non_causal",
        dflash(WINDOW, sliding_window_non_causal=True),
        "dflash, non-causal window",
        "dflash-non-causal",
    ),
    Row("DFlash", "window below the context", dflash(SHORT)),
    Row(
        "DFlash",
        "attention_bias",
        dflash({"attention_bias": True}),
        "dflash, q/k/v/o biases",
        "dflash-biased",
    ),
    Row(
        "DFlash",
        "sample_from_anchor",
        dflash(**ANCHOR),
        "dflash, sample_from_anchor",
        "dflash-anchor",
    ),
    Row(
        "DFlash",
        "draft vocabulary",
        dflash(draft_vocab_size=12),
        "dflash, draft vocabulary",
        "dflash-reduced",
    ),
    Row(
        "DFlash",
        "draft vocabulary, sample_from_anchor",
        dflash(draft_vocab_size=12, **ANCHOR),
        "dflash, draft vocabulary and sample_from_anchor",
        "dflash-reduced-anchor",
    ),
    _gemma("target with scaled embedding, its root a power of two", 16),
    _gemma("target with scaled embedding, other widths, bfloat16", 8),
    Row(
        "DFlash2",
        "convolutions and selector",
        _dflash2(),
        "dflash2, sliding layers",
        "dflash2",
    ),
    Row("DFlash2", "sample_from_anchor", _dflash2(**ANCHOR)),
    Row("DSpark", "vanilla", _dspark(), "dspark vanilla", "dspark-vanilla"),
    Row(
        "DSpark",
        "vanilla, no sample_from_anchor",
        _dspark(sample_from_anchor=False),
        "dspark vanilla, no sample_from_anchor",
        "dspark-vanilla-no-anchor",
    ),
    Row(
        "DSpark",
        "vanilla, draft vocabulary",
        _dspark(draft_vocab_size=12),
        "dspark vanilla, draft vocabulary",
        "dspark-vanilla-reduced",
    ),
    Row(
        "DSpark",
        "gated",
        _dspark(markov_head_type="gated"),
        "dspark gated",
        "dspark-gated",
    ),
    Row(
        "DSpark",
        "gated, draft vocabulary, no sample_from_anchor",
        _dspark(
            markov_head_type="gated", draft_vocab_size=12, sample_from_anchor=False
        ),
        "dspark gated, draft vocabulary, no sample_from_anchor",
        "dspark-gated-reduced-no-anchor",
    ),
    Row("DSpark", "rnn", _dspark(markov_head_type="rnn"), "dspark rnn", "dspark-rnn"),
    Row(
        "DSpark",
        "rnn, draft vocabulary",
        _dspark(markov_head_type="rnn", draft_vocab_size=12),
        "dspark rnn, draft vocabulary",
        "dspark-rnn-reduced",
    ),
    Row(
        "DSpark",
        "rnn, no sample_from_anchor",
        _dspark(markov_head_type="rnn", sample_from_anchor=False),
    ),
    Row(
        "DSpark",
        "markov_rank 0",
        _dspark(**NO_HEAD),
        "dspark, markov_rank 0",
        "dspark-rank-0",
    ),
    *[
        _mtp(kind)
        for kind in ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text", "qwen3")
    ],
    Row("P-EAGLE", "any", {"speculators_model_type": "peagle"}),
    Row("XPress", "any", {"speculators_model_type": "xpress"}),
]


def _plan(row: Row, allow: tuple[str, ...] = ()) -> Plan:
    try:
        tensors = tensors_of(row.config)
    except IndexError:  # no template of that family
        tensors = {}
    return make_plan(
        row.config,
        tensors,
        target_facts(row.target, "own"),
        Version("0.5.23"),
        allow=allow,
    )


def _errors(plan: Plan) -> list[str]:
    return sorted({f.code for f in plan.findings if f.severity is Severity.ERROR})


def cells(row: Row) -> tuple[str, ...]:
    """The line of a row."""
    plan, recorded = _plan(row), results()
    codes = _errors(plan)
    if plan.ok:
        how = "the plug-in" if plan.requires_plugin else f"`{plan.algorithm}`"
        flags = [f for f in plan.findings if f.code == "sliding-window-flag"]
        how += ", with a launch flag" if flags else ""
    elif all(CODES[code].allowable for code in codes):
        plan = _plan(row, tuple(codes))
        how = f"deviation, off unless allowed: {', '.join(f'`{c}`' for c in codes)}"
    else:
        how = f"refused: `{'`, `'.join(codes)}`"
    return (
        row.draft,
        row.option,
        how,
        f">= {plan.min_version}" if plan.ok else "-",
        recorded["judge"].get(row.judge, "-"),
        recorded["engine"].get(row.engine, "-"),
    )


def table() -> str:
    """The whole table in Markdown."""
    lines = [HEAD, tuple("---" for _ in HEAD), *map(cells, ROWS)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def test_the_table_is_what_the_code_says() -> None:
    text = README.read_text()
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    assert after, f"README.md has no {BEGIN} ... {END}"
    wanted = f"{before}{BEGIN}\n{table()}\n{END}{after}"
    if os.environ.get("SPEC_EXPORT_RECORD") == "1":
        README.write_text(wanted)
    assert README.read_text() == wanted


@pytest.mark.parametrize("row", [r for r in ROWS if r.judge], ids=lambda r: r.judge)
def test_what_is_exact_was_compared(row: Row) -> None:
    recorded = results()
    assert float(recorded["judge"][row.judge]) <= 1e-5
    if not row.engine:
        return
    *_, result = recorded["engine"][row.engine].split(" ")
    if row.draft == "MTP":  # SGLang's class was called, without its engine
        assert float(result) <= 1e-5
    else:
        equal, _, prompts = result.partition("/")
        assert equal == prompts


def test_refusals_name_what_to_train_instead() -> None:
    refused = [row for row in ROWS if row.draft in ("P-EAGLE", "XPress")]
    assert len(refused) == 2
    for row in refused:
        (found,) = _plan(row).findings
        assert found.hint and "train --speculator-type" in found.hint
