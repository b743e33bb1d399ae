"""The surroundings of a call - random state, autocast, the engine - taken down and put back for its recomputation.

Without it a recomputed dropout draws another mask and the gradient belongs to no forward. The random state is kept
only if the call drew from it, so that a call without dropout pays for one comparison. A CUDA graph capture forbids
reading the generators; what is recomputed under capture must not draw.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator

import torch

from opake.checkpoint.step import batched_step, in_batched_step


class Replay:
    """Random state of the CPU and of the CUDA devices of `tensors`, and autocast, as they are now."""

    def __init__(self, tensors: Iterable[torch.Tensor], *, preserve_rng: bool = True) -> None:
        tensors = list(tensors)
        self._devices = sorted({t.device.index for t in tensors if t.is_cuda})
        self._rng = self._read_rng() if preserve_rng else None
        self._batched = in_batched_step()
        self._autocast = [(kind, *_autocast_state(kind)) for kind in sorted({t.device.type for t in tensors})]

    def _read_rng(self) -> tuple[torch.Tensor, ...] | None:
        if self._devices and torch.cuda.is_current_stream_capturing():
            return None
        return (torch.get_rng_state(), *(torch.cuda.get_rng_state(device) for device in self._devices))

    def drop_unused_rng(self) -> None:
        """Forget the random state if the call has not moved it."""
        if self._rng is not None and all(map(torch.equal, self._rng, self._read_rng() or ())):
            self._rng = None

    @contextlib.contextmanager
    def __call__(self) -> Iterator[None]:
        """The surroundings of the call, for the time of the block."""
        with contextlib.ExitStack() as stack:
            stack.enter_context(batched_step(self._batched))
            for kind, *state in self._autocast:
                if state != _autocast_state(kind):
                    stack.enter_context(torch.autocast(kind, enabled=state[0], dtype=state[1], cache_enabled=False))
            if self._rng is not None:
                stack.enter_context(torch.random.fork_rng(devices=self._devices))
                torch.set_rng_state(self._rng[0])
                for device, state in zip(self._devices, self._rng[1:], strict=True):
                    torch.cuda.set_rng_state(state, device)
            yield


def _autocast_state(device_type: str) -> list:
    if not torch.amp.is_autocast_available(device_type):
        return [False, None]
    return [torch.is_autocast_enabled(device_type), torch.get_autocast_dtype(device_type)]
