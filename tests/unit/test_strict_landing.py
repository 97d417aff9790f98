"""What landed in a model's parameters, held against the manifest. No SGLang here.

The model below loads as SGLang's drafts do: fused parameters with loaders of their
own, names that are dropped without a word, slices of tensors under tensor parallelism.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from spec_export.artifact.manifest import Manifest, Provided, Serving, TensorEntry
from spec_export.serving import strict

Tensors = dict[str, torch.Tensor]
NAMES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.int64: "I64"}


def default_loader(parameter: nn.Parameter, value: torch.Tensor) -> None:
    assert parameter.shape == value.shape
    parameter.data.copy_(value)


@pytest.fixture(autouse=True)
def sglang(monkeypatch: pytest.MonkeyPatch) -> None:
    """The one function of SGLang that landing needs."""
    path = ""
    for part in ("sglang", "srt", "model_loader", "weight_utils"):
        path = f"{path}.{part}" if path else part
        monkeypatch.setitem(sys.modules, path, ModuleType(path))
    sys.modules[path].default_weight_loader = default_loader  # type: ignore[attr-defined]
    monkeypatch.delitem(sys.modules, "spec_export.serving.landing", raising=False)


class Draft(nn.Module):
    """A fused matrix of two parts, a norm, a padded head, an embedding, a token map."""

    def __init__(self, folder: Path, rank: int = 0, ranks: int = 1) -> None:
        super().__init__()
        self.config = SimpleNamespace(
            _name_or_path=str(folder), draft_vocab_size=6, vocab_size=20
        )
        self.rank, self.ranks = rank, ranks
        self.hot_token_id: torch.Tensor | None = None
        self.fused = nn.Parameter(torch.empty(8 // ranks, 4, dtype=torch.bfloat16))
        self.norm = nn.Parameter(torch.ones(4, dtype=torch.bfloat16))
        self.head = nn.Parameter(torch.empty(8, 4, dtype=torch.bfloat16))
        self.embed = nn.Parameter(torch.empty(20, 4, dtype=torch.bfloat16))
        for parameter in self.parameters():
            parameter.requires_grad = False
        self.fused.weight_loader = self.load_part
        self.head.weight_loader = self.load_head
        self.shift = 0

    def load_part(self, parameter: Any, value: torch.Tensor, part: int) -> None:
        rows = 4 // self.ranks
        mine = value[self.rank * rows : (self.rank + 1) * rows]
        at = (part * rows + self.shift) % len(parameter)
        parameter.data[at : at + rows].copy_(mine)

    def load_head(self, parameter: Any, value: torch.Tensor) -> None:
        parameter.data[: len(value)].copy_(value)
        parameter.data[len(value) :].fill_(0)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        parameters = dict(self.named_parameters())
        for name, value in weights:
            if name == "d2t":
                self.hot_token_id = value + torch.arange(len(value))
            elif name in ("left", "right"):
                self.fused.weight_loader(self.fused, value, int(name == "right"))
            elif name in parameters:
                found = parameters[name]
                getattr(found, "weight_loader", default_loader)(found, value)


def make_tensors() -> Tensors:
    torch.manual_seed(0)
    floats = {"left": (4, 4), "right": (4, 4), "norm": (4,), "head": (6, 4)}
    tensors = {n: torch.randn(s).bfloat16() for n, s in floats.items()}
    return tensors | {"d2t": torch.arange(6) * 2}


def write_manifest(folder: Path, tensors: Tensors) -> None:
    entries = {
        name: TensorEntry(
            role=None,
            source=[name],
            dtype=NAMES[value.dtype],
            shape=list(value.shape),
            sha256=hashlib.sha256(value.view(torch.uint8).numpy().data).hexdigest(),
        )
        for name, value in tensors.items()
    }
    Manifest(
        run_id="run",
        status="final",
        serving=Serving(
            min_version="0.5.12",
            max_known_version="0.5.23",
            algorithm="EAGLE3",
            architecture="Draft",
            requires_plugin=True,
            launch=[],
        ),
        tensors=entries,
        provided_by_target=[
            Provided(name="embed", shape=[20, 4], counterpart="embedding")
        ],
    ).write(folder)


def refused(model: Draft, tensors: Tensors) -> list[str]:
    with pytest.raises(strict.DraftRefused) as caught:
        strict.load_weights(model, model.load_weights, tensors.items())
    return [f"{f.code} {f.subject}" for f in caught.value.findings]


@pytest.mark.parametrize(("rank", "ranks"), [(0, 1), (0, 2), (1, 2)])
def test_what_fits_is_loaded(rank: int, ranks: int, tmp_path: Path) -> None:
    tensors, model = make_tensors(), Draft(tmp_path, rank, ranks)
    write_manifest(tmp_path, tensors)
    loader = model.fused.weight_loader
    strict.load_weights(model, model.load_weights, tensors.items())
    rows = slice(rank * 4 // ranks, (rank + 1) * 4 // ranks)
    wanted = torch.cat([tensors["left"][rows], tensors["right"][rows]])
    assert torch.equal(model.fused, wanted)
    # Nothing of the watching is left behind, and later updates are not watched.
    assert model.fused.weight_loader == loader
    assert not hasattr(model.norm, "weight_loader")
    strict.load_weights(model, model.load_weights, {"norm": torch.zeros(4)}.items())
    assert not model.norm.any()


def test_a_model_may_collect_its_tensors_first(tmp_path: Path) -> None:
    """As DSpark does, whose second head exists only in some modes of the server."""
    tensors, model = make_tensors(), Draft(tmp_path)
    tensors["confidence_head.proj.weight"] = torch.ones(4)
    write_manifest(tmp_path, tensors)

    def load(weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        Draft.load_weights(model, list(weights))

    strict.load_weights(model, load, tensors.items())
    model = Draft(tmp_path)
    model.confidence_head = nn.Linear(4, 1)
    with pytest.raises(strict.DraftRefused, match=r"name-dropped. confidence_head"):
        strict.load_weights(model, load, tensors.items())


def test_a_cast_is_compared_after_it(tmp_path: Path) -> None:
    tensors, model = make_tensors(), Draft(tmp_path)
    tensors["norm"] = torch.full((4,), 1 / 3)
    write_manifest(tmp_path, tensors)
    strict.load_weights(model, model.load_weights, tensors.items())
    assert torch.equal(model.norm, torch.full((4,), 1 / 3).bfloat16())


def test_a_folder_without_manifest_or_off_is_loaded_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tensors = make_tensors()
    del tensors["norm"]
    model = Draft(tmp_path)
    strict.load_weights(model, model.load_weights, tensors.items())
    write_manifest(tmp_path, make_tensors())
    assert refused(Draft(tmp_path), tensors) == [
        "tensor-missing norm",
        "parameter-without-origin norm",
    ]
    monkeypatch.setenv(strict.STRICT, "off")
    model = Draft(tmp_path)
    strict.load_weights(model, model.load_weights, tensors.items())


def rename(tensors: Tensors) -> None:
    tensors["norms"] = tensors.pop("norm")


def lose_part(tensors: Tensors) -> None:
    del tensors["right"]


def lose_map(tensors: Tensors) -> None:
    del tensors["d2t"]


@pytest.mark.parametrize(
    ("change", "found"),
    [
        (rename, ["name-dropped norms", "parameter-without-origin norm"]),
        (lose_part, ["parameter-without-origin fused"]),
        (lose_map, ["parameter-without-origin d2t"]),
    ],
)
def test_an_export_that_was_wrong_when_written(
    change: Callable[[Tensors], None], found: list[str], tmp_path: Path
) -> None:
    tensors = make_tensors()
    change(tensors)
    write_manifest(tmp_path, tensors)  # which agrees with it
    assert refused(Draft(tmp_path), tensors) == found


def test_other_bits_than_the_manifest_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tensors = make_tensors()
    write_manifest(tmp_path, tensors)
    tensors["head"].view(torch.int16)[2, 1] ^= 1
    assert refused(Draft(tmp_path), tensors) == ["file-changed head"]
    # A launcher that has hashed the files of this very folder spares a second pass.
    monkeypatch.setenv(strict._CHECKED, str(tmp_path / "other"))
    assert refused(Draft(tmp_path), tensors) == ["file-changed head"]
    monkeypatch.setenv(strict._CHECKED, str(tmp_path.resolve()))
    model = Draft(tmp_path)
    strict.load_weights(model, model.load_weights, tensors.items())
    assert refused(Draft(tmp_path), {**tensors, "norm": torch.ones(4)}) == [
        "file-changed norm"
    ]


def test_a_token_map_that_is_not_applied(tmp_path: Path) -> None:
    tensors, model = make_tensors(), Draft(tmp_path)
    write_manifest(tmp_path, tensors)

    def load(weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        Draft.load_weights(model, weights)
        model.hot_token_id = torch.arange(6)

    with pytest.raises(strict.DraftRefused, match=r"name-dropped.* d2t"):
        strict.load_weights(model, load, tensors.items())


def test_a_parameter_that_is_changed_after_its_loader(tmp_path: Path) -> None:
    tensors, model = make_tensors(), Draft(tmp_path)
    write_manifest(tmp_path, tensors)

    def load(weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        Draft.load_weights(model, weights)
        model.fused.data[3, 2] += 1

    with pytest.raises(strict.DraftRefused, match="1 of its 32 elements"):
        strict.load_weights(model, load, tensors.items())


def test_two_tensors_for_one_place(tmp_path: Path) -> None:
    tensors, model = make_tensors(), Draft(tmp_path)
    write_manifest(tmp_path, tensors)

    def twice(weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        for name, value in weights:
            Draft.load_weights(model, [(name, value)])
            if name == "norm":
                Draft.load_weights(model, [(name, value * 2)])

    with pytest.raises(strict.DraftRefused, match=r"file-contradiction.* norm"):
        strict.load_weights(model, twice, tensors.items())


def test_a_loader_that_raises_names_the_tensor(tmp_path: Path) -> None:
    tensors = make_tensors()
    tensors["norm"] = torch.ones(5).bfloat16()
    write_manifest(tmp_path, tensors)
    assert refused(Draft(tmp_path), tensors) == ["shape-mismatch norm"]
