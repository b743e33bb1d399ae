"""`apply_lora`: adapters on a model, and what follows from them: freezing, switching off, merging, taking off.

The model is changed in place and stays of its class. Plain attributes of other modules are not touched; what was there
is kept, so that `remove_lora` gives the very layers back.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

import torch
from torch import nn
from torch.nn.parameter import UninitializedParameter

from opake import hf
from opake.errors import InputError, PatchError, UnsupportedModel
from opake.patching.state import state_of

from . import input_grads
from .layers import is_lora
from .merging import merge_into, require_mergeable
from .plan import Choices, Step, make_plan
from .targets import Target, as_patterns, as_targets
from .wrapper import AdapterWrapper

Model = TypeVar("Model", bound=nn.Module)
_KEY = "_opake_lora"


@dataclass(slots=True)
class Applied:
    """What to put back: parameters that were trainable, hooks that were placed."""

    trainable: list[nn.Parameter] = field(default_factory=list)
    hooks: list[tuple[nn.Module, int]] = field(default_factory=list)


def apply_lora(
    model: Model,
    targets: Target | Sequence[Target] = "all-linear",
    dim: int = 8,
    alpha: float = 32,
    dropout: float = 0.0,
    dropout_position: Literal["pre", "post"] = "pre",
    lora_A_init_method: Literal["xavier", "uniform"] = "xavier",
    lora_dtype: torch.dtype | None = None,
    *,
    exclude: Target | Sequence[Target] = (),
    dim_pattern: Mapping[Target, int] | None = None,
    alpha_pattern: Mapping[Target, float] | None = None,
    canonical: bool = False,
) -> Model:
    """Freeze a model and put an adapter on every layer that is named; returns the same model.

    targets: names, name endings (`"q_proj"`), wildcards (`"*.layers.0.*.q_proj"`), compiled patterns, which must match
        the whole name, or `"all-linear"`: every linear layer, quantised ones too, but the head and routers
    dim, alpha, dropout, dropout_position, lora_A_init_method, lora_dtype: as of `LinearAdapter`
    exclude: layers to leave out, by names, endings, wildcards or patterns
    dim_pattern, alpha_pattern: other values for the layers that such a key names; the first that fits holds
    canonical: a combined layer gets an adapter for each of its parts, which targets may name as if they stood alone

    Linear layers become `LoRALinear`, routers `LoRATopKRouter`. Where a checkpointed model has a frozen embedding, its
    output is made to require a gradient, so that adapters get theirs. May be called again for other layers.

    Raises:
        InputError: a target or exclusion that names nothing, a key of a pattern from which no layer takes its value, or
            a layer that cannot take an adapter; a choice that does not exist.
        UnsupportedModel: a PEFT model or another wrapper; a model that is patched already. Nothing is changed then.
    """
    _require_bare(model)
    require_switch("canonical", canonical)
    rest = {
        "dropout": dropout,
        "dropout_position": dropout_position,
        "lora_A_init_method": lora_A_init_method,
        "lora_dtype": lora_dtype,
    }
    patterns = as_patterns(dim_pattern, "dim_pattern"), as_patterns(alpha_pattern, "alpha_pattern")
    choices = Choices(dim, alpha, *patterns, rest)
    install(model, make_plan(model, as_targets(targets, "targets"), as_targets(exclude, "exclude"), choices, canonical))
    return model


def require_switch(name: str, value: Any) -> None:
    """Raise InputError unless an option is True or False."""
    if not isinstance(value, bool):
        raise InputError(f"{name}={value!r} is a {type(value).__name__}; it takes True or False")


def install(model: nn.Module, steps: Sequence[Step]) -> dict[str, AdapterWrapper]:
    """Carry a plan out: make every adapter, then put them all in place and freeze the rest. The wrappers by name."""
    made: dict[int, AdapterWrapper] = {}
    for step in steps:
        if id(step.module) not in made:
            made[id(step.module)] = step.build()
    state: Applied = vars(model).setdefault(_KEY, Applied())
    adapters = {id(p) for w in (*wrappers(model).values(), *made.values()) for p in w.adapter.parameters()}
    for parameter in model.parameters():
        if id(parameter) not in adapters and parameter.requires_grad:
            state.trainable.append(parameter)
            parameter.requires_grad_(False)
    for owner, key, child in _places(model):
        if id(child) in made:
            owner._modules[key] = made[id(child)]
    if not state.hooks:
        state.hooks = input_grads.install(model)
    return {step.name: made[id(step.module)] for step in steps}


def wrappers(model: nn.Module) -> dict[str, AdapterWrapper]:
    """Every layer of the model with an adapter of ours, by name."""
    if not isinstance(model, nn.Module):
        raise UnsupportedModel(f"expected a model (an nn.Module), got {type(model).__name__}: {model!r:.80}")
    return {name: module for name, module in model.named_modules() if isinstance(module, AdapterWrapper)}


@contextlib.contextmanager
def disable_adapter(model: nn.Module) -> Iterator[None]:
    """For the length of a `with` block the model computes what it computed without adapters, bit for bit.

    A copy made inside the block has its adapters enabled. Raises UnsupportedModel where all adapters are PEFT's.
    """
    enabled = [wrapper for wrapper in _ours(model).values() if wrapper._adapter_enabled]
    for wrapper in enabled:
        wrapper.pause_adapter()
    try:
        yield
    finally:
        for wrapper in enabled:
            wrapper.enable_adapter_layers()


def remove_lora(model: Model) -> Model:
    """Take every adapter off; the layers are those from before, and what was trainable is so again.

    Raises UnsupportedModel for a model that is patched, or has PEFT's adapters alone.
    """
    _ours(model)
    _require_unpatched(model)
    for owner, key, child in list(_places(model)):
        if isinstance(child, AdapterWrapper):
            owner._modules[key] = child.to_wrap
    for module in model.modules():
        # adapters may have been put on a part of the model
        state: Applied | None = vars(module).pop(_KEY, None)
        if state is not None:
            input_grads.uninstall(state.hooks)
            for parameter in state.trainable:
                parameter.requires_grad_(True)
    return model


def merge_lora(model: Model) -> Model:
    """Add every adapter to the weight beside it and take it off.

    Raises:
        PatchError: a weight that cannot take the sum: quantised, or shared with a layer that has no adapter. Nothing is
            changed then.
    """
    found = _ours(model)
    _require_unpatched(model)
    if not found:
        raise PatchError(f"{type(model).__name__} has no adapters of opake.lora to merge; apply_lora puts them on")
    for name, wrapper in found.items():
        require_mergeable(model, name, wrapper)
    for wrapper in found.values():
        merge_into(wrapper)
    return remove_lora(model)


def _ours(model: nn.Module) -> dict[str, AdapterWrapper]:
    """`wrappers`, but for a model that has adapters, and all of them PEFT's."""
    found = wrappers(model)
    if not found and any(is_lora(module) for module in model.modules()):
        raise UnsupportedModel(
            f"the adapters of this {type(model).__name__} are PEFT's; use its own model.disable_adapter(), "
            "model.unload() or model.merge_and_unload()"
        )
    return found


def _places(model: nn.Module) -> Iterator[tuple[nn.Module, str, nn.Module]]:
    """(owner, key, child) of every submodule, shared ones at each place; nothing inside a wrapper's adapter."""
    for owner in list(model.modules()):
        if not isinstance(owner, AdapterWrapper):
            yield from ((owner, key, child) for key, child in owner._modules.items() if child is not None)


def _require_bare(model: Any) -> None:
    if not isinstance(model, nn.Module):
        raise UnsupportedModel(f"expected a model (an nn.Module), got {type(model).__name__}: {model!r:.80}")
    inner = hf.wrapped(model)
    if inner is not None and inner is not model:
        raise UnsupportedModel(
            f"{type(model).__name__} wraps a {type(inner).__name__}; put adapters on the model inside, before it is "
            "wrapped (merge_and_unload() takes PEFT's adapters off)"
        )
    lazy = next((name for name, p in model.named_parameters() if isinstance(p, UninitializedParameter)), None)
    if lazy is not None:
        raise InputError(f"{lazy} has no shape before the first forward of {type(model).__name__}; run one first")
    _require_unpatched(model)


def _require_unpatched(model: nn.Module) -> None:
    if state_of(model) is not None:
        raise UnsupportedModel(
            f"{type(model).__name__} is patched, and its patches hold on to the layers that would be replaced; "
            "call opake.patches.restore(model) first, and patch it again afterwards"
        )
