"""`apply_lora_kernel_patches`: axolotl's switches turned into records, applied to one model and reported."""

from __future__ import annotations

import warnings
from dataclasses import replace
from typing import Any

from torch import nn

from opake.errors import InputError, NotFusedWarning, SeveralAdapters, UnsupportedModel, UnsupportedModelType
from opake.patching import notes
from opake.patching.chosen import apply_records
from opake.patching.report import PatchReport, Row
from opake.patching.target import locate
from opake.records import Record
from opake.registry import Planned

from . import sites
from .obstacles import way_out
from .records import (
    KEY,
    ApplyMethods,
    Holder,
    KernelEmbedding,
    KernelMLP,
    KernelProjection,
    KernelQKV,
    Kernels,
)
from .settings import switches

SOURCE = "opake.lora.axolotl"
# projections first: a group is put over them, and is what runs where it can
RECORDS: dict[str, tuple[Record, ...]] = {
    "lora_qkv_kernel": (KernelProjection(kind="qkv"), KernelQKV()),
    "lora_o_kernel": (KernelProjection(kind="o"),),
    "lora_mlp_kernel": (KernelProjection(kind="mlp"), KernelMLP()),
    "lora_embedding_kernel": (KernelEmbedding(),),
}


def apply_lora_kernel_patches(model: Any, cfg: Any) -> Any:
    """Compute the LoRA layers of a PEFT model by fused ops, as far as the config says; returns the same model.

    model: a PeftModelForCausalLM
    cfg: a mapping or an object with the switches lora_mlp_kernel, lora_qkv_kernel, lora_o_kernel and
        lora_embedding_kernel; what is absent is off

    Only this model changes. A layer that cannot be fused keeps PEFT's forward; a warning and `kernel_report(model)` say
    why. `restore(model)` takes everything back. Calling it again adds what is switched on besides.

    Raises:
        UnsupportedModel (a TypeError): not a PeftModelForCausalLM.
        SeveralAdapters (an AssertionError): more than one adapter is active.
        UnsupportedModelType (a NotImplementedError): a model without a stack of decoder layers.
        OptionTypeError (a TypeError): a switch that is no bool. Nothing has changed then.
    """
    _require_peft(model)
    active = model.active_adapters
    if len(active) != 1:
        raise SeveralAdapters(
            f"one active adapter is fused, and {len(active)} are active: {', '.join(active)}; "
            "choose one with model.set_adapter(name)"
        )
    wanted = [key for key, on in switches(cfg).items() if on]
    inner = locate(model).model
    _require_layers(inner)
    if wanted:
        _patch(inner, wanted)
    return model


def kernel_report(model: nn.Module) -> PatchReport | None:
    """What `apply_lora_kernel_patches` did to a model, with the run-time fall-backs so far; None if nothing."""
    inner = locate(model).model
    holder: Holder | None = vars(inner).get(KEY)
    if holder is None or holder.report is None:
        return None
    return replace(holder.report, fallbacks=notes.collect(inner))


def _patch(inner: nn.Module, wanted: list[str]) -> None:
    planned = [Planned(Kernels(), SOURCE, SOURCE, SOURCE)]
    planned += [Planned(record, key, SOURCE, SOURCE) for key in wanted for record in RECORDS[key]]
    if {"lora_qkv_kernel", "lora_o_kernel"} & set(wanted):
        planned.append(Planned(ApplyMethods(), SOURCE, SOURCE, SOURCE))
    report = apply_records(inner, planned)
    holder: Holder = vars(inner)[KEY]
    rows = [row for row in report.rows if row.hook != SOURCE]
    older = () if holder.report is None else [row for row in holder.report.rows if row.hook not in wanted]
    holder.report = PatchReport(report.target, report.family, (*older, *rows))
    for key in wanted:
        _warn(key, [row for row in rows if row.hook == key])


def _warn(key: str, rows: list[Row]) -> None:
    """One warning for each reason why a layer with an adapter is not fused, and one if nothing is."""
    reasons: dict[str, list[str]] = {}
    for row in rows:
        if row.state in ("skipped", "stock") and "no LoRA adapter" not in row.reason and row.site != "-":
            # a group is kept back by the reason of one of its members, whose name stands in front
            reasons.setdefault(row.reason.rpartition(": ")[2], []).append(row.site)
    for reason, names in reasons.items():
        others = f" and {len(names) - 1} more" if len(names) > 1 else ""
        text = f"{key}: {names[0]}{others} is not fused: {reason}{way_out(reason)}"
        warnings.warn(text, NotFusedWarning, stacklevel=4)
    if not reasons and not any(row.state in ("applied", "already") for row in rows):
        text = f"{key}: nothing to fuse, no layer of this kind has a LoRA adapter; see target_modules of the LoraConfig"
        warnings.warn(text, NotFusedWarning, stacklevel=4)


def _require_peft(model: Any) -> None:
    from peft import PeftModelForCausalLM

    if not isinstance(model, PeftModelForCausalLM):
        raise UnsupportedModel(
            f"Model must be a PeftModelForCausalLM, got {type(model).__name__}; use get_peft_model with "
            'task_type="CAUSAL_LM", or opake.patches.apply_model_patches, which takes any model'
        )
    from peft import LoraConfig

    for name in model.active_adapters:
        config = model.peft_config.get(name)
        if config is not None and not isinstance(config, LoraConfig):
            raise InputError(f"adapter {name!r} is a {type(config).__name__}; these kernels are for LoraConfig")


def _require_layers(inner: nn.Module) -> None:
    if next(sites.modules(inner), None) is None:
        kind = getattr(getattr(inner, "config", None), "model_type", type(inner).__name__)
        raise UnsupportedModelType(
            f"Model type {kind} is not supported: {type(inner).__name__} has no stack of decoder layers; "
            "opake.patches.apply_model_patches(model) fuses every LoRA projection wherever it stands"
        )
