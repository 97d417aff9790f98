"""Strict loading in the real SGLang: what does not fit stops the server."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.serving import blocks, drafts, plugin_drafts, simulate
from tests.serving.conftest import Made, MakePlugin, export_draft
from tests.serving.plugin_drafts import (
    BIASED,
    DEFAULT,
    PLUGIN_OFF,
    SINGLE,
    WINDOWED,
    PluginEngine,
)
from tests.serving.sglang_process import (
    answer_of,
    running,
    sglang_environment,
    sglang_python,
)
from tests.serving.simulate import NEW_TOKENS
from tests.serving.test_http import (
    CPU_FLAGS,
    free_port,
    launch_flags,
    post,
    wait_until_up,
)

NORM = "midlayer.post_attention_layernorm.weight"
Break = Callable[[Path, Path], Path]


def renamed(export: Path, out: Path) -> Path:
    return plugin_drafts.renamed(export, out, NORM, NORM.replace("post_", "pre_"))


def without_norm(export: Path, out: Path) -> Path:
    return plugin_drafts.without(export, out, NORM)


def renamed_in_place(export: Path, out: Path) -> Path:
    """Renamed afterwards: the files are no longer those of the manifest."""
    renamed(export, out)
    manifest = (export / plugin_drafts.MANIFEST).read_bytes()
    (out / plugin_drafts.MANIFEST).write_bytes(manifest)
    return out


BROKEN: dict[str, tuple[Break, str]] = {
    "renamed": (renamed, f"error[name-dropped] {NORM.replace('post_', 'pre_')}"),
    "missing-norm": (without_norm, "error[tensor-missing] midlayer.post_attention"),
    "renamed-in-place": (renamed_in_place, "error[file-changed] model.safetensors"),
    "flipped-bit": (plugin_drafts.flipped, "error[file-changed] model.safetensors"),
}


@pytest.mark.parametrize("kind", BROKEN)
def test_launcher_refuses(
    kind: str,
    make_plugin: MakePlugin,
    server: PluginEngine,
    target: Path,
    prompts: list[list[int]],
    tmp_path: Path,
) -> None:
    broken, said = BROKEN[kind]
    export = broken(make_plugin(DEFAULT).export, tmp_path / "broken")
    answer = server.attempt(target, export, prompts, NEW_TOKENS)
    # An ordinary exception in the launcher: no process was started by then.
    assert "DraftRefused: spec-export does not let SGLang serve" in answer["error"]
    assert said in answer["error"]
    assert "Scheduler hit an exception" not in answer["log"]


def test_launcher_refuses_another_target(
    make_plugin: MakePlugin,
    server: PluginEngine,
    target: Path,
    prompts: list[list[int]],
    tmp_path: Path,
) -> None:
    export = make_plugin(DEFAULT).export
    other = tmp_path / "other"
    drafts.make_target(other, seed=1)
    answer = server.attempt(other, export, prompts, NEW_TOKENS)
    assert "DraftRefused" in answer["error"]
    assert "error[target-differs]" in answer["error"]
    allow = {"SPEC_EXPORT_ALLOW": "target-differs"}
    allowed = server.attempt(other, export, prompts[:1], 4, allow, log_level="warning")
    assert "error" not in allowed
    assert "warning[target-differs]" in allowed["log"]
    off = server.attempt(other, export, prompts[:1], 4, {"SPEC_EXPORT_STRICT": "off"})
    assert off["prompts"] == allowed["prompts"]


def test_strict_on_checks_drafts_of_others(
    make_plugin: MakePlugin,
    server: PluginEngine,
    target: Path,
    prompts: list[list[int]],
    tmp_path: Path,
) -> None:
    """The stock class would drop the q and k norms of such a draft."""
    stock = plugin_drafts.as_stock(make_plugin(BIASED).export, tmp_path / "stock")
    on = {"SPEC_EXPORT_STRICT": "on"}
    answer = server.attempt(target, stock, prompts, NEW_TOKENS, on)
    assert "error[name-dropped] layers.0.self_attn.q_norm.weight" in answer["error"]


# --- after loading, and in other releases ------------------------------------------


def check_release(
    target: Path, exports: list[Path], installed: dict[str, str], wheel: Path | None
) -> dict[str, Any]:
    """What ``release_check.py`` prints, the drafts in the order given."""
    path = installed["PYTHONPATH"]
    variables = {"PYTHONPATH": path if wheel is None else f"{wheel}:{path}"}
    answer = answer_of("release_check.py", target, *exports, environment=variables)
    answer["drafts"] = list(answer["drafts"].values())
    return answer


def assert_loads_and_computes(
    answer: dict[str, Any], windows: list[int | None]
) -> None:
    for draft, window in zip(answer["drafts"], windows, strict=True):
        assert draft["error"] is None
        assert draft["class"] == "SpecExportEagle3ForCausalLM"
        assert draft["compared"] is True
        assert draft["window"] == window
        assert draft["difference"] < 1e-6


VARIANTS = (DEFAULT, BIASED, SINGLE, WINDOWED)
WINDOWS = [2047, 2047, None, 15]


def test_what_landed_is_compared(
    make_plugin: MakePlugin,
    make: Callable[[drafts.Variant], Made],
    installed: dict[str, str],
    target: Path,
    tmp_path: Path,
) -> None:
    """SGLang's own loader, without the launcher that would have refused before."""
    good = [make_plugin(variant).export for variant in VARIANTS]
    stock = make(drafts.SPREAD[-1]).export  # two layers, one of them with a spare norm
    second = "layers.1.hidden_norm.weight"
    broken = [
        renamed(good[0], tmp_path / "renamed"),
        without_norm(good[0], tmp_path / "without-norm"),
        plugin_drafts.flipped(good[0], tmp_path / "flipped"),
        plugin_drafts.without(good[0], tmp_path / "without-map", "d2t"),
        plugin_drafts.renamed(
            stock,
            tmp_path / "stock-renamed",
            second,
            second.replace("hidden_norm", "input_layernorm"),
        ),
        plugin_drafts.flipped(stock, tmp_path / "stock-flipped"),
    ]
    answer = check_release(target, [*good, stock, *broken], installed, None)
    found = answer["drafts"]
    assert_loads_and_computes({"drafts": found[: len(good)]}, WINDOWS)
    assert found[len(good)] == {
        "error": None,
        "class": "LlamaForCausalLMEagle3",
        "window": None,
        "compared": True,
    }
    errors = [draft["error"] for draft in found[len(good) + 1 :]]
    layer = "model.layers.0.post_attention_layernorm.weight"
    assert f"error[name-dropped] {NORM.replace('post_', 'pre_')}" in errors[0]
    assert f"error[parameter-without-origin] {layer}" in errors[0]
    assert f"error[parameter-without-origin] {layer}" in errors[1]
    assert "error[file-changed]" in errors[2]
    assert "error[parameter-without-origin] d2t" in errors[3]  # draft ids would be ids
    assert f"error[parameter-without-origin] model.{second}" in errors[4]
    assert "error[file-changed]" in errors[5]


@pytest.mark.wide
@pytest.mark.parametrize("release", ["0.5.12", "0.5.17", "0.5.20"])
def test_older_releases_load_and_compute(
    release: str,
    make_plugin: MakePlugin,
    installed: dict[str, str],
    target: Path,
    wheel: Callable[[str], Path],
) -> None:
    exports = [make_plugin(variant).export for variant in VARIANTS]
    answer = check_release(target, exports, installed, wheel(release))
    assert answer["sglang"] == release
    assert_loads_and_computes(answer, WINDOWS)


@pytest.mark.wide
def test_ranks_compare_their_slices(installed: dict[str, str], target: Path) -> None:
    answer = answer_of("shards_check.py", target, environment=installed)
    assert len(answer["right"]) == 4  # two ranks, two dtypes
    assert not any(answer["right"].values())
    # Whether a bias is sliced depends on the layer; every matrix is.
    wrong = {f"file-changed {layer}.weight" for layer in ("qkv", "gate_up", "o_proj")}
    assert wrong <= set(answer["wrong"])


@pytest.mark.wide
@pytest.mark.parametrize("name", ["dflash-mixed", "dflash2", "dspark-rnn"])
def test_stock_block_drafts_start(
    name: str,
    installed: dict[str, str],
    target: Path,
    texts: list[simulate.Continuation],
    prompts: list[list[int]],
    tmp_path: Path,
) -> None:
    variant = next(v for v in blocks.VARIANTS if v.name == name)
    checkpoint, export = tmp_path / "checkpoint", tmp_path / "export"
    blocks.make_checkpoint(variant, target, texts, checkpoint)
    export_draft(checkpoint, export, target)
    flags = blocks.arguments(variant.algorithm)
    environment = installed | {"SPEC_EXPORT_BLOCK_DRAFTS": "1"}
    with PluginEngine(tmp_path / "engine.log", environment) as engine:
        answer = engine.attempt(target, export, prompts[:1], NEW_TOKENS, None, **flags)
        assert "error" not in answer, answer["log"][-3000:]
        assert answer["prompts"][0]["output_ids"] == texts[0].new_tokens
        broken = plugin_drafts.flipped(export, tmp_path / "flipped")
        answer = engine.attempt(target, broken, prompts[:1], NEW_TOKENS, None, **flags)
        assert "error[file-changed]" in answer["error"]


# --- the server as people start it -------------------------------------------------


@pytest.mark.wide
@pytest.mark.parametrize("how", ["entry-point", "external-package"])
def test_http_server(
    how: str,
    make_plugin: MakePlugin,
    installed: dict[str, str],
    target: Path,
    prompts: list[list[int]],
    tmp_path: Path,
) -> None:
    made = make_plugin(DEFAULT)
    environment = dict(installed)
    if how == "external-package":
        package = {"SGLANG_EXTERNAL_MODEL_PACKAGE": "spec_export.serving.models"}
        environment |= PLUGIN_OFF | package
    port, log = free_port(), tmp_path / "server.log"
    url = f"http://127.0.0.1:{port}"
    command = server_command(made.export, target, port)
    with running(command, log, environment, stdout=subprocess.DEVNULL) as process:
        wait_until_up(url, process, log)
        sampling = {
            "temperature": 0,
            "max_new_tokens": NEW_TOKENS,
            "ignore_eos": True,
        }
        body = {"input_ids": prompts[0], "sampling_params": sampling}
        facts = post(f"{url}/generate", body)["meta_info"]
    assert facts["spec_correct_drafts_histogram"] == made.rounds[0].histogram


@pytest.mark.wide
def test_http_server_ends_with_1(
    make_plugin: MakePlugin, installed: dict[str, str], target: Path, tmp_path: Path
) -> None:
    broken = plugin_drafts.flipped(make_plugin(DEFAULT).export, tmp_path / "flipped")
    command = server_command(broken, target, free_port())
    done = subprocess.run(
        command,
        env=sglang_environment() | installed,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 1
    assert done.stderr.rstrip().splitlines()[-1] == "  hint: copy the export again"
    assert "error[file-changed] model.safetensors" in done.stderr


def server_command(export: Path, target: Path, port: int) -> list[str]:
    return [
        *(str(sglang_python()), "-m", "sglang.launch_server"),
        *("--model-path", str(target), *launch_flags(export, target)),
        *(*CPU_FLAGS, "--host", "127.0.0.1", "--port", str(port)),
    ]
