"""A griffe extension: paragraphs of `name: what it is` in docstrings become lists, so that a page keeps the lines.

Docstrings are written for those who read the source; Markdown would join such lines to one paragraph.
"""

from __future__ import annotations

import re
from typing import Any

import griffe

ENTRY = re.compile(
    r"^(?P<names>\*{0,2}[A-Za-z_][\w.]*(?:(?:, | \| )\*{0,2}[A-Za-z_][\w.]*)*)(?P<of>(?: \([^)]*\))?): (?P<text>\S.*)$"
)
HEADS = ("Raises:", "Returns:", "Arguments:")


class DocstringLists(griffe.Extension):
    """Rewrites the docstring of every object that is loaded."""

    def on_instance(self, *, obj: Any, **_: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = lists(obj.docstring.value)


def lists(text: str) -> str:
    """`text` with its paragraphs of entries as Markdown lists; other paragraphs, and code, as they are."""
    return "\n\n".join(_paragraph(part) for part in text.split("\n\n"))


def _paragraph(text: str) -> str:
    head, _, rest = text.partition("\n")
    if head.strip() in HEADS and rest:
        return f"{head}\n\n" + _entries([line.strip() for line in rest.split("\n")])
    if ENTRY.match(head):
        return _entries([line.strip() for line in text.split("\n")])
    return text


def _entries(lines: list[str]) -> str:
    found = []
    for line in lines:
        entry = ENTRY.match(line)
        names = entry and ", ".join(f"`{name}`" for name in re.split(r", | \| ", entry["names"]))
        found.append(f"- {names}{entry['of']}: {entry['text']}" if entry else f"  {line}")
    return "\n".join(found)
