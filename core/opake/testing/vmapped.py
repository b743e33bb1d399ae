"""Per-example gradients the way a user of `torch.func` asks for them: `vmap` over `grad` of one row's loss."""

# ruff: noqa: TID253
from __future__ import annotations

from collections.abc import Mapping

import torch
from torch.func import functional_call, grad, vmap


def vmap_gradients(
    model: torch.nn.Module,
    rows: Mapping[str, torch.Tensor],
    *,
    shape: str = "T",
    randomness: str = "error",
    in_dims: Mapping[str, int | None] | None = None,
    **constants: object,
) -> dict[str, torch.Tensor]:
    """Gradients `{name: (B, *shape)}` of the trainable parameters, each row's from the model's own loss.

    rows: the model's keyword tensors, each with a leading batch dimension. shape: `T` hands a row over as vmap strips
    it, (T, ...); `1xT` restores the batch dimension of one. in_dims: which dimension of an argument is the batch, if
    not the first; None for one that all rows share. constants: further keywords of the model call.
    """
    params = {name: p.detach() for name, p in model.named_parameters() if p.requires_grad}
    dims = dict.fromkeys(rows, 0) | dict(in_dims or {})

    def loss(params: dict[str, torch.Tensor], row: dict[str, torch.Tensor]) -> torch.Tensor:
        given = row if shape == "T" else {name: value[None] for name, value in row.items()}
        return functional_call(model, params, (), {**given, **constants}).loss

    return vmap(grad(loss), in_dims=(None, dims), randomness=randomness)(params, dict(rows))
