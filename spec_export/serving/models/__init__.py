"""Model classes for SGLang, found through ``EntryClass`` of each module.

``SGLANG_EXTERNAL_MODEL_PACKAGE=spec_export.serving.models`` names this package;
the entry point in ``spec_export.serving.plugin`` needs no variable.
"""
