"""Every shipped template is proved over its grid of configurations."""

from __future__ import annotations

import pytest

from spec_export.layout.catalog import families, templates
from spec_export.layout.data import data_path
from spec_export.layout.proof import prove, prove_rules
from spec_export.layout.template import Template, TemplateError

SHIPPED = [template for kind in families() for template in templates(kind)]


@pytest.mark.parametrize("template", SHIPPED, ids=lambda t: t.template)
def test_it_proves(template: Template) -> None:
    prove(template)


def test_all_files_are_covered() -> None:
    files = {p.stem for p in data_path("ckpt_templates").glob("*.yaml")}
    assert files - {"targets", "sglang"} == {t.template for t in SHIPPED}


def test_what_commands_prove_is_enough_for_rules_that_overlap() -> None:
    twice = SHIPPED[0].model_copy(
        update={"tensors": [*SHIPPED[0].tensors, SHIPPED[0].tensors[0]]}
    )
    with pytest.raises(TemplateError, match="match the same name"):
        prove_rules(twice)
