"""What a training will write, told from its flags alone."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from spec_export.findings import SpecExportError
from spec_export.training.draft_config import ResolvedDraft, resolve_draft
from tests.helpers.tiny import Tiny, run_training


@pytest.fixture
def bare(tiny: Tiny, tmp_path: Path) -> Tiny:
    """Only the target's config.json; no tokenizer, no weights, no data."""
    (tmp_path / "bare" / "target").mkdir(parents=True)
    shutil.copy(tiny.target / "config.json", tmp_path / "bare" / "target")
    (tmp_path / "bare" / "data").mkdir()
    return Tiny(tmp_path / "bare")


def resolve(tiny: Tiny, tmp_path: Path, *flags: str) -> ResolvedDraft:
    return resolve_draft(tiny.flags(tmp_path / "run", *flags))


def refused(tiny: Tiny, tmp_path: Path, *flags: str) -> tuple[str, str, int]:
    with pytest.raises(SpecExportError) as caught:
        resolve(tiny, tmp_path, *flags)
    (finding,) = caught.value.findings
    return finding.code, finding.subject, caught.value.exit_code


def as_written(run: Path) -> dict[str, Any]:
    config = json.loads((run / "0" / "config.json").read_text())
    config.pop("auto_map")  # names speculators' own file
    return config


@pytest.mark.parametrize(
    "flags",
    [
        (),
        (
            *("--num-layers", "2", "--full-attention-indices", "0", "1"),
            *("--norm-before-residual", "--no-norm-before-fc", "--fc-norm"),
        ),
        (
            *("--speculator-type", "dflash", "--num-layers", "1"),
            *("--block-size", "4", "--max-anchors", "8"),
        ),
    ],
    ids=["eagle3", "eagle3-2-layers", "dflash"],
)
def test_it_is_what_the_training_writes(
    tiny: Tiny, tmp_path: Path, flags: tuple[str, ...]
) -> None:
    predicted = resolve(tiny, tmp_path, "--max-steps", "1", *flags)
    assert not (tmp_path / "run").exists()
    run_training(tiny.flags(tmp_path / "run", "--max-steps", "1", *flags))
    assert predicted.config == as_written(tmp_path / "run")
    assert predicted.findings == []

    # The checkpoint as --from-pretrained defines the same draft; with weights and
    # as a folder with a config alone.
    (tmp_path / "config").mkdir()
    shutil.copy(tmp_path / "run" / "0" / "config.json", tmp_path / "config")
    base = tiny.flags(tmp_path / "again")
    at = base.index("--full-attention-indices")
    base = base[:at] + base[at + 2 :]
    kind = ("--speculator-type", predicted.speculator_type)
    for folder in (tmp_path / "run" / "0", tmp_path / "config"):
        again = resolve_draft([*base, *kind, "--from-pretrained", str(folder)])
        assert again.config == predicted.config


def test_no_weight_and_no_tokenizer_is_needed(bare: Tiny, tmp_path: Path) -> None:
    found = resolve(bare, tmp_path)
    assert found.config["draft_vocab_size"] == 128
    assert found.config["architectures"] == ["Eagle3DraftModel"]
    assert found.speculator_type == "eagle3"
    assert found.save_path == tmp_path / "run"
    assert found.flags["ttt_steps"] == 3
    assert [f.code for f in found.findings] == ["vocab-map-absent"]
    assert sorted(p.name for p in bare.data.iterdir()) == []


def test_a_mask_token_that_only_the_tokenizer_knows(
    bare: Tiny, tiny: Tiny, tmp_path: Path
) -> None:
    flags = ("--speculator-type", "dflash")
    found = resolve(bare, tmp_path, *flags)
    assert found.config["mask_token_id"] is None
    assert [f.subject for f in found.findings if f.code == "target-needed"] == [
        "mask_token_id"
    ]
    explicit = resolve(bare, tmp_path, *flags, "--mask-token-id", "7")
    assert explicit.config["mask_token_id"] == 7
    assert resolve(tiny, tmp_path, *flags).config["mask_token_id"] == 500


def test_another_target_stands_in(tiny: Tiny, bare: Tiny, tmp_path: Path) -> None:
    flags = tiny.flags(tmp_path / "run")
    name = "somebody/not-downloaded"
    flags[flags.index("--verifier-name-or-path") + 1] = name
    found = resolve_draft(flags, bare.target)
    assert found.verifier == name
    assert found.config["speculators_config"]["verifier"] == {
        "name_or_path": name,
        "architectures": ["LlamaForCausalLM"],
    }


@pytest.mark.parametrize("config", [None, "{", '{"model_type": "no-such-model"}'])
def test_a_target_that_cannot_be_read(
    bare: Tiny, tmp_path: Path, config: str | None
) -> None:
    path = bare.target / "config.json"
    path.unlink() if config is None else path.write_text(config)
    answer = ("target-needed", "verifier_name_or_path", 1)
    assert refused(bare, tmp_path) == answer


def test_the_draft_vocabulary_is_decided_as_speculators_does(
    bare: Tiny, tmp_path: Path
) -> None:
    flags = bare.flags(tmp_path / "run")
    at = flags.index("--draft-vocab-size")
    full = resolve_draft(flags[:at] + flags[at + 2 :])
    assert (full.config["draft_vocab_size"], full.findings) == (512, [])

    (bare.data / "token_freq.pt").write_bytes(b"")  # is not opened
    found = resolve(bare, tmp_path)
    assert (found.config["draft_vocab_size"], found.findings) == (128, [])

    for name, size in (("d2t", 96), ("t2d", 512)):
        np.save(tmp_path / f"{name}.npy", np.zeros(size, np.int64))
    maps = ("--d2t-path", str(tmp_path / "d2t.npy"))
    maps += ("--t2d-path", str(tmp_path / "t2d.npy"))
    given = resolve_draft(flags[:at] + flags[at + 2 :] + list(maps))
    assert given.config["draft_vocab_size"] == 96
    answer = ("recipe-invalid", "draft.draft_vocab_size", 2)
    assert refused(bare, tmp_path, *maps) == answer
    assert refused(bare, tmp_path, *maps[:2]) == ("recipe-invalid", "draft", 2)
    (tmp_path / "d2t.npy").write_bytes(b"no array")
    assert refused(bare, tmp_path, *maps) == ("vocab-map-invalid", "d2t.npy", 2)


@pytest.mark.parametrize(
    ("flags", "subject"),
    [
        (("--target-layer-ids", "2", "99"), "train.draft"),
        (("--norm-before-fc", "--fc-norm"), "train.draft"),
        (("--checkpoint-freq", "-1"), "trainer.checkpoint_freq"),
        (("--from-pretrained", "x"), "train"),
    ],
)
def test_what_speculators_refuses_is_said_before(
    bare: Tiny, tmp_path: Path, flags: tuple[str, ...], subject: str
) -> None:
    assert refused(bare, tmp_path, *flags) == ("recipe-invalid", subject, 2)


def test_an_unknown_family(bare: Tiny, tmp_path: Path) -> None:
    answer = ("family-unsupported", "speculator_type", 2)
    assert refused(bare, tmp_path, "--speculator-type", "medusa") == answer


def test_a_recipe_file(bare: Tiny, tmp_path: Path) -> None:
    path = tmp_path / "recipe.yaml"
    train = {
        "verifier": {"verifier_name_or_path": str(bare.target)},
        "draft": {"norm_before_residual": False},
    }
    path.write_text(yaml.safe_dump({"train": train}))
    config = resolve_draft(path).config
    assert config["norm_before_residual"] is False
    assert config["eagle_aux_hidden_state_layer_ids"] == [2, 4, 5]
