"""Which parts of a model are rematerialised: every k-th layer, its attention or its MLP; kept inputs on the CPU or not.

A plain `gradient_checkpointing_enable()` rematerialises every layer: one more forward, and the least memory. A policy
lies between that and nothing. It works in ordinary training as well, by torch's own checkpointing. Leaves out choosing:
`opake bench memory` shows what a step keeps.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any

import torch
from torch import nn
from torch.autograd import graph
from torch.utils.checkpoint import checkpoint

from opake import hf
from opake.checkpoint.guard import RematCheckpoint
from opake.checkpoint.model import FUNCTION
from opake.errors import InputError, OptionTypeError
from opake.lora.mlp import REMATERIALISE, rematerialises
from opake.patching.instance import wrap_method
from opake.patching.undo import Change, Undo, put

PARTS = ("layer", "attention", "mlp")
# what Transformers calls the feed-forward part of a layer, sparse ones too
_MLP_NAMES = re.compile("mlp|feed_?forward|ffn|moe")


class Selected:
    """The policy in force; `undo()`, or leaving a `with` block, takes it back. `sites`: the names of what it covers."""

    def __init__(self, undo: Undo, sites: tuple[str, ...]) -> None:
        self._undo: Undo | None = undo
        self.sites = sites

    def undo(self) -> None:
        """Everything as it was; a second call does nothing."""
        undo, self._undo = self._undo, None
        if undo is not None:
            undo()

    def __enter__(self) -> Selected:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.undo()


def selective_checkpointing(
    model: nn.Module, *, every: int = 1, part: str = "layer", save_on_cpu: bool = False
) -> Selected:
    """Rematerialise the chosen parts of `model` in training, inside and outside transforms.

    every: k rematerialises the layers 0, k, 2 k, ... and lets the others keep what they compute
    part: "layer"; "attention" to recompute the attention of a layer alone and keep its MLP; "mlp" for the other way
        round, which costs a fused MLP with LoRA its gate and up projections alone
    save_on_cpu: what flows into a rematerialised part waits for the backward in the CPU's memory

    A policy takes the place of whatever checkpointing the model had until it is undone; apply it after
    `apply_model_patches`. Raises InputError where the model has no such parts, or every < 1.

    The method is that of Chen et al. 2016, "Training Deep Nets with Sublinear Memory Cost".
    """
    if isinstance(every, bool) or not isinstance(every, int):
        raise OptionTypeError(f"every is a number of layers, got {every!r} ({type(every).__name__})")
    if every < 1 or part not in PARTS:
        raise InputError(f"every={every!r}, part={part!r}: every is at least 1, and part one of {', '.join(PARTS)}")
    layers = [(name, m) for name, m in model.named_modules() if hf.is_checkpointing_layer(m)]
    if not layers:
        raise InputError(f"{type(model).__name__} has no layers that Transformers can checkpoint")
    run = RematCheckpoint(_offloading if save_on_cpu else functools.partial(checkpoint, use_reentrant=False))
    changes: list[Change] = []
    sites: list[str] = []
    for i, (name, layer) in enumerate(layers):
        chosen = i % every == 0
        changes.append(put(layer, "gradient_checkpointing", chosen and part == "layer"))
        if chosen and part == "layer":
            changes.append(put(layer, FUNCTION, run))
            sites.append(name)
        elif chosen:
            for below, module in _attention_of(layer) if part == "attention" else _mlps_of(layer):
                if part == "mlp" and not save_on_cpu:
                    changes.append(put(module, REMATERIALISE, True))
                changes.append(wrap_method(module, "forward", _Around(run)))
                # the batched engine asks whose forwards a model has
                changes[-1].ours.__func__.opake_policy = True
                sites.append(f"{name}.{below}")
    if not sites:
        missing = "attention that takes its function by name" if part == "attention" else "an MLP of its own"
        raise InputError(f"no layer of {type(model).__name__} has {missing}; part='layer' takes any")
    return Selected(Undo(changes), tuple(sites))


class _Around:
    """Calls a method through a checkpointing function, where there is something to checkpoint."""

    def __init__(self, run: Callable[..., Any]) -> None:
        self.run = run

    def __call__(self, inner: Callable[..., Any], self_: nn.Module, *args: Any, **kwargs: Any) -> Any:
        caches = any(kwargs.get(name) is not None for name in hf.CACHE_KEYWORDS)
        if not self_.training or not torch.is_grad_enabled() or caches or _by_itself(self_, args, kwargs):
            return inner(self_, *args, **kwargs)
        return self.run(functools.partial(inner, self_, **kwargs), *args)


def _by_itself(module: nn.Module, args: tuple[Any, ...], rest: Mapping[str, Any]) -> bool:
    """Whether a fused op will keep its input alone."""
    return REMATERIALISE in vars(module) and len(args) == 1 and not rest and rematerialises(module, args[0])


def _offloading(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    with graph.save_on_cpu(pin_memory=torch.cuda.is_available()):
        return checkpoint(function, *args, use_reentrant=False, **kwargs)


def _attention_of(layer: nn.Module) -> list[tuple[str, nn.Module]]:
    from opake.attention.windows import reads_attention

    return [(name, module) for name, module in layer.named_modules() if reads_attention(module)]


def _mlps_of(layer: nn.Module) -> list[tuple[str, nn.Module]]:
    """The children so named, but for lone linear layers, whose product alone would be computed again."""
    children = ((name, m) for name, m in layer.named_children() if _MLP_NAMES.search(name))
    return [(name, m) for name, m in children if next(m.children(), None) is not None]
