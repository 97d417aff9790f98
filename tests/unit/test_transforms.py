"""The named transforms: shapes as planned, numbers as SGLang computes with them."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

from spec_export.artifact import transforms as numbers
from spec_export.artifact.transforms import transformed_blocks
from spec_export.layout.transforms import (
    TRANSFORMS,
    TransformError,
    result_shape,
    spelled,
)

RNG = np.random.default_rng(0)


def computed(
    name: str,
    sources: list[np.ndarray],
    arguments: dict[str, Any],
    shape: tuple[int, ...] | None = None,
    dtype: str = "F32",
) -> np.ndarray:
    """A transform's result; its shape is the one that the layout plans."""
    planned = result_shape(name, [s.shape for s in sources], arguments)
    shape = planned if shape is None else shape
    assert shape is not None
    blocks = list(transformed_blocks(name, sources, arguments, shape, dtype))
    assert all(block.ndim == 1 for block in blocks)
    return np.concatenate(blocks).reshape(shape)


def values(*shape: int) -> np.ndarray:
    return RNG.standard_normal(shape).astype(np.float32)


def test_both_rooms_know_the_same_transforms() -> None:
    assert set(numbers._RULES) == set(TRANSFORMS)


def test_constant() -> None:
    out = computed("constant", [], {"value": 1}, (5, 2), "BF16")
    assert out.dtype == ml_dtypes.bfloat16 and (out == 1).all()


@pytest.mark.parametrize("small_blocks", [False, True])
@pytest.mark.parametrize("rows", [[], [0], [4], [2, 4], [1, 1], [0, 2, 4]])
@pytest.mark.parametrize("columns", [[], [0], [3], [1, 3]])
def test_insert(
    rows: list[int],
    columns: list[int],
    small_blocks: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if small_blocks:
        monkeypatch.setattr(numbers, "BLOCK_BYTES", 16)
    table = values(4, 3)
    out = computed("insert", [table], {"rows": rows, "columns": columns, "value": 7})
    wanted = np.insert(np.insert(table, columns, 7, axis=1), rows, 7, axis=0)
    assert np.array_equal(out, wanted)


def test_insert_values_of_a_vector() -> None:
    arguments = {"rows": [2, 4, 6], "values": [0, 0, 20], "value": 0}
    out = computed("insert", [np.arange(6, dtype=np.float32)], arguments)
    assert out.tolist() == [0, 1, 0, 2, 3, 0, 4, 5, 20]


@pytest.mark.parametrize("small_blocks", [False, True])
@pytest.mark.parametrize("with_table", [False, True])
def test_scatter_rows(
    with_table: bool, small_blocks: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if small_blocks:
        monkeypatch.setattr(numbers, "BLOCK_BYTES", 32)
    kept = np.array([1, 2, 5, 9])
    d2t, table = kept - np.arange(4), values(4, 3)
    sources = [table, d2t] if with_table else [d2t]
    out = computed("scatter-rows", sources, {"vocabulary": 10, "outside": -10000})
    wanted = np.zeros((10, 4 if with_table else 1), np.float32)
    wanted[:, -1] = -10000
    wanted[kept, -1] = 0
    if with_table:
        wanted[kept, :-1] = table
    assert np.array_equal(out, wanted)


def test_take_expert() -> None:
    fused = values(3, 8, 4)
    out = computed("take-expert", [fused], {"expert": 2, "start": 4, "rows": 4})
    assert np.array_equal(out, fused[2, 4:])


@pytest.mark.parametrize("small_blocks", [False, True])
def test_scale_by_a_power_of_two_keeps_every_bit(
    small_blocks: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if small_blocks:
        monkeypatch.setattr(numbers, "BLOCK_BYTES", 32)
    held = values(5, 3).astype(ml_dtypes.bfloat16)
    out = computed("scale", [held], {"by": 16.0}, dtype="BF16")
    assert np.array_equal(out.astype(np.float32), held.astype(np.float32) * 16)
    bias = computed("scale", [values(7)], {"by": 0.5})
    assert bias.shape == (7,)


def test_scale_rounds_to_the_saved_dtype_before_and_after() -> None:
    live, by = values(64, 8), 32**0.5
    saved = live.astype(ml_dtypes.bfloat16)
    out = computed("scale", [live], {"by": by}, dtype="BF16")
    # A live float32 module and the checkpoint that is saved of it become one file.
    assert np.array_equal(out, computed("scale", [saved], {"by": by}, dtype="BF16"))
    wanted = (saved.astype(np.float32) * np.float32(by)).astype(ml_dtypes.bfloat16)
    assert np.array_equal(out, wanted)
    apart = np.abs(out.astype(np.float64) / by - saved.astype(np.float64))
    assert 0 < (apart / np.abs(saved.astype(np.float64))).max() <= 2**-8


def test_results_have_the_saved_dtype() -> None:
    table, d2t = values(4, 3), np.zeros(4, np.int64)
    for name, sources, arguments in (
        ("insert", [table], {"columns": [3], "value": 1}),
        ("scatter-rows", [table, d2t], {"vocabulary": 6, "outside": -10000}),
        ("take-expert", [values(2, 4, 3)], {"expert": 0, "start": 0, "rows": 4}),
        ("scale", [table], {"by": 3.0}),
    ):
        out = computed(name, sources, arguments, dtype="BF16")
        assert out.dtype == ml_dtypes.bfloat16


@pytest.mark.parametrize(
    ("name", "shapes", "arguments", "said"),
    [
        ("fold", [(2, 2)], {}, "no transform 'fold'"),
        ("insert", [], {"value": 1}, "takes 1 source"),
        ("take-expert", [(2, 2)], {"by": 1}, "takes ['expert'"),
        ("insert", [(2, 2)], {"value": 0, "rows": [3]}, "rows [3]"),
        ("insert", [(2,)], {"value": 0, "columns": [1]}, "has no columns"),
        ("scale", [(2, 2)], {}, "takes ['by']"),
        ("scale", [(2,), (2,)], {"by": 2}, "takes 1 source"),
    ],
)
def test_what_does_not_fit_is_said(
    name: str, shapes: list[tuple[int, ...]], arguments: dict[str, Any], said: str
) -> None:
    with pytest.raises(TransformError) as caught:
        result_shape(name, shapes, arguments)
    assert said in str(caught.value)


def test_spelling_for_the_manifest() -> None:
    text = spelled("insert", {"value": 1, "columns": [16]})
    assert text == "insert(columns=[16], value=1)"


def _markov_bias(
    head: str, weights: dict[str, np.ndarray], before: int, hidden: np.ndarray
) -> np.ndarray:
    """The bias of one slot as SGLang's heads compute it, state zero."""
    latent = weights["w1"][before]
    if head == "gated":
        z = weights["gate"] @ np.concatenate([hidden, latent]) + weights["gate_bias"]
        latent = latent / (1 + np.exp(-z))
    if head == "rnn":
        state = np.zeros_like(latent)
        z = weights["joint"] @ np.concatenate([state, latent, hidden])
        latent = np.tanh(np.split(z + weights["joint_bias"], 3)[2])
    return weights["w2"] @ latent


@pytest.mark.parametrize("head", ["vanilla", "gated", "rnn"])
def test_extra_rank_forbids_and_changes_nothing_else(head: str) -> None:
    vocab, rank, width, kept = 12, 3, 5, np.array([0, 3, 4, 8, 11])
    small = {
        "w1": values(vocab, rank),
        "w2": values(len(kept), rank),
        "gate": values(rank, width + rank),
        "gate_bias": values(rank),
        "joint": values(3 * rank, 2 * rank + width),
        "joint_bias": values(3 * rank),
    }
    spread = [rank, 2 * rank, 3 * rank]
    insert: dict[str, dict[str, Any]] = {
        "w1": {"columns": [rank], "value": 2 if head == "gated" else 1},
        "gate": {"rows": [rank], "columns": [width + rank], "value": 0},
        "gate_bias": {"rows": [rank], "value": 0},
        "joint": {"rows": spread, "columns": [rank, 2 * rank], "value": 0},
        "joint_bias": {"rows": spread, "values": [0, 0, 20], "value": 0},
    }
    large = {k: computed("insert", [small[k]], a) for k, a in insert.items()}
    large["w2"] = computed(
        "scatter-rows",
        [small["w2"], kept - np.arange(len(kept))],
        {"vocabulary": vocab, "outside": -10000},
    )
    for before in range(vocab):
        hidden = values(width)
        wanted = _markov_bias(head, small, before, hidden)
        bias = _markov_bias(head, large, before, hidden)
        assert np.allclose(bias[kept], wanted, atol=1e-5)
        assert (np.delete(bias, kept) < -9000).all()
