"""Clip per-example gradients to a norm and sum them, so that the bound holds in the numbers that come out.

For row i with norm n_i the contribution is s_i g_i with s_i = min(1, C / n_i) (Abadi et al. 2016, "Deep Learning with
Differential Privacy"). Rounding must not lift it above C: squares are summed in float64, s_i leaves room for the
rounding of the product and is itself rounded down to float32, products and the sum over rows are float32 (float64 for
float64 parameters), and where the parameter is narrower the sum is cast toward zero. So the contribution of every row
is within C, and so is the result for a single row in any dtype. Casting a sum of several rows is ordinary rounding of
the released number: add noise before it if that matters.

Nothing is read on the host. Work is done in slices, so that no second copy of a large gradient is made.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

import torch

from opake_kernels.clip_sum import add_scaled_rows, row_square_sums

# elements of a slice: what a CPU's cache holds; a GPU takes 16 times as many, to be busy
_SLICE, _GPU_SLICES = 1 << 20, 16
# room below C for the rounding of the products, and of the sum of squares where there is no float64
_ROOM, _ROOM_NARROW = 2.0**-23, 2.0**-12


class ClippedSum:
    """Running sum of clipped rows over microbatches, float32 or wider, one tensor for each parameter."""

    def __init__(self, params: Mapping[str, torch.Tensor], clip_norm: float) -> None:
        self._params, self._clip_norm = params, clip_norm
        self._sums: dict[str, torch.Tensor] = {}

    def add(self, grads: dict[str, torch.Tensor], real: torch.Tensor | None) -> tuple[torch.Tensor, ...]:
        """Add the rows of `grads` (b, *shape), which it empties; returns norms (b,), clipped and nonfinite (counts).

        real: (b,) bool, False for padding rows, which count for nothing; None if all are real.
        """
        fused = all(g.is_cuda for g in grads.values())
        if fused:
            grads.update((name, g.contiguous()) for name, g in list(grads.items()))
            self._make_totals()
        norms = row_square_sums(list(grads.values())).sqrt() if fused else row_norms(grads.values())
        finite = torch.isfinite(norms)
        kept = finite if real is None else finite & real
        scale = clip_scale(norms, self._clip_norm).masked_fill(~kept, 0)
        if fused:
            add_scaled_rows([self._total(name) for name in grads], list(grads.values()), scale, ~kept)
            grads.clear()
        for name in list(grads):
            self._add_rows(self._total(name), grads.pop(name), scale, ~kept)
        lost = ~finite if real is None else ~finite & real
        shown = norms if real is None else norms.masked_fill(~real, 0)
        return shown.float(), (kept & (norms > self._clip_norm)).sum(), lost.sum()

    def _make_totals(self) -> None:
        """All sums that are missing, zeroed in one launch: a LoRA model has hundreds of small ones."""
        new = {name: self._empty(name) for name in self._params if name not in self._sums}
        if new:
            torch._foreach_zero_(list(new.values()))  # pyright: ignore[reportPrivateImportUsage]
            self._sums.update(new)

    def _empty(self, name: str) -> torch.Tensor:
        p = self._params[name]
        return torch.empty(p.shape, dtype=torch.promote_types(p.dtype, torch.float32), device=p.device)

    def _total(self, name: str) -> torch.Tensor:
        """The sum of one parameter, made when it is first needed: not while the first microbatch runs."""
        if name not in self._sums:
            self._sums[name] = self._empty(name).zero_()
        return self._sums[name]

    def _add_rows(self, total: torch.Tensor, grad: torch.Tensor, scale: torch.Tensor, dropped: torch.Tensor) -> None:
        if total.dim() == 0:
            total, grad = total.unsqueeze(0), grad.unsqueeze(1)
        column = (-1, *(1 for _ in total.shape))
        factor, gone = (t.to(grad.device).view(column) for t in (scale, dropped))
        for start, piece in _slices(grad):
            # 0 times inf is not 0, so a dropped row is filled and not scaled away
            product = (piece * factor).masked_fill_(gone, 0)
            total.narrow(0, start, piece.shape[1]).add_(product.sum(0))

    def reset(self) -> None:
        """Start again at zero, in the same memory."""
        if self._sums:
            torch._foreach_zero_(list(self._sums.values()))  # pyright: ignore[reportPrivateImportUsage]

    def result(self, *, keep: bool = False) -> dict[str, torch.Tensor]:
        """The sums in the dtypes of the parameters; `keep` leaves the running sums to this object."""
        sums = {name: self._total(name) for name in self._params}
        cast = {name: cast_toward_zero(total, self._params[name].dtype) for name, total in sums.items()}
        same = [name for name, c in cast.items() if keep and c is sums[name]]
        if same:
            # one launch for hundreds of small tensors
            copies = [torch.empty_like(sums[name]) for name in same]
            kept = [sums[name] for name in same]
            torch._foreach_copy_(copies, kept)  # pyright: ignore[reportPrivateImportUsage]
            cast.update(zip(same, copies, strict=True))
        return cast


def row_norms(grads: Iterable[torch.Tensor]) -> torch.Tensor:
    """L2 norm of each row over all gradients (b, *shape), summed in float64 (float32 where the device has no float64).

    Infinite or NaN where, and only where, the row holds such an entry (or float64 itself overflows).
    """
    norms = [
        _slice_norm(piece) for grad in grads for _, piece in _slices(grad if grad.dim() > 1 else grad.unsqueeze(1))
    ]
    return torch.linalg.vector_norm(torch.stack([n.to(norms[0].device) for n in norms]), dim=0)


def _slice_norm(piece: torch.Tensor) -> torch.Tensor:
    wide = torch.float64 if piece.device.type != "mps" else torch.float32
    return torch.linalg.vector_norm(piece, dim=tuple(range(1, piece.dim())), dtype=wide)


def clip_scale(norms: torch.Tensor, clip_norm: float) -> torch.Tensor:
    """min(1, C / n) in float32, rounded down so far that the rounded product s * g has a norm of at most C."""
    room = _ROOM if norms.dtype == torch.float64 else _ROOM_NARROW
    exact = (clip_norm * (1 - room) / norms).clamp(max=1)
    scale = exact.float()
    return torch.where(scale.to(exact.dtype) > exact, torch.nextafter(scale, torch.zeros_like(scale)), scale)


def cast_toward_zero(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """`x` in `dtype` without raising a magnitude: what rounds up, to infinity included, goes one step back."""
    y = x.to(dtype)
    if torch.finfo(dtype).bits >= torch.finfo(x.dtype).bits:
        return y
    # the bits of a 16-bit float, read as an integer, grow with its magnitude
    raised = y.to(x.dtype).abs() > x.abs()
    return (y.view(torch.int16) - raised.to(torch.int16)).view(dtype)


def _slices(grad: torch.Tensor) -> Iterator[tuple[int, torch.Tensor]]:
    """(start, piece) along dimension 1 of grad (b, n, ...), each of a bounded number of elements."""
    width = grad.shape[1]
    elements = _SLICE * (1 if grad.device.type == "cpu" else _GPU_SLICES)
    step = max(1, elements * width // max(1, grad.numel()))
    for start in range(0, max(width, 1), step):
        yield start, grad.narrow(1, start, min(step, width - start))
