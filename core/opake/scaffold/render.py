"""The text of the files of a scaffolded distribution: the module, packaging, tests and a page about it."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator

from .declaration import KERNELS, LORA, MOE, Declaration

WIDTH = 118
NOTHING = f"""

@hookimpl
def {KERNELS}():
    # nothing could be proven, and a module without a hook is refused
    return []"""


def module(found: Declaration) -> str:
    """The family module."""
    parts = [_docstring(found), "", _imports(found), *_hooks(found)]
    return "\n".join(parts).rstrip() + "\n"


def _docstring(found: Declaration) -> str:
    head = (
        f'"""{found.model.removesuffix("ForCausalLM")}: every checkpoint that says `model_type: "{found.model_type}"`.'
    )
    if not found.left_out:
        return head + ' Nothing is left out."""'
    left = "\n".join(textwrap.fill(f"- {text}", WIDTH, subsequent_indent="  ") for text in found.left_out)
    return f'{head}\n\nLeft out, because it could not be proven on a tiny model:\n\n{left}\n"""'


def _imports(found: Declaration) -> str:
    names = [*sorted({line.record for line in found.lines}), "hookimpl"]
    one = f"from opake.records import {', '.join(names)}"
    if len(one) <= WIDTH + 2:
        return one
    return "from opake.records import (\n" + "".join(f"    {name},\n" for name in names) + ")"


def _hooks(found: Declaration) -> Iterator[str]:
    if not found.lines:
        yield NOTHING
    for hook in (KERNELS, LORA, MOE):
        lines = [line for line in found.lines if line.hook == hook]
        if not lines:
            continue
        yield f"\n\n@hookimpl\ndef {hook}(hf):"
        for line in lines:
            if line.because:
                yield f"    # {line.because}"
            yield line.code


def pyproject(found: Declaration, distribution: str, opake: str) -> str:
    """Packaging: one module, one entry point."""
    major, minor = opake.split(".")[:2]
    upper = f"{major}.{int(minor) + 1}" if major == "0" else f"{int(major) + 1}"
    return f'''[build-system]
requires = ["hatchling>=1.27"]
build-backend = "hatchling.build"

[project]
name = "{distribution}"
version = "0.1.0"
description = "opake for {found.model_type} models"
readme = "README.md"
requires-python = ">=3.11"
dependencies = ["opake>={major}.{minor},<{upper}"]

[dependency-groups]
test = ["pytest>=8.3"]

[project.entry-points."opake.families"]
{_entry_points(found)}

[tool.hatch.build.targets.wheel]
only-include = ["{found.module}.py"]

[tool.pytest.ini_options]
addopts = ["--import-mode=importlib", "-ra"]
testpaths = ["tests"]
'''


def readme(found: Declaration, distribution: str) -> str:
    """A page that says what the distribution is and how to try it."""
    return f"""# {distribution}

A plugin for [opake](https://pypi.org/project/opake/): the family of every checkpoint that says
`model_type: "{found.model_type}"`. What it declares was measured on a tiny random model by `opake families new`.

    pip install -e .
    opake families show {found.model_type}
    opake families check {found.model_type}
    pytest -m "not slow"
"""


CONFTEST = 'pytest_plugins = "opake.testing"\n'


def test(found: Declaration) -> str:
    """The conformance suite of the family."""
    name = "".join(part.capitalize() for part in found.module.removeprefix("opake_").split("_"))
    attentions = "" if found.attentions == ("sdpa", "eager") else f"    attentions = {found.attentions!r}\n"
    attentions = attentions.replace("'", '"')
    return f'''"""The family passes the suite that opake's own families pass."""

from opake.testing import FamilySuite


class Test{name}(FamilySuite):
    model_type = "{found.model_type}"
{attentions}'''


def _entry_points(found: Declaration) -> str:
    return "\n".join(f'{_key(name)} = "{found.module}"' for name in found.names)


def _key(name: str) -> str:
    return name if name.replace("_", "").replace("-", "").isalnum() else f'"{name}"'
