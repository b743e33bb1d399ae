"""The text of the demo: Python's own help topics, or a file; cut into rows, a tenth of them held out."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from opake.errors import InputError

Rows = list[dict[str, Any]]
FEWEST = 32


def rows_of(path: Path | None, encode: Callable[[str], list[int]], length: int) -> tuple[Rows, Rows]:
    """(training rows, held-out rows); a row is at most `length` tokens of one paragraph group, in order of the text."""
    paragraphs = [p for p in _read(path).split("\n\n") if p.strip()]
    rows, current = [], []
    for paragraph in paragraphs:
        current = (current + encode(paragraph + "\n\n"))[:length]
        if len(current) >= length // 2:
            rows.append({"input_ids": current})
            current = []
    if len(rows) < FEWEST:
        raise InputError(
            f"the text gives {len(rows)} rows of up to {length} tokens; {FEWEST} are needed, use a longer one"
        )
    return [row for i, row in enumerate(rows) if i % 10], rows[::10]


def _read(path: Path | None) -> str:
    if path is not None:
        return path.read_text(encoding="utf-8", errors="replace")
    from pydoc_data.topics import topics

    return "\n\n".join(topics[name] for name in sorted(topics))
