"""Fragments of the changelog: `tools/changelog.py --check`, or `tools/changelog.py 0.2.0` to make a section of them.

A fragment is a file `changelog.d/NAME.KIND.md`. At a release all become bullets under their kind in CHANGELOG.md, below
"Unreleased", and the files are removed.
"""

from __future__ import annotations

import datetime
import re
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
KINDS = ("added", "changed", "fixed", "removed")
NAME = re.compile(r"[a-z0-9-]+\.(?P<kind>" + "|".join(KINDS) + r")\.md")


def problems(directory: Path) -> list[str]:
    """What is wrong with the fragments of a directory."""
    found = []
    for file in sorted(directory.iterdir()):
        if file.name == "README.md":
            continue
        if not NAME.fullmatch(file.name):
            found.append(f"{file.name}: name it SHORT-NAME.KIND.md with KIND one of {', '.join(KINDS)}")
        elif not file.read_text(encoding="utf-8").strip():
            found.append(f"{file.name}: empty")
        elif file.read_text(encoding="utf-8").lstrip().startswith(("-", "*", "#")):
            found.append(f"{file.name}: plain sentences, the bullet is added")
    return found


def section(directory: Path, version: str, date: str) -> str:
    """The fragments as a section of the changelog, the kinds in their order."""
    lines = [f"## {version} - {date}"]
    for kind in KINDS:
        texts = [file.read_text(encoding="utf-8").strip() for file in sorted(directory.glob(f"*.{kind}.md"))]
        if texts:
            lines += ["", f"### {kind.capitalize()}", ""]
            lines += ["- " + text.replace("\n", "\n  ") for text in texts]
    return "\n".join(lines) + "\n"


def release(root: Path, version: str, date: str) -> None:
    """Write the section below "Unreleased" and remove the fragments."""
    directory, file = root / "changelog.d", root / "CHANGELOG.md"
    text = file.read_text(encoding="utf-8")
    head = "## Unreleased\n"
    if text.count(head) != 1 or f"## {version}" in text:
        sys.exit(f"{file.name} needs one section 'Unreleased' and none {version!r} yet")
    file.write_text(text.replace(head, f"{head}\n{section(directory, version, date)}"), encoding="utf-8")
    for fragment in directory.glob("*.md"):
        if fragment.name != "README.md":
            fragment.unlink()


def main(arguments: list[str]) -> None:
    wrong = problems(ROOT / "changelog.d")
    if wrong or len(arguments) != 1:
        sys.exit("\n".join(wrong) or __doc__)
    if arguments != ["--check"]:
        release(ROOT, arguments[0], datetime.datetime.now(datetime.UTC).date().isoformat())


if __name__ == "__main__":
    main(sys.argv[1:])
