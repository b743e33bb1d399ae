"""Right padding as a policy: for a causal model the mask is left out, so flash attention serves padded batches.

With a causal mask no labelled token can see padding that comes after it, so every per-example gradient is exactly what
it is without padding. Models that look both ways, and router losses that count tokens, need the mask: `keep_mask=True`
(`needs_mask` says which).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from opake.errors import InputError

IGNORED = -100


@dataclass(frozen=True, slots=True)
class RightPaddingCollator:
    """Rows of different lengths to one batch, padded on the right, labels -100 where padded.

    pad_token_id: id to pad with; any id of the vocabulary does
    length: pad to this many tokens (a fixed shape); None pads to the longest row
    multiple_of: round the length up to a multiple
    keep_mask: add `attention_mask`; for bidirectional models and for router losses

    A row is a mapping with `input_ids` and, optionally, `labels` (default: the ids; shifting is the model's business)
    and `attention_mask`, whose zeros mark padding that is taken off, such as a tokenizer's on the left. Calling it with
    no rows gives tensors of shape (0, length or 0).

    Raises:
        InputError: a row longer than `length`, an empty row, or labels or a mask of another length than the ids.
    """

    pad_token_id: int = 0
    length: int | None = None
    multiple_of: int = 1
    keep_mask: bool = False

    def __call__(self, rows: Sequence[Mapping[str, Any]]) -> dict[str, torch.Tensor]:
        ids = [torch.as_tensor(row["input_ids"], dtype=torch.long) for row in rows]
        given = [row.get("labels") for row in rows]
        labels = [i if y is None else torch.as_tensor(y, dtype=torch.long) for i, y in zip(ids, given, strict=True)]
        _check(ids, labels)
        masks = [row.get("attention_mask") for row in rows]
        ids, labels = ([_unpadded(x, m) for x, m in zip(xs, masks, strict=True)] for xs in (ids, labels))
        T = self._length(ids)
        batch = {"input_ids": _pad(ids, T, self.pad_token_id), "labels": _pad(labels, T, IGNORED)}
        if self.keep_mask:
            batch["attention_mask"] = _pad([torch.ones_like(i) for i in ids], T, 0)
        return batch

    def _length(self, ids: Sequence[torch.Tensor]) -> int:
        longest = max((i.numel() for i in ids), default=0)
        if self.length is None:
            return -(-longest // self.multiple_of) * self.multiple_of
        if longest > self.length:
            raise InputError(f"a row has {longest} tokens but length={self.length}; truncate it or raise length")
        return self.length


def _check(ids: Sequence[torch.Tensor], labels: Sequence[torch.Tensor]) -> None:
    for number, (i, y) in enumerate(zip(ids, labels, strict=True)):
        if i.dim() != 1 or i.numel() == 0 or i.shape != y.shape:
            raise InputError(
                f"row {number}: input_ids of shape {tuple(i.shape)} and labels of shape {tuple(y.shape)}; "
                "both need one dimension, the same length and at least one token"
            )


def _unpadded(tokens: torch.Tensor, mask: Any) -> torch.Tensor:
    """Without the tokens that the row's own mask calls padding; a row of padding alone stays as it is."""
    if mask is None:
        return tokens
    kept = torch.as_tensor(mask, dtype=torch.bool)
    if kept.shape != tokens.shape:
        raise InputError(f"attention_mask of shape {tuple(kept.shape)} for input_ids of shape {tuple(tokens.shape)}")
    return tokens[kept] if kept.any() else tokens


def _pad(rows: Sequence[torch.Tensor], T: int, value: int) -> torch.Tensor:
    out = torch.full((len(rows), T), value, dtype=torch.long)
    for target, row in zip(out, rows, strict=True):
        target[: row.numel()] = row
    return out
