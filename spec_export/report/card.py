"""The model card: the manifest for a person, in Hugging Face's form."""

from __future__ import annotations

from huggingface_hub import ModelCardData
from jinja2 import Environment

from spec_export.artifact.manifest import Manifest
from spec_export.report.screen import acceptance_text, legs, roles

CARD_NAME = "README.md"
# In every card of ours, and in nobody else's.
_OURS = b"exported for\nSGLang by spec-export"

_TEMPLATE = """---
{{ data }}
---

# {{ algorithm }} draft for {{ target }}

A draft model for speculative decoding, trained with speculators and exported for
SGLang by spec-export. It drafts for **{{ target }}** and for no other target.

| | |
|---|---|
| SGLang | >= {{ serving.min_version }} ({{ serving.reasons | join("; ") }}) |
| class | `{{ serving.architecture }}` |
{% if serving.requires_plugin %}| plug-in | `pip install spec-export` on the server |
{% endif -%}
| status | {{ manifest.status }} |
| comparison | {% for name, leg in legs -%}
{{ name }}: {{ leg.verdict }}{% if leg.prompts %} (SGLang {{ leg.sglang }}){% endif -%}
{{ ", " if not loop.last }}{% endfor %} |
{% if accepted %}| acceptance length | {{ accepted }} |
{% endif %}
## Serve

```
{{ command }}
```
{% for note in serving.notes %}
- {{ note }}
{%- endfor %}

Check the folder first: `spec-export verify . --target PATH_OF_{{ word }}`

## What was trained

| role | tensors |
|---|---|
{% for role, names in roles.items() -%}
| {{ role }} | {{ names | join(", ") }} |
{% endfor %}
{% for p in manifest.provided_by_target -%}
- `{{ p.name }}` comes from the target at serving time.
{% endfor %}
{%- if manifest.deviations %}
## Accepted deviations

{% for d in manifest.deviations -%}
- **{{ d.code }}**: {{ d.detail }}
{% endfor %}
{%- endif %}
Everything else is in `spec_export_manifest.json`.
"""


def is_ours(card: bytes) -> bool:
    """Whether a card was made here, and may be made anew."""
    return _OURS in card


def model_card(manifest: Manifest) -> str:
    """Markdown with front matter, made from the manifest alone."""
    target = manifest.target_model.name or "the target of its training"
    data = ModelCardData(
        library_name="sglang",
        base_model=manifest.target_model.name,
        base_model_relation="adapter" if manifest.target_model.name else None,
        tags=["speculative-decoding", "speculators", "sglang", "spec-export"],
        pipeline_tag="text-generation",
    )
    words = {"{draft}": ".", "{target}": manifest.target_model.name or "TARGET"}
    command = " ".join(
        ["python -m sglang.launch_server --model-path", words["{target}"]]
        + [words.get(a, a) for a in manifest.serving.launch]
    )
    environment = Environment(trim_blocks=False, autoescape=False)
    return (
        environment.from_string(_TEMPLATE).render(
            data=data.to_yaml(),
            algorithm=manifest.serving.algorithm,
            target=target,
            word="THE_TARGET",
            serving=manifest.serving,
            manifest=manifest,
            legs=legs(manifest),
            command=command,
            roles=roles(manifest),
            accepted=acceptance_text(manifest),
        )
        + "\n"
    )
