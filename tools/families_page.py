"""docs/families.md, written from the registry: `python tools/families_page.py docs/families.md`, or without a file
to print it. A test compares the page with what this writes."""

from __future__ import annotations

import re
import sys
from pathlib import Path

from opake import planning, registry
from opake.checking import answers

FLAGS = {
    "RoPE": "rope",
    "RMSNorm": "rms_norm",
    "gated MLP": "activation",
    "cross-entropy": "cross_entropy",
    "loss without logits": "fused_linear_cross_entropy",
    "LoRA QKV": "lora_qkv",
    "LoRA MLP": "lora_mlp",
    "experts": "moe",
}

SUFFIX = re.compile(r"(RMSNorm|DecoderLayer|MLP|ForCausalLM|ForConditionalGeneration|Attention|Experts)$")

HEAD = """---
hide: [navigation, toc]
---

# Families

What each family that ships with opake declares, written from the plugins by `make families`. A cell names the classes
of the Transformers model (without its prefix) that take the operation; a dash means that the family leaves it as it is.
Whether a declared operation is used on a given machine, and if not why, is in the report of `apply_model_patches`.

Attention, masks, the batch dimension, the cache, the loss and checkpointing are the core's own, for every family and
for every other causal language model of Transformers.

*Proven on*: the versions of Transformers on which per-example gradients of a tiny random model equal a loop over the
unpatched one, recorded by `python -m opake.checking.sweep` and tried again by the tests; and pretrained weights, where
they were tried too. Classes that take images are proven on text: Transformers counts the placeholders of an image by
reading values, which no transform can do. `opake families check --all` repeats the proof on the installed version.
"""
# pretrained models that the tests and the demo run
REAL = {"llama": "SmolLM2-135M"}


def page() -> str:
    """The whole page as Markdown."""
    ours = [claim for claim in registry.listed() if claim.source == registry.OURS]
    head = ["model_type", "since", *FLAGS, "proven on"]
    lines = [_row(head), _row(["---"] * len(head))]
    lines += [_row([f"`{claim.name}`", *_cells(claim)]) for claim in ours]
    return HEAD + "\n" + "\n".join(lines) + "\n"


def _cells(claim: registry.Claim) -> list[str]:
    family, planned = planning.plan(claim.name)
    cells = ["5.8"]
    since = getattr(family.plugins[0].target, "SINCE", {})
    cells[0] = since.get(claim.name, cells[0])
    for flag in FLAGS.values():
        named = [_site(row.record) for row in planned if getattr(row.record, "flag", None) == flag]
        cells.append(", ".join(dict.fromkeys(named)) or "-")
    return [*cells, _proven(claim.name)]


def _proven(model_type: str) -> str:
    """Where the recorded answers say yes: versions without their patch number."""
    said = [each.transformers for each in answers.load() if model_type in each.types and each.types[model_type].proven]
    tiny = f"tiny: {', '.join(version.rpartition('.')[0] for version in said)}" if said else ""
    return "; ".join(filter(None, (tiny, REAL.get(model_type)))) or "-"


def _site(record: object) -> str:
    cls = getattr(record, "cls", None)
    if not isinstance(cls, type):
        return "yes"
    prefix = cls.__module__.rpartition(".modeling_")[2].replace("_", "")
    name = cls.__name__
    if name.lower().startswith(prefix):
        return name[len(prefix) :]
    # a file whose classes are spelt otherwise than it is
    found = SUFFIX.search(name)
    return found[0] if found else name


def _row(cells: list[str]) -> str:
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    if len(sys.argv) > 1:
        Path(sys.argv[1]).write_text(page(), encoding="utf-8")
    else:
        print(page(), end="")
