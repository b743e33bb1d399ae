"""A logical batch of any number of rows, none included, as microbatches of one size.

Shapes then depend on the collator alone and not on how many rows were drawn. Nothing of a row outlives its batch: what
fills up the last microbatch is zeros.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch.utils.data import Dataset

from opake.errors import InputError
from opake.functional.nested import map_tensors, tensors_of


class LogicalBatch(NamedTuple):
    """What one step works on: `rows` real rows in microbatches of one size, and the weight (0 or 1) of their rows."""

    microbatches: list[dict[str, Any]]
    weights: list[torch.Tensor]
    rows: int

    def to(self, device: torch.device) -> LogicalBatch:
        """Copied without waiting for what the device is doing; weights become bool, whose values need no check."""
        moved = map_tensors(lambda tensor: tensor.to(device, non_blocking=True), self)
        return moved._replace(weights=[weight > 0 for weight in moved.weights])


class Microbatches:
    """A collator that cuts rows into microbatches of `size` and lets `collator` make each; no rows, no microbatch.

    The last microbatch is filled up with rows of zeros and weight 0. Raises InputError if what the collator returns is
    no mapping, has tensors whose first dimension is not that of the rows, or holds what cannot be told apart by rows:
    every row would see all of a list or an array, and its gradient would depend on its neighbours.
    """

    def __init__(self, collator: Callable[[list[Any]], Any], size: int) -> None:
        self.collator, self.size = collator, size

    def __call__(self, rows: Sequence[Any]) -> LogicalBatch:
        pieces = [list(rows[start : start + self.size]) for start in range(0, len(rows), self.size)]
        made = [_filled(self._collated(piece), self.size - len(piece)) for piece in pieces]
        weights = [(torch.arange(self.size) < len(piece)).float() for piece in pieces]
        return LogicalBatch(made, weights, len(rows))

    def _collated(self, rows: list[Any]) -> Mapping[str, Any]:
        batch = self.collator(rows)
        if not isinstance(batch, Mapping):
            raise InputError(f"the collator returned {type(batch).__name__}; it has to return a mapping of tensors")
        for name, value in batch.items():
            _check_kind(name, value)
            for tensor in tensors_of(value):
                if tensor.dim() == 0 or tensor.shape[0] != len(rows):
                    raise InputError(
                        f"the collator made {name} of shape {tuple(tensor.shape)} from {len(rows)} rows; its first "
                        "dimension has to be the rows. Packed or flattened batches have no per-example gradients: "
                        "use opake.collate.RightPaddingCollator, or a collator that pads"
                    )
        return batch


def _check_kind(name: str, value: Any) -> None:
    if value is None or isinstance(value, torch.Tensor | bool | int | float | str):
        return
    inner = list(value.values()) if isinstance(value, Mapping) else value if isinstance(value, tuple | list) else ()
    if not inner or not all(part is None or isinstance(part, torch.Tensor | Mapping | tuple | list) for part in inner):
        raise InputError(
            f"the collator made {name} a {type(value).__name__} that is not of tensors alone, so each row would see "
            "those of all rows; make it a tensor, or leave it out"
        )
    for part in inner:
        _check_kind(name, part)


def _filled(batch: Mapping[str, Any], missing: int) -> dict[str, Any]:
    def fill(tensor: torch.Tensor) -> torch.Tensor:
        return torch.cat([tensor, tensor.new_zeros(missing, *tensor.shape[1:])]) if missing else tensor

    return {name: map_tensors(fill, value) for name, value in batch.items()}


class Rows(Dataset):
    """A data set that also answers for no rows at all."""

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitems__(self, places: list[int]) -> list[Any]:
        together = getattr(self.dataset, "__getitems__", None)
        if together is None or not places:
            return [self.dataset[place] for place in places]
        return together(places)
