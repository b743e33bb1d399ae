"""A model forward that takes rows as vmap hands them out, (T,), beside the usual (B, T).

A call is *stripped* when its token ids have one dimension (or its embeddings two): every row tensor then gets a batch
dimension of one, and the outputs lose it again. Inside a transform no KV cache is allocated. Bad input is refused
before the model runs. Nothing here looks at the contents of a tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, MutableMapping
from typing import Any

import torch
from torch import nn

from opake import hf
from opake.errors import InputError, PatchError
from opake.masks.packed import counted_by_the_model
from opake.patching.instance import wrap_method
from opake.patching.notes import note
from opake.patching.runtime import runtime_has
from opake.patching.undo import Skip, Undo
from opake.transforms import inside_transform, is_mapped

from .check import check_rows

MAIN = ("input_ids", "inputs_embeds")
# arguments that have no batch dimension to begin with
UNBATCHED = frozenset({"num_items_in_batch", "cache_position", "logits_to_keep"})
# outputs of shape (B * T, ...): there is no batch dimension to take away
FLAT_OUTPUTS = frozenset({"router_logits", "loss", "aux_loss"})


def fits(module: nn.Module) -> Skip | None:
    if any(hf.accepts(type(module).forward, name) for name in MAIN):
        return None
    return Skip(f"{type(module).__name__}.forward names neither input_ids nor inputs_embeds and passes them on")


def apply(module: nn.Module) -> Undo:
    return Undo([wrap_method(module, "forward", _forward)])


def _forward(inner: Callable[..., Any], self: nn.Module, *args: Any, **kwargs: Any) -> Any:
    kwargs = _named(type(self).forward, args, kwargs)
    stripped = _is_stripped(kwargs)
    if stripped:
        kwargs = {name: _add(name, value) for name, value in kwargs.items()}
    check_rows(self, kwargs)
    if inside_transform():
        _require_selection(self)
        _without_packing(self, kwargs)
        _without_cache(self, kwargs)
        if kwargs.get("num_items_in_batch") is not None:
            note(self, "num_items_in_batch is not used inside transforms: a row is normalised by its own labels")
    with counted_by_the_model(kwargs.get("position_ids") is None):
        out = inner(self, **kwargs)
    return _remove(out) if stripped else out


def _require_selection(self: nn.Module) -> None:
    """Refuse a model whose attention was selected anew since: stock masks read their values, which vmap cannot do."""
    from opake.attention import interface
    from opake.patching.state import state_of

    state = state_of(self)
    if state is None or not hf.is_pretrained(self) or not interface.replaced(self):
        return
    if any(entry.record.lapsed(entry.module) for entry in state.applied):
        raise PatchError(
            f"the attention of {type(self).__name__} was changed to {hf.attention_name(self)!r} after it was patched; "
            "call opake.patches.apply_model_patches(model) again"
        )


def _named(inner: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Positional arguments by name, so that what follows has one form to look at."""
    if not args:
        return kwargs
    names = hf.positional_names(inner)
    if len(args) > len(names):
        raise TypeError(f"forward takes {len(names)} positional arguments ({', '.join(names)}), got {len(args)}")
    twice = [name for name in names[: len(args)] if name in kwargs]
    if twice:
        raise TypeError(f"forward got several values for {', '.join(twice)}")
    return {**dict(zip(names, args, strict=False)), **kwargs}


def _is_stripped(kwargs: Mapping[str, Any]) -> bool:
    ids, embeds = (kwargs.get(name) for name in MAIN)
    if isinstance(ids, torch.Tensor):
        return ids.dim() == 1
    return isinstance(embeds, torch.Tensor) and embeds.dim() == 2


def _add(name: str, value: Any) -> Any:
    if not isinstance(value, torch.Tensor) or name in UNBATCHED:
        return value
    # a class label of one row is a scalar; a mask that is already (1, T) or (1, 1, T, T) stays
    if name == "attention_mask" and value.dim() in (2, 4):
        return value
    return value.unsqueeze(0)


def _without_cache(self: nn.Module, kwargs: dict[str, Any]) -> None:
    if hf.takes_use_cache(self, type(self).forward) and all(kwargs.get(name) is None for name in hf.CACHE_KEYWORDS):
        kwargs["use_cache"] = False


def _without_packing(self: nn.Module, kwargs: dict[str, Any]) -> None:
    """Rows with position_ids and no mask: Transformers reads them for packed sequences, but only without a cache.

    With a cache it does not look, and a mask of ones says the same. Without one the runtime patch keeps the sequences
    of a row apart by arithmetic; what stock would decide from values is never decided here.
    """
    ids = kwargs.get("input_ids")
    main, positions = ids if ids is not None else kwargs.get("inputs_embeds"), kwargs.get("position_ids")
    if positions is None or kwargs.get("attention_mask") is not None or not isinstance(main, torch.Tensor):
        return
    asked = kwargs.get("use_cache")
    cached = bool(hf.caches_by_default(self) if asked is None else asked)
    if cached and not (self.training and hf.is_checkpointing(self)):
        kwargs["attention_mask"] = torch.ones(main.shape[:2], dtype=torch.long, device=main.device)
    elif not runtime_has("vmap_masking") and is_mapped(positions):
        raise InputError(
            f"{type(self).__name__}: position_ids for each row, without attention_mask and with use_cache=False, may "
            "pack several sequences in a row; call opake.patches.apply_runtime_patches() first, or pass a mask"
        )


def _remove(out: Any, name: str = "") -> Any:
    """`out` without its batch dimension of one, in every tensor, tuple, list and mapping; caches are left alone."""
    # a tensor, or what stands for one
    if hasattr(type(out), "__torch_function__"):
        return out if name in FLAT_OUTPUTS or out.dim() == 0 or out.shape[0] != 1 else out.squeeze(0)
    if isinstance(out, MutableMapping):
        for key, value in list(out.items()):
            out[key] = value if key in hf.CACHE_KEYWORDS else _remove(value, key)
        return out
    if type(out) in (tuple, list):
        return type(out)(_remove(value, name) for value in out)
    return out
