"""Which row goes to which expert: one stable sort of the slots (example, token, choice), and where each group ends.

Everything stays on the device; the sizes of all tensors follow from shapes. Two orders: by expert, then example, for
products that take the rows of all examples at once and compute each row by itself; by example, then expert, for those
whose rounding depends on how many rows there are, so that no example can reach another's numbers.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

__all__ = ["Routing", "packed", "route", "unpacked"]


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
    inverse: torch.Tensor | None = None

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
        return rows.index_select(0, self.places())

    def places(self) -> torch.Tensor:
        """(S) the sorted row of each slot."""
        if self.inverse is None:
            self.inverse = torch.empty_like(self.perm)
            self.inverse[self.perm] = torch.arange(self.perm.numel(), device=self.perm.device)
        return self.inverse


def packed(r: Routing, G: int) -> torch.Tensor:
    """(G, 2 S / G + E): slots, their rows and ends as each example counts them, of rows sorted by example first."""
    order = torch.cat([t.view(G, -1) for t in (r.perm, r.places(), r.ends)], dim=1)
    return order if G == 1 else order - _starts(G, r.perm.numel() // G, order.device)


def unpacked(order: torch.Tensor, index: torch.Tensor, E: int) -> Routing:
    """The routing of `index` (G, T, K) again, from `order` (any number of examples, what `packed` made)."""
    G, _, K = index.shape
    rows = index.numel() // len(order)
    if len(order) > 1:
        order = order + _starts(len(order), rows, order.device)
    perm, inverse, ends = (t.reshape(-1) for t in order.split((rows, rows, order.shape[1] - 2 * rows), dim=1))
    return Routing(perm, ends.int(), G, E, K, True, index.long(), inverse)


def _starts(G: int, rows: int, device: torch.device) -> torch.Tensor:
    """(G, 1) the first slot of each example."""
    return torch.arange(G, device=device)[:, None] * rows


def route(index: torch.Tensor, E: int, by_example: bool) -> Routing:
    """index (G, T, K) with entries 0 .. E - 1."""
    G, _, K = index.shape
    index = index.long()
    keys = index + _examples(index) * E if by_example and G > 1 else index
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
