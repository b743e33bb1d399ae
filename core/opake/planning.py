"""The plan of a family without a model: its hooks asked with the default config of the model type."""

from __future__ import annotations

import importlib
from typing import Any

from opake import presence, registry
from opake.errors import MissingDependency
from opake.hookcalls import Planned


def plan(model_type: str) -> tuple[registry.Family, list[Planned]]:
    """The family of a model type and its plan, on the default config of the installed Transformers.

    Raises the errors of `registry.load`, FamilyInvalid where a record makes no sense, and MissingDependency where
    Transformers has no such model.
    """
    from opake.patching.asked import require_record

    family = registry.load(model_type)
    planned = family.plan(*modeling(family))
    for entry in planned:
        require_record(entry)
    return family, planned


def modeling(family: registry.Family) -> tuple[Any, Any]:
    """(modeling module, default config) of a family; the module as the patching engine hands it to hooks."""
    name = (
        presence.modeling_module(family.model_type, family.claim.module)
        or _beside_its_config(family.model_type)
        or _of_its_model(family.model_type)
    )
    if name is None:
        needs = [c.status for c in registry.listed() if c.name == family.model_type and c.status.startswith("needs")]
        raise MissingDependency(
            f"the installed Transformers has no modeling module for {family.model_type!r}"
            + (f"; it {needs[0]}" if needs else "; patch a model and print opake.patches.patch_report(model) instead")
        )
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    from opake.hf import ModelingModule

    return ModelingModule(importlib.import_module(name)), CONFIG_MAPPING[family.model_type]()


def _beside_its_config(model_type: str) -> str | None:
    """The modeling module next to the config class, for a model type that shares the directory of another."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    if model_type not in CONFIG_MAPPING:
        return None
    package, _, name = CONFIG_MAPPING[model_type].__module__.rpartition(".")
    dotted = f"{package}.{name.replace('configuration_', 'modeling_', 1)}"
    return dotted if presence.module_file(dotted) else None


def _of_its_model(model_type: str) -> str | None:
    """The modeling module of the causal language model, for a model type with a config and no classes of its own."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

    if model_type not in CONFIG_MAPPING or CONFIG_MAPPING[model_type] not in MODEL_FOR_CAUSAL_LM_MAPPING:
        return None
    return MODEL_FOR_CAUSAL_LM_MAPPING[CONFIG_MAPPING[model_type]].__module__
