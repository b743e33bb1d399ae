"""Is a module there, and what does it say of itself: answered from the disk, without importing anything.

Only the top-level package is looked up (`find_spec` on a dotted name would import its parents); below it a file is
enough. Whether a module that is there also imports is known only to those who import it.
"""

from __future__ import annotations

import ast
import importlib.util
from pathlib import Path


def module_file(name: str) -> Path | None:
    """The source file of a module by its dotted name, or None where there is none."""
    top, *rest = name.split(".")
    try:
        spec = importlib.util.find_spec(top)
    except (ImportError, ValueError):
        return None
    if spec is None:
        return None
    if not rest:
        return Path(spec.origin) if spec.origin and spec.has_location else None
    for root in spec.submodule_search_locations or ():
        stem = Path(root, *rest)
        for candidate in (stem.with_name(stem.name + ".py"), stem / "__init__.py"):
            if candidate.is_file():
                return candidate
    return None


def since(file: Path) -> dict[str, str]:
    """The constant `SINCE` of a family module: the Transformers version in which each of its model types appeared.

    A family writes it as a plain dictionary, e.g. `SINCE = {"mellum": "5.10"}`, only for a model type that is younger
    than the oldest Transformers that opake supports. Raises SyntaxError and UnicodeDecodeError as Python would.
    """
    for node in ast.parse(file.read_text(encoding="utf-8"), filename=str(file)).body:
        if isinstance(node, ast.Assign) and any(isinstance(t, ast.Name) and t.id == "SINCE" for t in node.targets):
            return ast.literal_eval(node.value)
    return {}


def modeling_module(model_type: str, family_module: str) -> str | None:
    """The Transformers modeling module of a model type, if the installed Transformers has it.

    Looked for under the model type's own name, then under the last part of the family's module: model type
    `gemma3_text`, served by `opake_families.gemma3`, lives in `transformers.models.gemma3.modeling_gemma3`.
    """
    for name in (model_type, family_module.partition(":")[0].rpartition(".")[2]):
        dotted = f"transformers.models.{name}.modeling_{name}"
        if module_file(dotted):
            return dotted
    return None
