"""Texts as rows of token ids: one line of a JSONL file, one entry of a data set, or one piece of a plain text.

A row is what privacy protects, so it matters what becomes one: everything that a person contributed should be in it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from opake.demo.text import rows_of
from opake.errors import InputError, MissingDependency

Rows = list[dict[str, Any]]
Encode = Callable[[str], list[int]]


def load(source: str, field: str, encode: Encode, length: int) -> tuple[Rows, Rows]:
    """(training rows, held-out rows), every tenth held out; each cut to `length` tokens.

    source: a .jsonl file, any other text file, or the name of a data set for the package `datasets`
    field: where the text is in a line or an entry

    Raises InputError for lines that are no objects with that field, and MissingDependency without `datasets`.
    """
    path = Path(source)
    if path.is_file() and path.suffix != ".jsonl":
        return rows_of(path, encode, length)
    texts = _lines(path, field) if path.is_file() else _entries(source, field)
    rows = [{"input_ids": ids[:length]} for ids in map(encode, texts) if ids]
    if len(rows) < 10:
        raise InputError(f"{source} has {len(rows)} rows with text; 10 are needed")
    return [row for i, row in enumerate(rows) if i % 10], rows[::10]


def _lines(path: Path, field: str) -> Iterator[str]:
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except UnicodeDecodeError as error:
        raise InputError(f"{path} is not text in UTF-8: {error}") from error
    for number, line in enumerate(lines, 1):
        if line.strip():
            yield _text(_parsed(line), field, f"{path}:{number}")


def _parsed(line: str) -> Any:
    try:
        return json.loads(line)
    except ValueError:
        return None


def _entries(name: str, field: str) -> Iterable[str]:
    try:
        from datasets import load_dataset  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise MissingDependency(
            f"{name} is no file, and names of data sets need the package datasets: pip install datasets"
        ) from error
    entries = load_dataset(name, split="train")
    return (_text(entry, field, f"{name}[{number}]") for number, entry in enumerate(entries))


def _text(entry: Any, field: str, where: str) -> str:
    value = entry.get(field) if isinstance(entry, dict) else None
    if not isinstance(value, str):
        known = ", ".join(entry) if isinstance(entry, dict) else type(entry).__name__
        raise InputError(f"{where}: no text in the field {field!r}, only {known}; name another with --field")
    return value
