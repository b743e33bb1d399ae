"""Which row goes to which expert: one stable sort of the slots (example, token, choice), and where each group ends.

Everything stays on the device; the sizes of all tensors follow from shapes. Two orders: by expert, then example, for
products that take the rows of all examples at once and compute each row by itself; by example, then expert, for those
whose rounding depends on how many rows there are, so that no example can reach another's numbers.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

__all__ = ["Routing", "route"]


@dataclass(slots=True)
class Routing:
    """S = G * T * K slots of G examples, sorted. `perm` (S): the slot of each sorted row.

    by_example: rows are sorted by example first. ends (G * E if by_example else E): one past the last row of each.
    """

    perm: torch.Tensor
    ends: torch.Tensor
    G: int
    E: int
    K: int
    by_example: bool
    index: torch.Tensor

    def tokens(self) -> torch.Tensor:
        """(S) the token of each sorted row, counted over all examples."""
        return self.perm // self.K

    def segments(self) -> torch.Tensor:
        """Ends of the rows of each (example, expert) if by_example, else of each (expert, example), int32."""
        if self.by_example or self.G == 1:
            return self.ends
        keys = (self.index * self.G + _examples(self.index)).reshape(-1)[self.perm]
        return _ends(keys, self.E * self.G)

    def unsorted(self, rows: torch.Tensor) -> torch.Tensor:
        """Rows (S, ...) or (S) in the order of the slots."""
        out = torch.empty_like(rows)
        out[self.perm] = rows
        return out


def route(index: torch.Tensor, E: int, by_example: bool) -> Routing:
    """index (G, T, K) with entries 0 .. E - 1."""
    G, _, K = index.shape
    index = index.long()
    keys = index + _examples(index) * E if by_example else index
    groups = G * E if by_example else E
    # fewer bits are fewer passes
    narrow = torch.int16 if groups < 2**15 and keys.is_cuda else torch.int32
    keys, perm = torch.sort(keys.reshape(-1).to(narrow), stable=True)
    return Routing(perm, _ends(keys, groups), G, E, K, by_example, index)


def _examples(index: torch.Tensor) -> torch.Tensor:
    return torch.arange(index.shape[0], device=index.device)[:, None, None]


def _ends(sorted_keys: torch.Tensor, count: int) -> torch.Tensor:
    groups = torch.arange(count, device=sorted_keys.device, dtype=sorted_keys.dtype)
    return torch.searchsorted(sorted_keys, groups, right=True, out_int32=True)
