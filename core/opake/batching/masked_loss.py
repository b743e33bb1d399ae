"""The loss of models that select the tokens of the mask by indexing, which has no fixed shape and no transform runs.

Inside transforms such a model is asked for its logits alone, and the loss of the row is computed here over the same
tokens: those whose mask and whose label say so. Older Transformers has it in `Gemma3ForConditionalGeneration`; what
calls `loss_function` is served by `batching.loss`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from opake import hf
from opake.patching.instance import layers, wrap_method
from opake.patching.undo import Change
from opake.transforms import inside_transform

from .loss import row_mean

# what the forwards that do so call the tokens that are left
LOCALS = {"shift_logits", "shift_labels", "shift_attention_mask"}


def selects_tokens(cls: type[nn.Module]) -> bool:
    """Whether the forward of a model class computes its loss over tokens selected by the mask."""
    return any({*layer.__code__.co_varnames} >= LOCALS for layer in layers(cls.forward))


def apply(model: nn.Module) -> list[Change]:
    """The changes that serve such a model; none for any other."""
    return [wrap_method(model, "forward", _forward)] if selects_tokens(type(model)) else []


def _forward(inner: Callable[..., Any], self: nn.Module, *args: Any, **kwargs: Any) -> Any:
    names = hf.positional_names(type(self).forward) if args else ()
    kwargs = {**dict(zip(names, args, strict=False)), **kwargs}
    labels, mask = kwargs.get("labels"), kwargs.get("attention_mask")
    if not inside_transform() or labels is None or (mask is not None and mask.dim() != 2):
        return inner(self, **kwargs)
    out = inner(self, **{**kwargs, "labels": None, "return_dict": True})
    if mask is not None:
        labels = labels.masked_fill(mask[:, -labels.shape[1] :] == 0, -100)
    loss = row_mean(out["logits"][..., :-1, :], labels[..., 1:])
    wants_tuple = kwargs.get("return_dict") is False
    return (loss, *out.to_tuple()) if wants_tuple else type(out)(**{**out, "loss": loss})
