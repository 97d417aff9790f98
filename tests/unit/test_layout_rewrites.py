"""Several stock classes for one family: the exact one before the permitted one."""

from __future__ import annotations

import pytest

from tests.helpers.layout_cases import dflash, errors, plan_of, tensors_of

REDUCED = dflash(draft_vocab_size=12)


def test_the_plain_class_is_taken_where_it_is_exact() -> None:
    plan = plan_of(dflash())
    assert plan.template == "dflash-qwen3" and not plan.findings


@pytest.mark.parametrize("allow", [(), ("reduced-vocabulary",)])
def test_an_exact_class_comes_before_a_permitted_one(allow: tuple[str, ...]) -> None:
    plan = plan_of(REDUCED, allow=allow)
    assert plan.template == "dflash-qwen3-as-dspark"
    assert [f.code for f in plan.findings] == ["exact-rewrite"]


def test_a_release_without_the_exact_class_needs_the_permission() -> None:
    refused = plan_of(REDUCED, release="0.5.18")
    assert [f.code for f in errors(refused)] == ["reduced-vocabulary"]
    assert "0.5.19" in (errors(refused)[0].hint or "")
    allowed = plan_of(REDUCED, release="0.5.18", allow=["reduced-vocabulary"])
    assert allowed.ok and allowed.template == "dflash-qwen3"


def test_what_no_class_can_do_is_said_of_the_plain_one() -> None:
    plan = plan_of(dflash(draft_vocab_size=12, mask_token_id=32))
    assert plan.template == "dflash-qwen3"
    assert {f.code for f in errors(plan)} == {"reduced-vocabulary", "config-invalid"}


def test_what_a_transform_takes_is_transformed() -> None:
    plan = plan_of(REDUCED)
    (map_fate,) = [f for f in plan.fates if f.source == "d2t"]
    assert map_fate.fate == "transformed"
    assert map_fate.to == ("markov_head.markov_w2.weight",)
    derived = {p.name: p for p in plan.placements if p.transform}
    assert set(derived) == {
        "markov_head.markov_w1.weight",
        "markov_head.markov_w2.weight",
    }
    assert derived["markov_head.markov_w1.weight"].sources == ()


def test_a_map_that_is_not_there_is_missed() -> None:
    held = tensors_of(REDUCED)
    del held["d2t"]
    plan = plan_of(REDUCED, held)
    assert "d2t" in {f.subject for f in errors(plan)}
