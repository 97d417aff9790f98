"""The real MTP classes of SGLang: they take every tensor and compute what was trained.

No server: it would need the whole target, whose linear attention SGLang 0.5.23 refuses
on a CPU ("extra_buffer requires platform support for Mamba cache state snapshots").
``mtp_check.py`` lets SGLang's loader fill the class and calls its own forward, with
plain stand-ins for the attention kernel and for the kernels that need a GPU or
``sgl_kernel``'s compiled part: the gate of the shared expert, and for Qwen3.5 the norms
of the heads and the output gate.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from spec_export import cli
from tests.helpers.mtp import TARGETS, make_mtp, make_target
from tests.helpers.record import record
from tests.serving.sglang_process import IMPORTED, Engine, answer_of

PLAIN = dict.fromkeys(
    (
        "speculative_algorithm",
        "speculative_draft_model_path",
        "speculative_num_steps",
        "speculative_eagle_topk",
        "speculative_num_draft_tokens",
    )
)


def _export(root: Path, kind: str) -> tuple[Path, Path]:
    verifier = make_target(root / "verifier", kind)
    checkpoint = make_mtp(root / "checkpoint", verifier, kind)
    out = root / "export"
    arguments = ["finalize", str(checkpoint), "--output", str(out), "--no-compare"]
    arguments += ["--target", str(verifier), "--dtype", "float32"]
    assert cli.run([*arguments, "--allow", "mtp-first-step"]) == 0
    return verifier, out


def _load(engine: Engine, target: Path, draft: Path) -> dict[str, object]:
    # The server's own arguments are those of a plain target: only the class counts.
    job = {"do": "load", "target": str(target), "drafts": [str(draft)], "extra": PLAIN}
    (report,) = engine._ask(job)["reports"].values()
    return dict(report)


def test_qwen3_next_takes_every_tensor(
    engine: Engine, target: Path, tmp_path: Path
) -> None:
    _, out = _export(tmp_path, "qwen3_next")
    given = {"class": "Qwen3NextForCausalLMMTP", "ignored": []}
    shared = ["lm_head.weight", "model.embed_tokens.weight"]
    assert _load(engine, target, out) == {**given, "unset": shared}
    tensors = load_file(out / "model.safetensors")
    del tensors["mtp.layers.0.mlp.experts.1.up_proj.weight"]
    save_file(tensors, out / "model.safetensors", {"format": "pt"})
    unset = _load(engine, target, out)["unset"]
    assert unset == [*shared, "model.layers.0.mlp.experts.w13_weight"]


@pytest.mark.parametrize("kind", TARGETS)
def test_forward_of_the_real_class(target: Path, tmp_path: Path, kind: str) -> None:
    verifier, out = _export(tmp_path, kind)
    found = answer_of("mtp_check.py", target, verifier, out, environment=IMPORTED)
    family = "Qwen3Next" if kind == "qwen3_next" else "Qwen3_5"
    assert found["class"] == f"{family}ForCausalLMMTP"
    assert found["difference"] <= 1e-5 and found["swapped"] > 1e-2
    record("engine", kind, f"its class, by hand: {found['difference']:.1e}")
