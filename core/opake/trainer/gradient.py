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
from opake.functional import ClippedGrad, clipped_grad
from opake.trainer.randomness import Randomness


class PrivateGradient:
    """Writes the noisy mean gradient of a step into the `grad` of `params`, which are float32 or float64."""

    def __init__(
        self,
        target: Callable[..., torch.Tensor] | nn.Module,
        params: Mapping[str, nn.Parameter],
        randomness: Randomness,
        *,
        clip_norm: float,
        microbatch_size: int,
        engine: str = "auto",
        processes: int = 1,
    ) -> None:
        self._params, self._randomness = params, randomness
        self._clip_norm, self._processes = clip_norm, processes
        self._clipped = clipped_grad(target, clip_norm=clip_norm, microbatch_size=microbatch_size, engine=engine)
        self._kinds: dict[tuple, list[str]] = {}
        for name, p in params.items():
            self._kinds.setdefault((p.device, p.dtype), []).append(name)
        self.norm = torch.zeros(())

    def __call__(
        self, batch: LogicalBatch, *, noise_multiplier: float, expected: float, step: int
    ) -> list[ClippedGrad]:
        """The gradient of one step; returns its microbatches, without their gradients.

        expected: rows that a step draws on average over all processes; the realised number is private.
        step: steps made before in the life of the model.
        Leaves the norm of what it wrote in `norm`. Waits for no device.
        """
        flats, views = self._zeros()
        seen = []
        for rows, weight in zip(batch.microbatches, batch.weights, strict=True):
            made = self._clipped(self._params, row_weight=weight, **rows)
            for names in self._kinds.values():
                sums, grads = [views[name] for name in names], [made.grads[name] for name in names]
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
        norms = [torch.linalg.vector_norm(flat) for flat in flats]
        self.norm = torch.linalg.vector_norm(torch.stack([norm.to(norms[0]) for norm in norms]))
        return seen

    def _zeros(self) -> tuple[list[torch.Tensor], dict[str, torch.Tensor]]:
        """A flat tensor for each kind, and a view of it for each parameter."""
        flats, views = [], {}
        for (device, dtype), names in self._kinds.items():
            sizes = [self._params[name].numel() for name in names]
            flat = torch.zeros(sum(sizes), device=device, dtype=dtype)
            parts = zip(names, flat.split(sizes), strict=True)
            views.update((name, part.view(self._params[name].shape)) for name, part in parts)
            flats.append(flat)
        return flats, views


class Statistics:
    """Sums over steps, without noise and kept on the device: losses, rows, clipped rows, dropped rows, steps."""

    def __init__(self, device: torch.device) -> None:
        self._since, self._total = torch.zeros(2, 5, device=device)

    def add(self, seen: list[ClippedGrad], rows: int) -> None:
        """Count one step."""
        for one in seen:
            # a loss that is not finite says nothing about the others
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
