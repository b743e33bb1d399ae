"""Bytes and floating-point operations of a step, counted on the meta device: shapes are real, numbers are not.

The stock forward of one row is run with a counter of matrix products and with hooks that see every tensor kept for
backward. What opake's kernels keep less of is not counted: the figures are what the stock model would need, and so a
bound from above, but for the logits, which are told apart.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import Any

from opake.checking.sweep import quiet


@dataclass(frozen=True)
class Cost:
    """Of one row of `tokens` tokens, and of the model. Bytes and operations; None where it could not be counted.

    weights: all parameters. trainable: their number. gradient: of one row, float32. kept: by the stock forward for
    backward. logits: the part of it that is logits and their loss. layers: kept with a checkpoint a layer, at least.
    flops: forward and backward.
    """

    tokens: int
    weights: int
    parameters: int
    trainable: int
    gradient: int
    kept: int | None
    logits: int
    layers: int
    flops: int | None
    reason: str = ""


def cost(model: Any, tokens: int) -> Cost:
    """Count one row."""
    parameters = {id(p): p for p in model.parameters()}.values()
    trainable = sum(p.numel() for p in parameters if p.requires_grad)
    config = model.config.get_text_config()
    width = next(p.element_size() for p in parameters)
    kept, flops, reason = _count(model, tokens)
    return Cost(
        tokens=tokens,
        weights=sum(p.numel() * p.element_size() for p in parameters),
        parameters=sum(p.numel() for p in parameters),
        trainable=trainable,
        gradient=4 * trainable,
        kept=kept,
        # in the model's dtype, in float32 for the loss, and the log-probabilities that its backward keeps
        logits=tokens * config.vocab_size * (width + 8),
        layers=tokens * config.hidden_size * config.num_hidden_layers * width,
        flops=flops,
        reason=reason,
    )


def _count(model: Any, tokens: int) -> tuple[int | None, int | None, str]:
    import torch
    from torch.utils.flop_counter import FlopCounterMode

    from opake import hf
    from opake.patching.target import locate

    from .stand_ins import outlined

    weights = {p.untyped_storage()._cdata for p in model.parameters()}
    held: dict[int, int] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in weights:
            held[storage._cdata] = storage.nbytes()
        return tensor

    ids = torch.zeros(1, tokens, dtype=torch.long, device="meta")
    options = {"use_cache": False} if hf.takes_use_cache(model, type(model).forward) else {}
    try:
        with (
            quiet(),
            warnings.catch_warnings(),
            outlined(locate(model).model) as fused,
            FlopCounterMode(display=False) as counter,
        ):
            warnings.simplefilter("ignore")
            with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
                loss = model(input_ids=ids, labels=ids, **options).loss
            loss.backward()
    except Exception as error:  # a forward that looks at values cannot run without them
        positions = getattr(model.config.get_text_config(), "max_position_embeddings", None) or tokens
        hint = f"; {tokens} tokens are more than the {positions} positions of the model" if tokens > positions else ""
        return None, None, f"{type(error).__name__}: {str(error).partition(chr(10))[0]}{hint}"
    finally:
        model.zero_grad(set_to_none=True)
    return sum(held.values()), counter.get_total_flops() + int(sum(fused)), ""
