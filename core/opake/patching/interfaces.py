"""The interfaces of Transformers, PEFT and PyTorch that patching stands on, each with a probe.

Asked once a process, when a model or the process is patched for the first time, and by `opake doctor`. What has changed
is named in a warning with what it is needed for; no version is compared. Names inside the modeling file of one family
are not here: a missing one disables the record about it, with a reason in the report.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from opake.errors import ChangedInterfaceWarning


@dataclass(frozen=True, slots=True)
class Interface:
    """`name` is a dotted name; `takes` are parameters that it must have; `needed_for` is what goes without it."""

    name: str
    needed_for: str
    takes: tuple[str, ...] = ()
    # the module part of the name, where it is not all but the last word
    module: str = ""

    def change(self) -> str | None:
        """None if the installed library has it as opake knows it, else what is different."""
        module = self.module or self.name.rpartition(".")[0]
        try:
            found: Any = importlib.import_module(module)
            for part in self.name.removeprefix(f"{module}.").split("."):
                found = getattr(found, part)
        except Exception as error:  # an import may fail in any way
            return f"{self.name} is gone ({type(error).__name__}: {error})"
        if not self.takes:
            return None
        missing = [name for name in self.takes if name not in _parameters(found)]
        return f"{self.name} takes no {', '.join(missing)} any more" if missing else None


def _parameters(fn: Callable[..., object]) -> set[str]:
    return set(inspect.signature(fn).parameters)


MODELS = "transformers.modeling_utils"
LORA = "peft.tuners.lora.layer"

INTERFACES = (
    Interface("transformers.AttentionInterface._global_mapping", "attention (eager_attention)", module="transformers"),
    Interface("transformers.AttentionMaskInterface._global_mapping", "masks (vmap_masking)", module="transformers"),
    Interface(
        "transformers.masking_utils.sdpa_mask", "masks (vmap_masking)", ("q_length", "kv_length", "mask_function")
    ),
    Interface(
        "transformers.masking_utils.find_packed_sequence_indices", "the packed-position check", ("position_ids",)
    ),
    Interface("transformers.integrations.sdpa_attention.sdpa_attention_forward", "attention outside transforms"),
    Interface(f"{MODELS}.PreTrainedModel.loss_function", "the loss of a row (batchify)", module=MODELS),
    Interface(
        "transformers.loss.loss_utils.ForCausalLMLoss",
        "the loss of a row (batchify, cross_entropy)",
        ("logits", "labels", "vocab_size", "num_items_in_batch", "ignore_index", "shift_labels"),
    ),
    Interface("transformers.loss.loss_utils.ForMaskedLMLoss", "the loss of a row (batchify)", ("logits", "labels")),
    Interface(
        f"{MODELS}.PreTrainedModel._set_gradient_checkpointing",
        "checkpointing (vmap_checkpointing)",
        ("enable", "gradient_checkpointing_func"),
        module=MODELS,
    ),
    Interface("transformers.modeling_layers.GradientCheckpointingLayer", "checkpointing (vmap_checkpointing)"),
    Interface("transformers.modeling_rope_utils.ROPE_INIT_FUNCTIONS", "dynamic and longrope tables (batchify)"),
    Interface(
        "transformers.integrations.moe.ExpertsInterface._global_mapping",
        "experts (moe)",
        module="transformers.integrations.moe",
    ),
    Interface("transformers.data.data_collator.DataCollatorMixin", "empty batches (empty_batches)"),
    Interface(f"{LORA}.Linear", "fused LoRA (peft)"),
    Interface(f"{LORA}.LoraLayer.merged_adapters", "fused LoRA (peft)", module=LORA),
    Interface("torch.func.vmap", "per-example gradients"),
    Interface("torch.func.vjp", "per-example gradients"),
    Interface("torch.autograd.Function.vmap", "fused ops under vmap", module="torch.autograd"),
)


def changed(*, with_peft: bool = True) -> dict[str, str]:
    """{what it is needed for: what has changed}, empty if everything is as opake knows it.

    with_peft: also ask PEFT, which means importing it
    """
    found: dict[str, str] = {}
    for interface in INTERFACES:
        change = interface.change() if with_peft or not interface.name.startswith("peft") else None
        if change is not None:
            before = found.get(interface.needed_for)
            found[interface.needed_for] = f"{before}; {change}" if before else change
    return found


def warn_of_changes() -> None:
    """One ChangedInterfaceWarning a process that names everything that has changed; silent where nothing has.

    PEFT is asked when it is in use, and not imported for the question.
    """
    _warn("peft" in sys.modules)


@functools.cache
def _warn(with_peft: bool) -> None:
    found = changed(with_peft=with_peft)
    if found:
        listed = "; ".join(f"{what} (needed for {need})" for need, what in found.items())
        warnings.warn(
            f"an installed library has changed under opake: {listed}. Results that depend on it may be wrong or"
            " missing; run `opake doctor`, and use versions inside the tested range that it prints",
            ChangedInterfaceWarning,
            stacklevel=5,
        )
