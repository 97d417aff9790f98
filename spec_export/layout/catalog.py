"""The shipped templates: read, proved and found by draft type or serving class."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import Any

import yaml

from spec_export.layout.data import data_path, read_yaml
from spec_export.layout.inherit import extend
from spec_export.layout.proof import prove_rules
from spec_export.layout.template import Template, TemplateError


def load_template(path: Path) -> Template:
    """Read one template file; to prove it is the caller's next step.

    Raises:
        TemplateError: when it does not parse.
    """
    try:
        return Template.model_validate(read_template(path))
    except (yaml.YAMLError, OSError, ValueError) as exc:
        raise TemplateError(f"{path.name}: {exc}") from exc


def read_template(path: Path) -> dict[str, Any]:
    """What a template says, with what it ``extends`` put in.

    Raises:
        OSError, ValueError, yaml.YAMLError: it cannot be read.
    """
    raw = read_yaml(path)
    if not isinstance(raw, dict):
        raise ValueError("is not a mapping")
    if isinstance(raw.get("extends"), str):
        return extend(read_template(path.with_name(f"{raw['extends']}.yaml")), raw)
    return raw


@lru_cache(maxsize=1)
def _parsed() -> tuple[Template, ...]:
    found = [
        load_template(path)
        for path in sorted(data_path("ckpt_templates").glob("*.yaml"))
        if path.name not in ("targets.yaml", "sglang.yaml")
    ]
    return tuple(sorted(found, key=lambda t: (t.serves.plugin, t.template)))


def template_of_class(architecture: str) -> Template | None:
    """The proved template of this class in a draft's config.json, if there is one."""
    for kind in families():
        for template in templates(kind):
            serves = template.serves
            named = architecture in (serves.architecture, *serves.replaces)
            if named and template.loader:
                return template
    return None


def families() -> list[str]:
    """The speculators draft types that some template takes."""
    return sorted({t.speculators_type for t in _parsed()})


@lru_cache(maxsize=16)
def templates(speculators_type: str) -> tuple[Template, ...]:
    """The templates of one draft type, stock classes before the plug-in's.

    Their rules are proved here; ``proof.prove`` of every shipped one is a test's.

    Raises:
        TemplateError: when a shipped template contradicts itself.
    """
    found = tuple(t for t in _parsed() if t.speculators_type == speculators_type)
    for template in found:
        prove_rules(template)
    return found
