"""Checkpoints that older releases of speculators wrote.

Their config.json is what the configuration classes of the wheels 0.5.0, 0.6.0.2 and
0.7.0.2 write; the decoder's part is transformers' own, whose release 4 spelled RoPE and
dtype otherwise. None of them has a training_state.json before 0.7.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.field.desk import Desk, same_bits
from tests.field.test_block_cases import block
from tests.helpers.field import Tensors

NO = "--no-compare"
EMBED, HEAD = "embed_tokens.weight", "lm_head.weight"
IDS = "eagle_aux_hidden_state_layer_ids"


def verifier(target: Path, tokens: int = 3) -> dict[str, Any]:
    """``speculators_config`` before 0.7: nobody knows the target's class."""
    greedy = {"proposal_type": "greedy", "speculative_tokens": tokens}
    return {
        "algorithm": "eagle3",
        "default_proposal_method": "greedy",
        "proposal_methods": [{**greedy, "accept_tolerance": 0.0}],
        "verifier": {"architectures": [], "name_or_path": str(target)},
    }


def eagle3(desk: Desk, version: str) -> dict[str, Any]:
    """What 0.5 and 0.6 write otherwise than 0.9."""
    return {
        "speculators_version": version,
        "speculators_config": verifier(desk.target),
        **dict.fromkeys(("fc_norm", "norm_output", "tie_word_embeddings"), ...),
    }


# transformers 4 wrote the RoPE base beside its scaling, and torch_dtype.
TRANSFORMERS_4 = {"rope_parameters": ..., "rope_theta": 5e5, "rope_scaling": None}
LLAMA3 = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
    "rope_type": "llama3",
}


@pytest.mark.parametrize("version", ["0.5.0", "0.6.0.2"])
def test_eagle3_without_the_norm_flags(desk: Desk, version: str) -> None:
    source = desk.draft(**eagle3(desk, version))
    answer = desk.ok(f"eagle3 of {version}", desk.finalize(source))
    training = answer.manifest["training"]
    assert training["speculators_version"] == version
    assert training["global_step"] is None
    # What is absent was not there: nothing is normed.
    assert not any("norm.weight" in n and "fc" in n for n in answer.tensors)
    assert answer.config.get("norm_output", False) is False
    assert answer.config.get("norm_before_fc", False) is False
    trained = load_file(source / "model.safetensors")
    assert same_bits(answer.tensors["fc.weight"], trained["fc.weight"])
    assert answer.config["eagle_config"][IDS] == [0, 2, 3]


@pytest.mark.parametrize("scaling", [None, LLAMA3], ids=["plain", "llama3"])
def test_eagle3_beside_transformers_4(
    desk: Desk, scaling: dict[str, Any] | None
) -> None:
    layer = {**TRANSFORMERS_4, "rope_scaling": scaling}
    changes = {**eagle3(desk, "0.5.0"), "dtype": ..., "torch_dtype": "bfloat16"}
    answer = desk.finalize(desk.draft(layer=layer, **changes))
    desk.ok("eagle3, transformers 4", answer)
    config = answer.config
    assert config["rope_theta"] == config["rope_parameters"]["rope_theta"] == 5e5
    kind = "llama3" if scaling else "default"
    assert config["rope_parameters"]["rope_type"] == kind
    if scaling:
        assert config["rope_scaling"]["factor"] == 8.0
    assert config["dtype"] == config.get("torch_dtype", "bfloat16") == "bfloat16"


def test_a_rope_base_that_nothing_states_is_not_made_up(desk: Desk) -> None:
    layer = {**TRANSFORMERS_4, "rope_theta": ...}
    answer = desk.finalize(desk.draft(layer=layer, **eagle3(desk, "0.5.0")), NO)
    desk.fails(
        "eagle3, no base",
        answer,
        "transformer_layer_config.rope_parameters",
        "rope_theta",
    )


def whole(desk: Desk, draft: Tensors | None = None) -> Tensors:
    """Embedding and head, which DFlash checkpoints held before 0.8."""
    held = load_file(desk.target / "model.safetensors")
    return {
        EMBED: held["model.embed_tokens.weight"].clone(),
        HEAD: held["lm_head.weight"].clone(),
        **(draft or {}),
    }


def dflash(desk: Desk, version: str, **changes: Any) -> Path:
    """F0 with embedding and head, as 0.5 to 0.7 wrote it."""
    mine: dict[str, Any] = {
        "speculators_version": version,
        "speculators_config": verifier(desk.target),
    }
    if version < "0.7":
        mine |= {"sample_from_anchor": ..., "max_anchors": 3072}
        mine |= {"tie_word_embeddings": ...}
    if version < "0.6":
        mine |= {"sliding_window_non_causal": ...}
    return block(desk, "dflash", **({"add": whole(desk)} | mine | changes))


@pytest.mark.parametrize("version", ["0.5.0", "0.6.0.2", "0.7.0.2"])
def test_dflash_with_the_target_s_own_tensors(desk: Desk, version: str) -> None:
    answer = desk.ok(f"dflash of {version}", desk.finalize(dflash(desk, version)))
    assert not {EMBED, HEAD} & set(answer.tensors)
    assert {p["name"] for p in answer.manifest["provided_by_target"]} == {EMBED, HEAD}
    assert answer.config["architectures"] == ["DFlashDraftModel"]
    slim = desk.ok(f"the same of 0.9, {version}", desk.finalize(block(desk, "dflash")))
    assert {k: v for k, v in answer.config.items() if k != "tie_word_embeddings"} == {
        k: v for k, v in slim.config.items() if k != "tie_word_embeddings"
    }
    assert all(same_bits(answer.tensors[n], v) for n, v in slim.tensors.items())


@pytest.mark.parametrize("version", ["0.7.0.2", "0.9.0", None, "a nightly"])
def test_dflash_of_a_release_with_a_choice_has_to_state_it(
    desk: Desk, version: str | None
) -> None:
    source = block(desk, sample_from_anchor=..., speculators_version=version or ...)
    answer = desk.finalize(source, NO)
    desk.fails(f"dflash {version}, no anchor", answer, "sample_from_anchor", "missing")


@pytest.mark.parametrize("name", [EMBED, HEAD])
def test_dflash_with_another_embedding_or_head_is_refused(
    desk: Desk, name: str
) -> None:
    other = whole(desk)
    other[name] = other[name] + torch.tensor(0.5, dtype=torch.bfloat16)
    answer = desk.finalize(dflash(desk, "0.5.0", add=other), NO)
    desk.fails(f"dflash, another {name}", answer, name)


def test_dspark_of_the_first_release_that_has_it(desk: Desk) -> None:
    source = block(desk, "dspark", add=whole(desk), speculators_version="0.7.0.2")
    answer = desk.ok("dspark of 0.7", desk.finalize(source))
    assert not {EMBED, HEAD} & set(answer.tensors)
    assert answer.config["sample_from_anchor"] is True


def test_the_step_of_an_old_training_comes_from_nowhere(desk: Desk) -> None:
    """0.7 writes training_state.json; before, only the folder's name is known."""
    source = desk.draft(**eagle3(desk, "0.6.0.2"))
    run = desk.root / "run"
    run.mkdir()
    source = source.rename(run / "4")
    old = desk.ok("epoch of 0.6", desk.finalize(source, NO)).manifest["training"]
    assert (old["epoch"], old["global_step"]) == (4, None)
    (source / "training_state.json").write_text(
        json.dumps({"epoch": 4, "local_step": 0, "global_step": 70})
    )
    new = desk.ok("epoch of 0.7", desk.finalize(source, NO)).manifest["training"]
    assert (new["epoch"], new["global_step"]) == (4, 70)
