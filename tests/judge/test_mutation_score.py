"""Every written tensor, every config key and every rule mutated: who notices?

A mutant is caught by the grammar or the proof of the template, by an error finding of
the plan, or by a leg of the judge that does not pass; a written one by the judge alone.
Those that nobody catches stand below, each with the reason why no logit can change.
The score is printed (``pytest -s``).
"""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path
from typing import Any

import mutants
import pytest
import torch
from mutants import Case
from rule_mutants import rule_mutants

from spec_export.judge import parts, run
from spec_export.layout.data import data_path
from spec_export.layout.proof import prove
from spec_export.layout.template import Template, TemplateError, _raw

# Where a draft that is refused could slip through.
REFUSING = ("refuse:", "tensors:", "variables:")
TEMPLATES = ["eagle3-llama", "eagle3-plugin"]
DEFAULT = "what is written is the default of an absent key, in every release judged"
TWICE = "the same is said by a second key, which SGLang reads first or instead"
UNREAD = "no forward reads it"
SIZES_EMBEDDING = (
    "it sizes the embedding, which the target's replaces; verify holds it "
    "against the target's"
)
# Mutants of what was written: a pattern of their names, and why no logit can change.
WRITTEN = {
    r"vocab_size: .*": SIZES_EMBEDDING,
    r"(initializer_range|bos_token_id|eos_token_id): .*": UNREAD,
    r"max_position_embeddings: .*": "SGLang holds it against the context and sizes a "
    "table; the RoPE keys have their own original length",
    r"hidden_act: (dropped|null)": DEFAULT,
    r"(tie_word_embeddings|attention_bias|mlp_bias): (dropped|null)": DEFAULT,
    r"(norm_before_residual|qk_norm|fc_norm|norm_output): (dropped|null)": DEFAULT,
    r"attention_bias: wrong flag": "the stock class then has an o_proj.bias, zero "
    "where no tensor sets it",
    r"mlp_bias: wrong flag": "the stock class does not read it",
    r"norm_before_fc: .*": TWICE,
    r"eagle_config\.norm_before_fc: dropped": TWICE,
    r"eagle_config\.use_aux_hidden_state: dropped": DEFAULT,
    r"num_aux_hidden_states: (dropped|null)": TWICE,
    r"dtype: (dropped|null)": TWICE,
    r"rope_parameters\..*": TWICE,
    r"rope_scaling\.(rope_type: dropped|type: .*)": TWICE,
    r"rope_scaling\.original_max_position_embeddings: .*": TWICE,
}
# The plug-in's class starts at 0.5.12, where the newer spellings are read.
WRITTEN_PLUGIN = {r"(rope_theta|torch_dtype): .*": TWICE}
DEMANDS = "it only demands a newer release than is needed"
SPEED = "it sets how many tokens are drafted and checked, not what a draft computes"
INFORMS = "it only says something; what is written stays the same"
NEVER = "speculators does not make such a draft, and its tensors contradict it too"
DESCRIBES = "a check of what the source holds; a source that has it right is written"
LOSS = "the tensor is dropped in any case; only training's loss uses it"
# Mutants of rules.
RULES = {
    r"tensors: .*: optional": DESCRIBES
    + "; an absent one leaves its parameter without origin, an error",
    r"tensors: .*: (exists true)": DESCRIBES,
    r"tensors: lm_head\.weight: fill dropped": "then a slim source is refused",
    r"tensors: t2d: .*": "it is dropped in any case, and checked by value",
    r"tensors: verifier_.*": LOSS,
    r"tensors: embed_tokens\.weight: (fate dropped|kind)": "SGLang puts the target's "
    "there, whatever is said of it",
    r"parameters: embed_tokens\.weight: .*": "SGLang puts the target's there; the "
    "rule lists it in the manifest",
    r"parameters: .*: since (lower|dropped)": "read by the contract tests alone; the "
    "rules under features demand releases",
    r"config: vocab_size: .*": SIZES_EMBEDDING,
    r"config: (initializer_range|bos_token_id|eos_token_id): .*": UNREAD,
    r"config: max_position_embeddings: .*": WRITTEN[r"max_position_embeddings: .*"],
    r"config: hidden_act: (dropped|expr null)": DEFAULT,
    r"config: (tie_word_embeddings|attention_bias|mlp_bias): dropped": DEFAULT,
    r"config: (attention_bias|mlp_bias): value": WRITTEN[r"attention_bias: wrong flag"],
    r"config: norm_before_fc: .*": TWICE,
    r"config: eagle_config\.norm_before_fc: dropped": TWICE,
    r"config: eagle_config\.use_aux_hidden_state: dropped": DEFAULT,
    r"config: num_aux_hidden_states: (dropped|expr null)": TWICE,
    r"config: (layer_types|sliding_window): .*": "written for drafts without a window "
    "as well; it says full attention",
    r"refuse: (config-invalid|target-hidden-size): .*": NEVER,
    r"refuse: (tie-flag-dropped|quantization-dropped): .*": INFORMS,
    r"features: .*: (when true|when negated)": DEMANDS,
    r"flags: \['--disable-cuda-graph'\]: .*": "it concerns CUDA graphs of releases "
    "before 0.5.11, which the newest release's line does not have",
    r"flags: \['--speculative-draft-model-quantization', 'unquant'\]: .*": "SGLang "
    "would quantise the draft when it loads it, which no reference computes",
    r"variables: (T|T1): .*": SPEED,
    r"variables: (tied|tied_layer|leftover_quantization|target_quantization): .*": (
        INFORMS
    ),
    r"variables: (target_width|full_layers): .*": NEVER,
    r"variables: .*: absent (dropped|other)": "speculators writes the key; the rule is "
    "for configurations that others made",
    r"variables: (attention_bias|mlp_bias|W|sliding_layers): .*": "drafts that have it "
    "are refused by another rule or by their tensors",
    r"serves: plugin other": "it decides which plan is preferred; an export names its "
    "class itself",
    r"serves: since lower": "releases before 0.4.9 are not computed: no verdict",
    r"serves: --speculative-(num-steps|eagle-topk|num-draft-tokens) .*": SPEED,
    r"capture: hook": "the hook decides from which release on the target hands "
    "features over",
}
# The stock class has no place for these; such drafts are refused.
STOCK = {
    r"tensors: .*(q_norm|k_norm)\.weight: .*": "such a draft stays refused: by the "
    "rule of the other norm, or as a tensor that no rule takes",
    r"tensors: .*_proj\.bias: (dropped|shape off by one|i off by one|kind)": "such a "
    "draft stays refused: its tensors fit no rule",
}
# The plug-in's class starts at 0.5.12.
PLUGIN = {
    r"variables: W1: .*": "the class takes its windows from config.json, no flag",
    r"features: .*": "the class itself needs 0.5.12, where all of them are there",
}


def reason(known: dict[str, str], name: str) -> str | None:
    return next((why for p, why in known.items() if re.fullmatch(p, name)), None)


@pytest.fixture(scope="module")
def cases() -> list[Case]:
    return [*mutants.servable(), *mutants.alone(), *mutants.refused()]


@pytest.fixture(autouse=True)
def only_the_verdict(monkeypatch: pytest.MonkeyPatch) -> None:
    """No diagnosis; and one training side for all mutants of a case."""
    logits: dict[Any, list[torch.Tensor]] = {}
    real = run.training_logits

    def once(module: Any, inputs: Any, steps: int, **more: Any) -> list[torch.Tensor]:
        key = id(module), id(inputs), steps
        if key not in logits:
            logits[key] = real(module, inputs, steps, **more)
        return logits[key]

    chains: dict[Any, Any] = {}
    free = parts.free_chain

    def chain(module: Any, document: Any, steps: int, first: Any) -> Any:
        key = id(module), tuple(document.token_ids.tolist()), int(first)
        if key not in chains:
            chains[key] = free(module, document, steps, first)
        return chains[key]

    monkeypatch.setattr(run, "training_logits", once)
    monkeypatch.setattr(parts, "training_logits", once)
    monkeypatch.setattr(parts, "free_chain", chain)
    monkeypatch.setattr(run, "diagnose", lambda *_: [])


def holes(alive: list[str], known: dict[str, str]) -> list[str]:
    found = [name for name in alive if reason(known, name) is None]
    print(*(f"\nnobody caught {name}" for name in found))
    return found


def told(what: str, count: Counter[str], alive: list[str]) -> None:
    total, left = sum(count.values()) + len(alive), len(alive)
    by = ", ".join(f"{n} by {who}" for who, n in count.most_common())
    print(
        f"\n{what}: {total} mutants, {sum(count.values())} caught ({by}), "
        f"{left} cannot change a logit"
    )


@pytest.mark.parametrize("template", TEMPLATES)
def test_written_mutants(tmp_path: Path, template: str) -> None:
    rules = Template.model_validate(
        _raw(data_path("ckpt_templates") / f"{template}.yaml")
    )
    alive: dict[str, bool] = {}
    for case in mutants.servable():
        if case.template != template:
            continue
        export = case.export(case.plan(rules))
        assert mutants.caught(case, export, tmp_path) == "", case.name
        for kind in (
            mutants.tensor_mutants,
            mutants.config_mutants,
            mutants.launch_mutants,
        ):
            for name, change in kind(export):
                if alive.get(name, True):
                    who = mutants.caught(case, change(export), tmp_path)
                    alive[name] = who == ""
    left = [name for name, living in alive.items() if living]
    known = WRITTEN | (WRITTEN_PLUGIN if template == "eagle3-plugin" else {})
    told(f"{template}, written", Counter(judge=len(alive) - len(left)), left)
    assert len(alive) > 300
    assert holes(left, known) == []


@pytest.mark.parametrize("template", TEMPLATES)
def test_rule_mutants(tmp_path: Path, cases: list[Case], template: str) -> None:
    raw = _raw(data_path("ckpt_templates") / f"{template}.yaml")
    known = RULES | (PLUGIN if template == "eagle3-plugin" else STOCK)
    mine = [case for case in cases if case.template == template]
    base = {}
    for case in mine:
        plan = case.plan(Template.model_validate(raw))
        base[case.name] = case.outcome(plan)
        # A draft made for a refusal fails the judge: the plan is what keeps it out.
        who = mutants.caught(case, case.export(plan), tmp_path)
        assert (bool(who), plan.ok) == (case.refused, not case.refused), case.name

    judged: dict[tuple[str, str], str] = {}
    count: Counter[str] = Counter()
    alive = []
    for name, mutant in rule_mutants(raw):
        who = ""
        try:
            rules = Template.model_validate(mutant)
        except ValueError:
            count["the grammar"] += 1
            continue
        for case in mine:
            if case.refused and not name.startswith(REFUSING):
                continue
            try:
                plan = case.plan(rules)
            except ValueError:  # an expression that cannot be computed
                who = "the proof" if proves_wrong(rules) else ""
                break
            if not plan.ok:
                who = "" if case.refused else "the plan"
                if who:
                    break
                continue
            key = case.name, case.outcome(plan)
            if key[1] == base[case.name] and not case.refused:
                continue
            if key not in judged:
                judged[key] = mutants.caught(case, case.export(plan), tmp_path)
            if judged[key]:
                who = "the judge"
                break
        if not who and reason(known, name) is None and proves_wrong(rules):
            who = "the proof"
        if who:
            count[who] += 1
        else:
            alive.append(name)
    told(f"{template}, rules", count, alive)
    assert sum(count.values()) > 200
    assert holes(alive, known) == []


def proves_wrong(rules: Template) -> bool:
    try:
        prove(rules)
    except TemplateError:
        return True
    return False
