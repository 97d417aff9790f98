"""The real HTTP server, started the ordinary way, gives the numbers of the engine."""

from __future__ import annotations

import json
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.serving.conftest import Made
from tests.serving.drafts import SPREAD, Variant
from tests.serving.sglang_process import end_of, running, sglang_python
from tests.serving.simulate import NEW_TOKENS, Continuation

CPU_FLAGS = [
    *("--device", "cpu", "--dtype", "float32", "--context-length", "512"),
    *("--attention-backend", "torch_native"),
    *("--prefill-attention-backend", "intel_amx"),
    *("--decode-attention-backend", "intel_amx"),
    *("--disable-cuda-graph", "--skip-tokenizer-init", "--log-level", "error"),
    *("--max-total-tokens", "8192", "--max-running-requests", "8"),
]
START_SECONDS = 200


def launch_flags(export: Path, target: Path) -> list[str]:
    """The flags of the launch line in the export's manifest, placeholders filled."""
    manifest = json.loads((export / "spec_export_manifest.json").read_text())
    places = {"draft": str(export), "target": str(target)}
    return [word.format(**places) for word in manifest["serving"]["launch"]]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def post(url: str, body: dict[str, Any]) -> dict[str, Any]:
    request = urllib.request.Request(
        url, json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=60) as answer:
        return json.load(answer)


def wait_until_up(url: str, process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline:
        if process.poll() is not None:
            pytest.fail(f"the server ended: {process.returncode}\n{end_of(log)}")
        try:
            with urllib.request.urlopen(f"{url}/health", timeout=5):
                return
        except (urllib.error.URLError, TimeoutError, ConnectionError):
            time.sleep(0.5)
    pytest.fail(f"the server is not up after {START_SECONDS} s\n{end_of(log)}")


def test_http_server_matches_simulation(
    make: Callable[[Variant], Made],
    target: Path,
    texts: list[Continuation],
    prompts: list[list[int]],
    tmp_path: Path,
) -> None:
    made = make(SPREAD[-1])
    port, log = free_port(), tmp_path / "server.log"
    url = f"http://127.0.0.1:{port}"
    command = [
        *(str(sglang_python()), "-m", "sglang.launch_server"),
        *("--model-path", str(target), *launch_flags(made.export, target)),
        *(*CPU_FLAGS, "--host", "127.0.0.1", "--port", str(port)),
    ]
    with running(command, log, stdout=subprocess.DEVNULL) as server:
        wait_until_up(url, server, log)
        answer = post(
            f"{url}/generate",
            {
                "input_ids": prompts[0],
                "sampling_params": {
                    "temperature": 0,
                    "max_new_tokens": NEW_TOKENS,
                    "ignore_eos": True,
                },
            },
        )
    assert answer["output_ids"] == texts[0].new_tokens
    facts = answer["meta_info"]
    assert facts["spec_verify_ct"] == len(made.rounds[0].accepted)
    assert facts["spec_correct_drafts_histogram"] == made.rounds[0].histogram
