"""The launch line that travels with an export: does it start the draft as trained?"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from spec_export.judge.checks import config_of, launch_problems

TARGET = {"architectures": ["LlamaForCausalLM"], "num_hidden_layers": 8}
QUANTISED = {**TARGET, "quantization_config": {"quant_method": "fp8"}}
NESTED = {"text_config": QUANTISED}
PLAIN = [
    *("--speculative-algorithm", "EAGLE3"),
    *("--speculative-draft-model-path", "{draft}"),
    *("--speculative-num-steps", "3"),
    *("--speculative-eagle-topk", "1"),
    *("--speculative-num-draft-tokens", "4"),
]
UNQUANT = ["--speculative-draft-model-quantization", "unquant"]
DEFAULT_IDS, OTHER_IDS = [1, 3, 4], [0, 2, 3]


def said(
    folder: Path,
    launch: list[str] | None,
    target: dict[str, Any] = TARGET,
    release: str = "0.5.23",
    ids: list[int] = DEFAULT_IDS,
    architecture: str = "LlamaForCausalLMEagle3",
) -> str:
    config = {
        "architectures": [architecture],
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": ids},
    }
    (folder / "config.json").write_text(json.dumps(config))
    manifest = {"spec_export.manifest": json.dumps({"serving": {"launch": launch}})}
    save_file({"w": torch.zeros(1)}, folder / "model.safetensors", manifest)
    return "; ".join(launch_problems(folder, target, release))


@pytest.mark.parametrize(
    ("launch", "more"),
    [
        (PLAIN, {}),
        ([*PLAIN, *UNQUANT], {"target": QUANTISED}),
        (PLAIN, {"target": QUANTISED, "release": "0.5.6"}),
        ([*PLAIN, "--disable-cuda-graph"], {"release": "0.5.10", "ids": OTHER_IDS}),
        (PLAIN, {"ids": OTHER_IDS}),
        (PLAIN, {"release": "0.5.10"}),
        (None, {"target": QUANTISED}),
        (
            ["--speculative-algorithm", "DSPARK", *PLAIN[2:4]],
            {"architecture": "Qwen3DSparkModel"},
        ),
        (
            ["--speculative-algorithm", "NEXTN", *PLAIN[2:]],
            {"architecture": "Qwen3NextForCausalLM"},
        ),
    ],
)
def test_a_right_line(
    tmp_path: Path, launch: list[str] | None, more: dict[str, Any]
) -> None:
    assert said(tmp_path, launch, **more) == ""


@pytest.mark.parametrize(
    ("launch", "more", "words"),
    [
        (
            ["--speculative-algorithm", "EAGLE", *PLAIN[2:]],
            {},
            "starts EAGLE, not what",
        ),
        (PLAIN[2:], {}, "starts None, not what"),
        ([*PLAIN[:2], *PLAIN[4:]], {}, "does not start this draft"),
        (PLAIN[:-2], {}, "without --speculative-num-draft-tokens"),
        (PLAIN, {"target": QUANTISED}, "quantization unquant"),
        (PLAIN, {"target": NESTED}, "quantization unquant"),
        ([*PLAIN, UNQUANT[0], "fp8"], {}, "quantization unquant"),
        (PLAIN, {"release": "0.5.10", "ids": OTHER_IDS}, "resets the layer ids"),
    ],
)
def test_a_wrong_line(
    tmp_path: Path, launch: list[str], more: dict[str, Any], words: str
) -> None:
    assert words in said(tmp_path, launch, **more)


def test_a_folder_without_our_manifest_has_no_line(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    save_file({"w": torch.zeros(1)}, tmp_path / "model.safetensors")
    assert launch_problems(tmp_path, QUANTISED, "0.5.23") == []


@pytest.mark.parametrize("own", [{}, {"quantization_config": None}])
@pytest.mark.parametrize("method", ["NVFP4", None])
def test_what_modelopt_left_beside_the_target(
    tmp_path: Path, method: str | None, own: dict[str, Any]
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**TARGET, **own}))
    beside = {"quantization": {"quant_algo": method}}
    (tmp_path / "hf_quant_config.json").write_text(json.dumps(beside))
    target = config_of(tmp_path)
    assert target is not None
    words = said(tmp_path, PLAIN, target)
    assert ("quantization unquant" in words) is (method is not None)
