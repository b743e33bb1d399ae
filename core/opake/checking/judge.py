"""Are per-example gradients those of a loop? And where the number is too large to say, is it rounding?

The loop is one ordinary `backward()` a row over an unpatched model. An answer is right within 5e-6 of it, or if it is
at most twice as far from a loop in float64 as that loop is.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import TYPE_CHECKING

from opake.checking.tiny import tiny_batch, tiny_model

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

TOLERANCE = 5e-6
PADDINGS = ("right", "none", "left")


def relative_error(got: Mapping[str, torch.Tensor], wanted: Mapping[str, torch.Tensor]) -> float:
    """Largest deviation of a parameter's gradients, relative to its largest gradient.

    Small gradients are measured against 1e-4 of the model's largest gradient instead; those that are zero but for
    rounding, such as that of a key bias, against the largest itself.
    """
    largest = max(float(grad.abs().max()) for grad in wanted.values())
    if set(got) != set(wanted) or largest == 0:
        return float("inf")
    errors = []
    for name, grad in wanted.items():
        own = float(grad.abs().max())
        scale = largest if own < 1e-6 * largest else own + 1e-4 * largest
        errors.append(float((got[name] - grad).abs().max()) / scale)
    # a comparison with NaN is false, so `max` alone could hide one
    return max(errors) if all(error < float("inf") for error in errors) else float("inf")


def loop_grads(model: PreTrainedModel, batch: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """{name: (rows, *shape)}: the gradient of each row alone, by ordinary backward passes of one row.

    Where Transformers ignores the mask of a single row (recurrent layers before 5.15) the row is handed over twice.
    """
    import torch

    from opake import hf
    from opake.masks import recurrent

    parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
    options = {"use_cache": False} if hf.takes_use_cache(model, type(model).forward) else {}
    times = 2 if recurrent.ignores_mask_of_one_row(model) else 1
    rows = []
    for i in range(len(batch["input_ids"])):
        row = {name: torch.cat([tensor[i : i + 1]] * times) for name, tensor in batch.items()}
        loss = model(**row, **options).loss
        rows.append(torch.autograd.grad(loss, list(parameters.values()), allow_unused=True, materialize_grads=True))
    return {name: torch.stack(grads) for name, grads in zip(parameters, zip(*rows, strict=True), strict=True)}


def vmap_grads(model: PreTrainedModel, batch: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    from opake.functional import per_example_grads

    trainable = {name: p.detach() for name, p in model.named_parameters() if p.requires_grad}
    return per_example_grads(model, engine="vmap")(trainable, **batch)


def judged(
    got: Mapping[str, torch.Tensor],
    wanted: Mapping[str, torch.Tensor],
    stock: PreTrainedModel,
    batch: Mapping[str, torch.Tensor],
) -> tuple[float, bool, str]:
    """The error, whether it is that of a right answer, and in words if that is not plain from the number."""
    error = relative_error(got, wanted)
    if error <= TOLERANCE:
        return error, True, ""
    batches = [batch, *(tiny_batch(padding=padding) for padding in PADDINGS)]
    exact = _float64(stock)
    if stock.config._attn_implementation == "eager" and not _finite(exact, batches[-1]):
        return error, *_beside_sdpa(error, stock, batches)
    ours = _far(got, loop_grads(exact, batch))
    theirs = _own_error(stock, exact, batches)
    right = ours <= 2 * theirs < float("inf")
    return error, right, f"{ours:.0e} from float64, the unpatched loop {theirs:.0e}"


def _far(grads: Mapping[str, torch.Tensor], exact: Mapping[str, torch.Tensor]) -> float:
    return relative_error({name: grad.double() for name, grad in grads.items()}, exact)


def beside_padding(
    model: PreTrainedModel, stock: PreTrainedModel, batch: Mapping[str, torch.Tensor]
) -> tuple[float, bool, str]:
    """The same with nothing predicted from padding: what attention answers a row that sees nothing is a convention."""
    real = _first_token_unlabelled(batch)
    error, right, note = judged(vmap_grads(model, real), loop_grads(stock, real), stock, real)
    said = "left padding: attention of a row that sees nothing differs from stock"
    return error, right, f"{said}; {note}" if note else said


def _first_token_unlabelled(batch: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    labels = batch["labels"].clone()
    first = batch["attention_mask"].argmax(dim=1)
    labels[range(len(labels)), first] = -100
    return {**batch, "labels": labels}


def _own_error(stock: PreTrainedModel, exact: PreTrainedModel, batches: list[dict[str, torch.Tensor]]) -> float:
    """How far the unpatched loop is from float64 at worst; rounding is a matter of luck in each batch."""
    return max(_far(loop_grads(stock, batch), loop_grads(exact, batch)) for batch in batches)


def _beside_sdpa(error: float, stock: PreTrainedModel, batches: list[dict[str, torch.Tensor]]) -> tuple[bool, str]:
    """Where a mask of float64 is beyond the float32 softmax of eager attention: what the same model loses with SDPA.

    Who is no farther from the unpatched loop than that loop is from float64 is at most twice as far from float64.
    """
    try:
        other = tiny_model(copy.deepcopy(stock.config), attention="sdpa").train(stock.training)
    except ValueError:
        return False, "eager attention is not finite in float64, and the model has no other"
    theirs = _own_error(other, _float64(other), batches)
    return error <= theirs < float("inf"), f"the unpatched loop {theirs:.0e} from float64, with SDPA"


def _finite(model: PreTrainedModel, batch: Mapping[str, torch.Tensor]) -> bool:
    return all(bool(grad.isfinite().all()) for grad in loop_grads(model, batch).values())


def _float64(stock: PreTrainedModel) -> PreTrainedModel:
    exact = copy.deepcopy(stock).double()
    if getattr(exact.config, "_experts_implementation", None):
        # the usual grouped products know no float64
        exact.set_experts_implementation("eager")
    return exact
