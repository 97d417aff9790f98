"""What a training compares: which rows, how often, and with which target."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from drafts import Draft, make_draft, write_export
from speculators.models.eagle3.core import Eagle3DraftModel

from spec_export.artifact.target import open_target
from spec_export.judge import Leg
from spec_export.training import batches
from spec_export.training.batches import Batch, KeptBatch
from spec_export.training.compare import (
    Cast,
    empty_draft,
    live_cast,
    live_judge,
    rows_of,
)
from spec_export.training.ranks import settled
from spec_export.training.recipe import CallbackConfig

LAYERS = 8


def settings(tmp_path: Path, **compare: Any) -> CallbackConfig:
    return CallbackConfig(output_dir=tmp_path / "out", compare=compare)


def batch_of(draft: Draft, rows: int = 96, **changed: Any) -> dict[str, Any]:
    """As speculators collates it: two documents and padding."""
    some = draft.inputs(positions=rows, seed=4)
    cut = rows // 3
    documents = [0] * cut + [1] * (rows - cut - 6) + [-1] * 6
    return {
        "hidden_states": some.aux[None].bfloat16(),
        "input_ids": some.token_ids[None],
        "document_ids": torch.tensor([documents]),
        "position_ids": torch.arange(rows)[None],
        "loss_mask": torch.ones(1, rows, dtype=torch.long),
        "verifier_last_hidden_states": torch.randn(1, rows, 32).bfloat16(),
        "error_records": 0,
        **changed,
    }


def kept(batch: dict[str, Any]) -> Batch | None:
    keeper = KeptBatch()
    assert list(keeper.watched("training", [batch])) == [batch]
    return keeper.batch


# --- which rows -----------------------------------------------------------------------


def test_half_of_the_rows_are_recorded() -> None:
    draft = make_draft(1)
    rows = rows_of(draft.config, 64, kept(batch_of(draft)))
    assert (len(rows), rows.recorded) == (64, 32)
    assert rows.last is not None and rows.last.shape == (64, 32)
    short = rows_of(draft.config, 64, kept(batch_of(draft, rows=16)))
    assert (len(short), short.recorded) == (64, 10)


@pytest.mark.parametrize(
    "changed",
    [
        {"hidden_states": torch.zeros(1, 96, 96)},
        {"hidden_states": torch.full((1, 96, 96), torch.inf)},
        {"hidden_states": torch.randn(1, 96, 64)},
        {"input_ids": torch.ones(1, 96, dtype=torch.long)},
    ],
    ids=["uniform", "infinite", "other width", "one token"],
)
def test_a_batch_that_shows_nothing_is_not_used(changed: dict[str, Any]) -> None:
    draft = make_draft(1)
    rows = rows_of(draft.config, 64, kept(batch_of(draft, **changed)))
    assert (len(rows), rows.recorded) == (64, 0)
    assert rows.described() == "64 rows from a seed, none from a batch of a training"


def test_the_first_usable_batch_is_kept_and_nothing_else_of_the_loader() -> None:
    draft, keeper = make_draft(1), KeptBatch()
    padding = batch_of(draft, document_ids=torch.full((1, 96), -1))
    strange, good = {"text": "x"}, batch_of(draft)
    later = batch_of(draft, input_ids=torch.zeros(1, 96, dtype=torch.long))
    loader = SimpleNamespace(batch_sampler="theirs")
    batches = [padding, strange, good, later]
    watched = keeper.watched("training", batches)
    assert len(watched) == 4
    assert all(a is b for a, b in zip(watched, batches, strict=True))
    assert keeper.watched("training", loader).batch_sampler == "theirs"
    first = keeper.batch
    assert first is not None and first.kind == "training"
    assert first.tensors["input_ids"].unique().numel() > 1
    used = sum(value.nbytes for value in first.tensors.values())
    assert used < 8_500_000 and "error_records" not in first.tensors
    # Shares no memory with the batch, which is large.
    place = first.tensors["hidden_states"].untyped_storage().data_ptr()
    assert place != good["hidden_states"].untyped_storage().data_ptr()
    # Validation takes its place; training does not take it back.
    list(keeper.watched("validation", [good]))
    list(keeper.watched("training", [good]))
    assert keeper.batch is not None and keeper.batch.kind == "validation"


def test_the_loader_stops_looking(monkeypatch: pytest.MonkeyPatch) -> None:
    """At the first batch that can be used."""
    seen = []

    def see(batch: int, rows: int) -> dict[str, torch.Tensor]:
        seen.append(batch)
        if batch != 2:
            raise ValueError("padding only")
        return {}

    monkeypatch.setattr(batches, "stretch", see)
    watched = KeptBatch().watched("training", [1, 2, 3])
    assert [*watched, *watched] == [1, 2, 3, 1, 2, 3]
    assert seen == [1, 2]


def test_wide_features_are_cut_to_a_few_megabytes() -> None:
    batch = {
        "hidden_states": torch.ones(1, 300, 12288 * 2, dtype=torch.bfloat16),
        "input_ids": torch.arange(300)[None],
        "document_ids": torch.zeros(1, 300, dtype=torch.long),
    }
    held = kept(batch)
    assert held is not None
    taken = held.tensors["hidden_states"].untyped_storage().nbytes()
    assert 6_900_000 < taken < 7_000_001


# --- how often ------------------------------------------------------------------------


class Forwards:
    """Rows of each forward of the training class."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.rows: list[int] = []
        forward = Eagle3DraftModel.forward

        def counted(module: Any, *args: Any, **more: Any) -> Any:
            self.rows.append(more["hidden_states"].shape[1])
            return forward(module, *args, **more)

        monkeypatch.setattr(Eagle3DraftModel, "forward", counted)


def judged(
    tmp_path: Path, draft: Draft, cast: Cast, config: CallbackConfig, target: Any = None
) -> dict[str, Leg]:
    """Both legs of an export that holds the draft rounded to bfloat16."""
    saved = make_draft(1, dtype=torch.bfloat16)
    write_export(tmp_path / "export", saved, dtype="bfloat16", torch_dtype="bfloat16")
    values = saved.weights
    snapshot: Any = SimpleNamespace(
        config=draft.config, tensors=values, rounded=values.__getitem__
    )
    skeleton = empty_draft(draft.config)
    judge = live_judge(cast, skeleton, snapshot, target, config, lambda: False)
    return dict(judge(tmp_path / "export"))


def test_leg_one_and_the_probe_cost_three_forwards(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the rows; besides a look at the clock, the first time, and a short chain."""
    draft = make_draft(1)
    config = settings(tmp_path, positions=128)
    forwards = Forwards(monkeypatch)
    batch = kept(batch_of(draft))
    cast = live_cast(draft.module, config, batch)
    assert forwards.rows == [128, 128, 128]
    forwards.rows.clear()
    cast = live_cast(draft.module, config, batch, max_seconds=60)
    assert forwards.rows == [16, 128, 128, 128]  # ample time shows at once
    legs = judged(tmp_path, draft, cast, config)
    assert legs["cast"].passed and legs["layout"].passed, legs["layout"].reason
    assert legs["layout"].positions == 128
    assert (tmp_path / "export" / "probe" / "probe.json").is_file()
    rest = forwards.rows[4:]
    assert len(rest) == 2 and max(rest) <= 32
    # The control: without the logits of the live module there is one more.
    forwards.rows.clear()
    judged(tmp_path, draft, Cast(cast.leg, cast.inputs, cast.device), config)
    assert forwards.rows.count(128) == 1


def test_what_fails_is_raised_where_it_is_asked_for() -> None:
    done: list[int] = []

    def act() -> int:
        done.append(1)
        return 7 // (len(done) - 1)

    failed = settled(act)
    assert done == [1]
    with pytest.raises(ZeroDivisionError):
        failed()
    assert settled(act)() == 7 and done == [1, 1]


def test_a_snapshot_that_is_not_the_live_module_fails(tmp_path: Path) -> None:
    """The other leg starts from what the live module computed, not from a copy."""
    draft = make_draft(1)
    with torch.no_grad():
        draft.module.fc.weight[3] *= 1.5
    config = settings(tmp_path, positions=64)
    cast = live_cast(draft.module, config, None)
    assert cast.leg.passed
    assert judged(tmp_path, draft, cast, config)["layout"].verdict == "fail"


# --- with which target ----------------------------------------------------------------


@pytest.mark.parametrize(
    ("ids", "verdict"), [([1, 3, 4], "pass"), ([2, 4, 5], "fail"), (None, "pass")]
)
def test_a_target_of_which_only_the_configuration_is_there(
    tmp_path: Path, ids: list[int] | None, verdict: str
) -> None:
    """It says which layers' features SGLang would take; no weights are needed."""
    draft = make_draft(1)
    folder = tmp_path / "target"
    folder.mkdir()
    about = {"architectures": ["LlamaForCausalLM"], "num_hidden_layers": LAYERS}
    (folder / "config.json").write_text(json.dumps(about))
    target = open_target(folder)
    assert not target.has_weights
    config = settings(tmp_path, positions=32)
    cast = live_cast(draft.module, config, None)
    judged(tmp_path, draft, cast, config)  # writes the export
    path = tmp_path / "export" / "config.json"
    eagle = {"eagle_aux_hidden_state_layer_ids": ids} if ids else {}
    written = json.loads(path.read_text()) | {"eagle_config": eagle}

    values = make_draft(1, dtype=torch.bfloat16).weights
    snapshot: Any = SimpleNamespace(
        config=draft.config, tensors=values, rounded=values.__getitem__
    )
    path.write_text(json.dumps(written))
    legs = {}
    for given in (target, None):
        judge = live_judge(
            cast, empty_draft(draft.config), snapshot, given, config, lambda: False
        )
        legs[given is None] = judge(tmp_path / "export")["layout"]
    assert legs[False].verdict == verdict
    if verdict == "fail":
        assert "SGLang would take the features after layers" in legs[False].reason
    assert legs[True].passed  # the control: without a configuration nobody can tell
