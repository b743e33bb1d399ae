"""One private gradient: clipped rows of all microbatches summed, noise added once, divided by the expected size.

Sums live in one flat tensor for each device and dtype, of which every `p.grad` is a view: one addition, one draw of
noise and one all-reduce, however many parameters there are. Of several processes the first alone adds noise, before the
sums are added up, so all of them receive the same noisy sum.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import distributed, nn

from opake.collate import LogicalBatch
from opake.functional import ClippedGrad
from opake.trainer.randomness import Randomness

Clipped = Callable[..., ClippedGrad]
Params = Mapping[str, nn.Parameter]


class PrivateGradient:
    """Writes the noisy mean gradient of a step into the `grad` of `params`, which are float32 or float64.

    clipped: what `clipped_grad` made, with this `clip_norm`.
    """

    def __init__(
        self, clipped: Clipped, params: Params, randomness: Randomness, clip_norm: float, processes: int
    ) -> None:
        self._clipped, self._params, self._randomness = clipped, params, randomness
        self._clip_norm, self._processes = clip_norm, processes
        self._kinds: dict[tuple, list[str]] = {}
        for name, p in params.items():
            self._kinds.setdefault((p.device, p.dtype), []).append(name)
        self.norm = torch.zeros(())

    def __call__(
        self, batch: LogicalBatch, *, noise_multiplier: float, expected: float, step: int
    ) -> list[ClippedGrad]:
        """The gradient of one step, its norm in `norm`; returns microbatches without gradients, waits for no device.

        expected: rows that a step draws on average over all processes; the realised number is private.
        step: steps made before in the life of the model.
        """
        flats, views = self._zeros()
        seen = []
        for rows, weight in zip(batch.microbatches, batch.weights, strict=True):
            made = self._clipped(self._params, row_weight=weight, **rows)
            for names in self._kinds.values():
                sums, grads = ([held[name] for name in names] for held in (views, made.grads))
                torch._foreach_add_(sums, grads)  # pyright: ignore[reportPrivateImportUsage]
            seen.append(made._replace(grads={}))
        if self._randomness.rank == 0 and noise_multiplier:
            self._randomness.add_normal(flats, noise_multiplier * self._clip_norm, step)
        for flat in flats:
            if self._processes > 1:
                distributed.all_reduce(flat)
            flat.div_(expected)
        for name, p in self._params.items():
            p.grad = views[name]
        self.norm = torch.stack([torch.linalg.vector_norm(flat).to(flats[0]) for flat in flats]).norm()
        return seen

    def _zeros(self) -> tuple[list[torch.Tensor], dict[str, torch.Tensor]]:
        """A flat tensor for each kind, and a view of it for each parameter."""
        flats, views = [], {}
        for (device, dtype), names in self._kinds.items():
            sizes = [self._params[name].numel() for name in names]
            flats.append(torch.zeros(sum(sizes), device=device, dtype=dtype))
            for name, part in zip(names, flats[-1].split(sizes), strict=True):
                views[name] = part.view(self._params[name].shape)
        return flats, views


class Statistics:
    """Sums over steps, without noise and kept on the device: losses, rows, clipped rows, dropped rows, steps."""

    def __init__(self, device: torch.device) -> None:
        self._since, self._total = torch.zeros(2, 5, device=device)

    def add(self, seen: list[ClippedGrad], rows: int) -> None:
        """Count one step; a loss that is not finite says nothing about the others."""
        for one in seen:
            self._since[0] += one.losses.nan_to_num(0, 0, 0).sum()
            self._since[2] += one.clipped
            self._since[3] += one.nonfinite
        self._since[1] += rows
        self._since[4] += 1

    def take(self) -> dict[str, float]:
        """Means since the last call, over all processes; waits for the device."""
        if distributed.is_available() and distributed.is_initialized():
            distributed.all_reduce(self._since)
            self._since[4] /= distributed.get_world_size()
        self._total += self._since
        losses, rows, clipped, dropped, steps = self._since.tolist()
        self._since.zero_()
        shares = {"loss": losses / rows, "clipped_fraction": clipped / rows} if rows else {}
        return {**shares, "batch_size": rows / max(steps, 1), "dropped_rows": dropped}

    def mean_loss(self) -> float:
        """Mean loss of all rows that have been taken, NaN without any."""
        losses, rows = self._total[:2].tolist()
        return losses / rows if rows else float("nan")
