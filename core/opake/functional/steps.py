"""Run the microbatches of one call of `clipped_grad`, eagerly or from a CUDA graph, into one running sum."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import nn

from opake.errors import EngineUnavailable
from opake.functional.capture import Capturer, key_of
from opake.functional.clipping import ClippedSum
from opake.functional.engines import Choice
from opake.functional.per_example import concatenated
from opake.functional.rows import Rows
from opake.functional.target import Target

Params = Mapping[str, torch.Tensor]


class Done(NamedTuple):
    """What a call made; `reason` says whether it was captured, and why not."""

    grads: dict[str, torch.Tensor]
    norms: torch.Tensor
    losses: torch.Tensor
    clipped: torch.Tensor
    nonfinite: torch.Tensor
    aux: Any
    reason: str


class Steps:
    """The steps of one `clipped_grad` function; holds its graphs and, for them, its running sums."""

    def __init__(self, target: Target, clip_norm: float, size: int | None, capture: str | bool, has_aux: bool) -> None:
        self._target, self._clip_norm, self._size = target, clip_norm, size
        self._capture, self._has_aux = capture, has_aux
        self._capturer = Capturer()
        self._kept: dict[Hashable, ClippedSum] = {}
        self._read: tuple[Hashable, tuple[Hashable, str | None]] | None = None

    def __call__(self, choice: Choice, params: Params, rows: Rows, real: torch.Tensor | None) -> Done:
        obstacle = self._obstacle(params)
        if obstacle is not None and self._capture is True:
            raise EngineUnavailable(f"capture=True cannot serve {self._target.name}: {obstacle}")
        if obstacle is not None or not rows.count:
            sums = ClippedSum(params, self._clip_norm)
            *found, aux = self._eager(choice, sums, params, rows, real)
            return _done(sums.result(), found, aux, "no capture: " + (obstacle or "there are no rows"))
        sums = self._sums(params)
        found = self._captured(choice, sums, params, rows, real)
        return _done(sums.result(keep=True), found, None, self._capturer.reason)

    def _obstacle(self, params: Params) -> str | None:
        """Why steps are not captured; None if they may be."""
        if self._capture is False:
            return "capture=False was asked for"
        if not all(p.is_cuda for p in params.values()):
            return "CUDA graphs need parameters on a CUDA device"
        if torch.cuda.is_current_stream_capturing():
            return "a capture is under way already"
        if self._has_aux:
            return "has_aux: what a function hands out cannot be kept in a graph"
        model = self._target.model
        if model is None:
            return None if self._capture is True else "the target is a function; capture=True captures it all the same"
        return self._model_key()[1]

    def _sums(self, params: Params) -> ClippedSum:
        """The running sums that graphs write into, at zero."""
        tensors = tuple((name, p.shape, p.dtype, p.device) for name, p in params.items())
        # what was made in inference mode is written into there alone
        form = (torch.is_inference_mode_enabled(), tensors)
        if form not in self._kept:
            self._kept.clear()
            self._kept[form] = ClippedSum(dict(params), self._clip_norm)
        sums = self._kept[form]
        sums.reset()
        return sums

    def _eager(
        self, choice: Choice, sums: ClippedSum, params: Params, rows: Rows, real: torch.Tensor | None
    ) -> tuple[Any, ...]:
        device = next(iter(params.values())).device
        outs, parts = [], []
        for place, piece in rows.microbatches(self._size):
            part = None if real is None else real[place].to(device)
            *out, aux = _body(choice, sums, params, piece, part)
            outs.append(out)
            parts.append(aux)
        return (*_joined(outs, device), concatenated(parts) if parts else None)

    def _captured(
        self, choice: Choice, sums: ClippedSum, params: Params, rows: Rows, real: torch.Tensor | None
    ) -> tuple[Any, ...]:
        device = next(iter(params.values())).device
        size = self._size or rows.count
        everyone = torch.ones(rows.count, dtype=torch.bool, device=device) if real is None else real.to(device)
        outs = []
        for place, piece in rows.microbatches(size):
            padded, part = _padded(piece, everyone[place], size)
            key = (self._key(params, padded), choice.run, sums)

            def body(piece: Rows, part: torch.Tensor) -> tuple[torch.Tensor, ...]:
                return _body(choice, sums, params, piece, part)[:4]

            norms, losses, over, lost = self._capturer(key, body, padded, part)
            outs.append((norms[: piece.count], losses[: piece.count], over, lost))
        return _joined(outs, device)

    def _key(self, params: Params, rows: Rows) -> Hashable:
        return key_of(params, rows, self._model_key()[0])

    def _model_key(self) -> tuple[Hashable, str | None]:
        """What a graph depends on in the model, and why it cannot be captured; read anew when the model has changed."""
        model, watch = self._target.model, self._target.watch
        if model is None or watch is None:
            return None, None
        token = watch.held()
        if self._read is None or self._read[0] is not token:
            self._read = (token, (watch.state(), _replay_obstacle(model)))
        return self._read[1]


def _done(grads: dict[str, torch.Tensor], found: Sequence[torch.Tensor], aux: Any, reason: str) -> Done:
    norms, losses, clipped, nonfinite = found
    return Done(grads, norms, losses, clipped, nonfinite, aux, reason)


def _body(choice: Choice, sums: ClippedSum, params: Params, rows: Rows, real: torch.Tensor | None) -> tuple[Any, ...]:
    """One microbatch: norms, losses, how many were clipped and dropped, aux."""
    chunk = choice.run(params, rows)
    norms, over, lost = sums.add(chunk.grads, real)
    losses = chunk.losses.float().to(norms.device)
    return norms, losses if real is None else losses.masked_fill(~real, 0), over, lost, chunk.aux


def _joined(outs: list[Any], device: torch.device) -> tuple[torch.Tensor, ...]:
    if not outs:
        zero = torch.zeros((), dtype=torch.int64, device=device)
        return torch.zeros(0, device=device), torch.zeros(0, device=device), zero, zero.clone()
    norms, losses, over, lost = zip(*outs, strict=True)
    return torch.cat(norms), torch.cat(losses), torch.stack(over).sum(), torch.stack(lost).sum()


def _padded(rows: Rows, real: torch.Tensor, size: int) -> tuple[Rows, torch.Tensor]:
    """`size` rows: the first row again, marked as padding, where there are fewer."""
    missing = size - rows.count
    if missing <= 0:
        return rows, real
    leaves = []
    for leaf, dim in zip(rows.leaves, rows.dims, strict=True):
        if dim is None:
            leaves.append(leaf)
            continue
        again = leaf.narrow(dim, 0, 1)
        shape = [missing if i == dim else n for i, n in enumerate(leaf.shape)]
        leaves.append(torch.cat([leaf, again.expand(shape)], dim))
    return replace(rows, leaves=leaves, count=size), torch.cat([real, real.new_zeros(missing)])


def _replay_obstacle(model: nn.Module) -> str | None:
    """A rematerialised call that draws random numbers saves the generator's state, which a graph cannot hold."""
    from opake import hf
    from opake.batching.dropout import active
    from opake.patching.target import locate

    found = locate(model)
    if active(model) and (not found.pretrained or hf.is_checkpointing(found.model)):
        return "dropout that may be rematerialised cannot be replayed by a graph"
    return None
