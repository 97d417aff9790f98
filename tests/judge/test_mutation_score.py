"""Every written tensor, config key, launch flag and rule mutated: who notices?

A mutant is caught by the grammar or the proof of the template, by an error finding of
the plan, or by a leg of the judge that fails; a written one by the judge alone. Those
that nobody catches stand beside the cases of each family (``mutant_cases_*.py``), each
with the reason why no logit can change; a reason that nothing needs is an error too.
The score is printed (``pytest -s``).
"""

from __future__ import annotations

import re
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from types import ModuleType
from typing import Any

import mutant_cases_block
import mutant_cases_eagle3
import mutant_cases_mtp
import mutants
import pytest
import torch
from mutants import Case
from rule_mutants import restored, rule_mutants

from spec_export.judge import parts, run
from spec_export.layout.catalog import read_template
from spec_export.layout.data import data_path, read_yaml
from spec_export.layout.proof import prove, prove_rules
from spec_export.layout.template import Template, TemplateError

FAMILIES: dict[str, ModuleType] = {
    "eagle3": mutant_cases_eagle3,
    "block": mutant_cases_block,
    "mtp": mutant_cases_mtp,
}
# One mutant of so many in a plain run; all of them in a wide one.
SPREAD = {"eagle3": 1, "block": 2, "mtp": 1}
WIDE = [pytest.mark.wide, pytest.mark.timeout(3600)]
RUNS = [
    pytest.param(name, every, id=name, marks=pytest.mark.timeout(900))
    for name, every in SPREAD.items()
] + [
    pytest.param(name, 1, id=f"{name}-all", marks=WIDE)
    for name, every in SPREAD.items()
    if every > 1
]
# Where a draft that is refused could slip through.
REFUSING = ("refuse:", "tensors:", "variables:", "serves: layers")


@dataclass
class Score:
    """What became of the mutants of one template."""

    what: str
    known: dict[str, str]
    caught: Counter[str] = field(default_factory=Counter)
    alive: list[str] = field(default_factory=list)

    def add(self, name: str, who: str) -> None:
        if who:
            self.caught[who] += 1
        else:
            self.alive.append(name)

    def reason(self, name: str) -> str:
        """Why a mutant cannot change a logit; empty: nobody says so."""
        return next((r for p, r in self.known.items() if re.fullmatch(p, name)), "")

    def holes(self) -> list[str]:
        """Mutants that nobody caught and that could change a logit, all printed."""
        reasons: dict[str, list[str]] = {}
        for name in self.alive:
            reasons.setdefault(self.reason(name), []).append(name)
        caught = sum(self.caught.values())
        by = ", ".join(f"{n} by {who}" for who, n in self.caught.most_common())
        print(
            f"\n{self.what}: {caught + len(self.alive)} mutants, {caught} caught ({by})"
        )
        for why, names in reasons.items():
            print(f"  {len(names)} {why or 'NOBODY CAUGHT'}: {'; '.join(names)}")
        return reasons.get("", [])


def known_of(family: str, what: str, template: str) -> dict[str, str]:
    """The list of survivors of a family, and of this template alone."""
    module = FAMILIES[family]
    of_all: dict[str, str] = getattr(module, what)
    return of_all | getattr(module, f"{what}_OF", {}).get(template, {})


def unneeded(scores: list[Score]) -> list[str]:
    """Patterns of survivors that no template has."""
    used = {
        pattern
        for score in scores
        for pattern in score.known
        if any(re.fullmatch(pattern, name) for name in score.alive)
    }
    return sorted({p for score in scores for p in score.known} - used)


@pytest.fixture(scope="module")
def cases() -> dict[str, list[Case]]:
    return {}


@pytest.fixture(autouse=True)
def only_the_verdict(monkeypatch: pytest.MonkeyPatch) -> None:
    """No diagnosis; and one training side for all mutants of a case."""
    logits: dict[Any, list[torch.Tensor]] = {}
    real = run.training_logits

    def once(module: Any, inputs: Any, steps: int, **more: Any) -> list[torch.Tensor]:
        rows = inputs.token_ids.tolist(), inputs.document_ids.tolist()
        key = id(module), str(rows), steps
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
    monkeypatch.setattr(run, "_diagnose_block", lambda *_: [])


def some(mutated: Iterator[tuple[str, Any]], every: int) -> Iterator[tuple[str, Any]]:
    """The same spread of them in every run."""
    return (one for one in mutated if zlib.crc32(one[0].encode()) % every == 0)


def path_of(template: str) -> Path:
    return data_path("ckpt_templates") / f"{template}.yaml"


def raw_of(template: str) -> dict[str, Any]:
    return read_template(path_of(template))


def cases_of(held: dict[str, list[Case]], family: str) -> list[Case]:
    if family not in held:
        held[family] = FAMILIES[family].cases()
    return held[family]


@pytest.mark.parametrize(("family", "every"), RUNS)
def test_written_mutants(
    tmp_path: Path, cases: dict[str, list[Case]], family: str, every: int
) -> None:
    scores = []
    for template in FAMILIES[family].TEMPLATES:
        rules = Template.model_validate(raw_of(template))
        living: dict[str, str] = {}
        for case in cases_of(cases, family):
            if case.template != template or case.refused:
                continue
            export = case.export(case.plan(rules))
            assert case.caught(export, tmp_path) == "", case.name
            for kind in (
                mutants.tensor_mutants,
                mutants.config_mutants,
                mutants.launch_mutants,
            ):
                for name, change in some(kind(export), every):
                    if not living.get(name):
                        living[name] = case.caught(change(export), tmp_path)
        score = Score(f"{template}, written", known_of(family, "WRITTEN", template))
        for name, who in living.items():
            score.add(name, who)
        scores.append(score)
    assert [hole for score in scores for hole in score.holes()] == []
    assert sum(len(s.alive) + sum(s.caught.values()) for s in scores) > 100
    assert every > 1 or unneeded(scores) == []


@pytest.mark.parametrize(("family", "every"), RUNS)
def test_rule_mutants(
    tmp_path: Path, cases: dict[str, list[Case]], family: str, every: int
) -> None:
    scores = []
    for template in FAMILIES[family].TEMPLATES:
        mine = [c for c in cases_of(cases, family) if c.template == template]
        score = Score(f"{template}, rules", known_of(family, "RULES", template))
        _score_rules(template, mine, tmp_path, every, score)
        scores.append(score)
    assert [hole for score in scores for hole in score.holes()] == []
    assert sum(len(s.alive) + sum(s.caught.values()) for s in scores) > 100
    assert every > 1 or unneeded(scores) == []


def _score_rules(
    template: str, cases: list[Case], folder: Path, every: int, score: Score
) -> None:
    raw, own = raw_of(template), read_yaml(path_of(template))
    mutated = rule_mutants(raw, own)
    if "extends" in own:
        mutated = chain(mutated, restored(raw_of(own["extends"]), own))
    base = {}
    for case in cases:
        plan = case.plan(Template.model_validate(raw))
        base[case.name] = case.outcome(plan)
        # A draft made for a refusal fails the judge: the plan is what keeps it out.
        who = case.caught(case.export(plan), folder)
        assert (bool(who), plan.ok) == (case.refused, not case.refused), case.name
    judged: dict[tuple[str, str], str] = {}
    for name, mutant in some(mutated, every):
        try:
            rules = Template.model_validate(mutant)
        except ValueError:
            score.add(name, "the grammar")
            continue
        who = _who(name, rules, cases, base, judged, folder)
        # The grid of the whole proof is dear: not for what is said to survive it.
        proof = prove_rules if score.reason(name) else prove
        score.add(name, who or ("the proof" if proves_wrong(rules, proof) else ""))


def _who(
    name: str,
    rules: Template,
    cases: list[Case],
    base: dict[str, str],
    judged: dict[tuple[str, str], str],
    folder: Path,
) -> str:
    """Plan or judge, if one of them catches the rules with one of the drafts."""
    for case in cases:
        if case.refused and not name.startswith(REFUSING):
            continue
        try:
            plan = case.plan(rules)
        except ValueError:  # an expression that cannot be computed
            return ""
        if not plan.ok:
            if not case.refused:
                return "the plan"
            continue
        key = case.name, case.outcome(plan)
        if key[1] == base[case.name] and not case.refused:
            continue
        if key not in judged:
            try:
                export = case.export(plan)
            except (ValueError, LookupError, RuntimeError):  # nothing is published
                judged[key] = "the writing"
            else:
                judged[key] = case.caught(export, folder)
        if judged[key]:
            return judged[key]
    return ""


def proves_wrong(rules: Template, proof: Callable[[Template], None]) -> bool:
    try:
        proof(rules)
    except TemplateError:
        return True
    return False
