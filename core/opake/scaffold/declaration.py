"""What a family module will say: lines of its hooks, each with the reason for it, and what is left out and why."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field

KERNELS, LORA, MOE = "opake_kernel_patches", "opake_lora_fusions", "opake_moe_patch"


@dataclass(frozen=True)
class Line:
    """One record: its source text, the flag that switches it, and what was measured."""

    hook: str
    text: str
    flag: str
    because: str = ""

    @property
    def record(self) -> str:
        return self.text.partition("(")[0]

    @property
    def code(self) -> str:
        """The line as it stands in a hook; the one about experts returns its record."""
        return f"    {'return' if self.hook == MOE else 'yield'} {self.text}"


@dataclass
class Declaration:
    """Everything that was found out about one model type.

    asked: the model type that the config of the causal language model says, by which its family is found.
    """

    model_type: str
    asked: str
    model: str
    modeling: str
    attentions: tuple[str, ...]
    lines: list[Line] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)

    def drop(self, lines: Iterable[Line], reason: str) -> None:
        """Leave lines out after all."""
        for line in list(lines):
            self.lines.remove(line)
            self.left_out.append(f"{line.text}: {reason}")

    @property
    def names(self) -> tuple[str, ...]:
        """The entry points: a text model inside a larger config has a model type of its own."""
        return tuple(dict.fromkeys((self.model_type, self.asked)))

    @property
    def module(self) -> str:
        return "opake_" + re.sub(r"\W", "_", self.model_type)
