"""What runs inside SGLang's environment: SGLang and the standard library, nothing else.

Executed by its path, with the files of a job and of its answer as arguments; SGLang's
own processes import it again, so nothing happens at import.

Jobs:
    {"do": "examine"} -> {"version", "devices", "plugin"}
    {"do": "serve", "argv": [...], "prompts": [[id, ...]], "new_tokens": n,
     "counts": {"rounds": name, "histogram": name}}
        -> {"prompts": [{"output_ids", "rounds", "histogram"}]}
        ``argv`` is what stands behind ``python -m sglang.launch_server``.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
from contextlib import suppress
from importlib import import_module, metadata
from pathlib import Path
from typing import Any

PLUGINS = "sglang.srt.plugins"


def end_with_asker() -> None:
    """End, with all that was started here, once nobody waits for an answer.

    Who asked holds the other end of stdin; if it is killed, that end is closed.
    """

    def wait() -> None:
        while os.read(0, 1):
            pass
        os.killpg(os.getpid(), signal.SIGKILL)

    threading.Thread(target=wait, daemon=True).start()


def examine(job: dict[str, Any]) -> dict[str, Any]:
    """The release, the devices it can use here, whether our package is beside it."""
    version = metadata.version("sglang")
    plugins = metadata.entry_points(group=PLUGINS)
    import torch

    devices = ["cuda"] if torch.cuda.is_available() else []
    with suppress(Exception):  # a build for another device, or none at all
        import_module("sgl_kernel")
    if hasattr(torch.ops.sgl_kernel, "extend_attention_cpu"):
        devices.append("cpu")
    ours = any(entry.value.startswith("spec_export.") for entry in plugins)
    return {"version": version, "devices": devices, "plugin": ours}


def serve(job: dict[str, Any]) -> dict[str, Any]:
    """Start the engine from a command line and let it continue prompts greedily."""
    import sglang
    from sglang.srt.server_args import prepare_server_args

    engine = sglang.Engine(server_args=prepare_server_args(job["argv"]))
    outputs = engine.generate(
        input_ids=job["prompts"],
        sampling_params={
            "temperature": 0,
            "max_new_tokens": job["new_tokens"],
            "ignore_eos": True,
        },
    )
    engine.shutdown()
    return {"prompts": [_counted(output, job["counts"]) for output in outputs]}


def _counted(output: dict[str, Any], counts: dict[str, str]) -> dict[str, Any]:
    about = output["meta_info"]
    return {
        "output_ids": list(output["output_ids"]),
        **{ours: about.get(name) for ours, name in counts.items()},
    }


JOBS = {"examine": examine, "serve": serve}

if __name__ == "__main__":
    end_with_asker()
    # As PYTHONSAFEPATH, which Python 3.10 does not know.
    sys.path[:] = [p for p in sys.path if Path(p) != Path(__file__).parent]
    asked = json.loads(Path(sys.argv[1]).read_text())
    answer = json.dumps(JOBS[asked["do"]](asked))
    Path(sys.argv[2]).write_text(answer)
