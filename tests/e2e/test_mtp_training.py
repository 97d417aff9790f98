"""An MTP head trained by speculators on the CPU: exported, finished, merged."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file
from transformers import AutoConfig

from spec_export.training import launch
from tests.helpers.cli import spec_export
from tests.helpers.tiny import Tiny

EXPERTS = 3
ALLOW = "mtp-first-step"
SIZES = {
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-6,
    "num_experts": EXPERTS,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 48,
}


def shapes() -> dict[str, tuple[int, ...]]:
    """The MTP head of a Qwen3-Next checkpoint."""
    layer, mlp = "mtp.layers.0", "mtp.layers.0.mlp"
    found: dict[str, tuple[int, ...]] = {
        "mtp.fc.weight": (64, 128),
        "mtp.pre_fc_norm_hidden.weight": (64,),
        "mtp.pre_fc_norm_embedding.weight": (64,),
        "mtp.norm.weight": (64,),
        f"{layer}.input_layernorm.weight": (64,),
        f"{layer}.post_attention_layernorm.weight": (64,),
        f"{layer}.self_attn.q_proj.weight": (128, 64),
        f"{layer}.self_attn.k_proj.weight": (32, 64),
        f"{layer}.self_attn.v_proj.weight": (32, 64),
        f"{layer}.self_attn.o_proj.weight": (64, 64),
        f"{layer}.self_attn.q_norm.weight": (16,),
        f"{layer}.self_attn.k_norm.weight": (16,),
        f"{mlp}.gate.weight": (EXPERTS, 64),
        f"{mlp}.shared_expert_gate.weight": (1, 64),
    }
    parts = {f"{mlp}.experts.{e}": 32 for e in range(EXPERTS)}
    for name, width in {**parts, f"{mlp}.shared_expert": 48}.items():
        found[f"{name}.gate_proj.weight"] = found[f"{name}.up_proj.weight"] = width, 64
        found[f"{name}.down_proj.weight"] = 64, width
    return found


@pytest.fixture(scope="module")
def verifier(tiny: Tiny, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Qwen3-Next folder with the tiny target's embedding, head and words."""
    folder = tmp_path_factory.mktemp("verifier")
    for path in tiny.target.glob("tokenizer*"):
        shutil.copy(path, folder)
    config = json.loads(AutoConfig.for_model("qwen3_next", **SIZES).to_json_string())
    config |= {"architectures": ["Qwen3NextForCausalLM"], "dtype": "bfloat16"}
    (folder / "config.json").write_text(json.dumps(config))
    held = load_file(tiny.target / "model.safetensors")
    tensors = {
        name: held[name].clone()
        for name in ("model.embed_tokens.weight", "model.norm.weight", "lm_head.weight")
    }
    generator = torch.Generator().manual_seed(5)
    for name, shape in shapes().items():
        value = torch.randn(shape, generator=generator) / shape[-1] ** 0.5
        tensors[name] = value.bfloat16()
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder


def test_an_mtp_head_all_the_way(tiny: Tiny, verifier: Path, tmp_path: Path) -> None:
    exports = tmp_path / "exports"
    path = tmp_path / "recipe.yaml"
    path.write_text(
        yaml.safe_dump(
            {
                "train": {
                    "speculator_type": "mtp",
                    "verifier": {"verifier_name_or_path": str(verifier)},
                    "data": {"data_path": str(tiny.data), "total_seq_len": 256},
                    "generation": {"on_missing": "raise"},
                    "optimizer": {"lr": 1e-2},
                    "trainer": {"epochs": 1, "save_path": str(tmp_path / "run")},
                },
                "callbacks": [
                    {
                        "class_path": "spec_export.SGLangExport",
                        "init_args": {"output_dir": str(exports), "allow": [ALLOW]},
                    }
                ],
            }
        )
    )
    assert launch.main(["--config", str(path), "--max-steps", "3"]) == 0
    folder = exports / "latest"
    manifest = json.loads((folder / "spec_export_manifest.json").read_text())
    assert manifest["serving"]["architecture"] == "Qwen3NextForCausalLMMTP"
    assert [d["code"] for d in manifest["deviations"]] == [ALLOW]
    legs = manifest["comparison"]
    assert [legs[leg]["verdict"] for leg in ("cast", "layout")] == ["pass", "pass"]
    assert max(step["max_rel"] for step in legs["layout"]["metrics"]) <= 1e-5
    assert manifest["tensors"]["mtp.fc.weight"]["role"] == "trained"
    written = load_file(folder / "model.safetensors")
    assert set(written) == set(shapes())

    final = spec_export("finalize", exports, "--target", verifier, "--allow", ALLOW)
    assert final.code == 0, final.data["findings"]
    assert final.data["verdict"] == "pass"
    merged = tmp_path / "merged"
    arguments = ["finalize", tmp_path / "run" / "0", "--merge-into", verifier]
    ran = spec_export(*arguments, "--output", merged, "--allow", ALLOW)
    assert ran.code == 0, ran.data["findings"]
    whole = load_file(merged / "model.safetensors")
    assert all(torch.equal(whole[name], value) for name, value in written.items())
    assert set(whole) == set(load_file(verifier / "model.safetensors"))
