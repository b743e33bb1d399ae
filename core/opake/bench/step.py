"""`opake bench step`: one training step, private and not, beside rivals; gradients are compared before any clock runs.

Every way gets a model of its own with the same weights and the same rows. Private ways are held against a loop of one
backward a row over the stock model, ordinary ones against the stock model's own gradient.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from .memory_model import Sizes, batch, forget
from .step_models import build
from .step_ways import WAYS, Grads

__all__ = ["Row", "machine", "run"]

TIMES = 7


@dataclass(frozen=True, slots=True)
class Row:
    """One way at one size.

    ms: median of a step with a wait for the device after each. running_ms: of steps that follow each other. On a CPU
    both are processor time. peak_gib: the most that is allocated, weights included (on a CPU what lives beside them).
    difference: relative to the reference, None where this is it; `note`: the engine, or why there are no figures.
    """

    way: str
    rows: int
    tokens: int
    private: bool
    ms: float | None = None
    running_ms: float | None = None
    peak_gib: float | None = None
    difference: float | None = None
    note: str = ""

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


def machine(device: str) -> dict[str, str]:
    """The card, or the processor's threads, and the versions."""
    import peft
    import transformers

    card = torch.cuda.get_device_name() if device == "cuda" else f"CPU, {torch.get_num_threads()} threads"
    versions = {"torch": torch.__version__, "transformers": transformers.__version__, "peft": peft.__version__}
    return {"device": card, **versions}


def run(sizes: Sizes, ways: Sequence[str], device: str, before: Callable[[str], None] | None = None) -> Iterator[Row]:
    """Rows as they are made; `before` is called with the name of each way."""
    wanted = {private: _reference(sizes, private, device) for private in {WAYS[name].private for name in ways}}
    for name in ways:
        if before is not None:
            before(name)
        yield _row(sizes, name, device, wanted[WAYS[name].private])
        forget(device)


def _reference(sizes: Sizes, private: bool, device: str) -> Grads:
    model = build(sizes, device)
    grads, _ = WAYS["loop" if private else "hf"].make(model, batch(sizes, sizes.rows, device))()
    found = {_plain(name): g.detach().clone() for name, g in grads.items()}
    del model, grads
    forget(device)
    return found


def _plain(name: str) -> str:
    """A parameter's name without what a wrapper puts in front of it."""
    return name.removeprefix("_module.")


def _row(sizes: Sizes, name: str, device: str, wanted: Grads) -> Row:
    way = WAYS[name]
    given = (name, sizes.rows, sizes.tokens, way.private)
    try:
        step = way.make(build(sizes, device), batch(sizes, sizes.rows, device))
        grads, _ = step()
        off = _difference(grads, wanted)
        _, said = step()
        del grads
        return Row(*given, *_timed(step, device), None if name in ("loop", "hf") else off, said)
    except Exception as error:
        # a rival that is not installed, or fails at a size, is a result and not the end of the run
        return Row(*given, note=f"{type(error).__name__}: {str(error).splitlines()[0][:120]}")


def _difference(grads: Grads, wanted: Grads) -> float:
    """Norm of the difference over the norm, all parameters together."""
    pairs = [(g.double(), wanted[_plain(name)].double()) for name, g in grads.items()]
    if len(pairs) != len(wanted):
        raise ValueError(f"{len(pairs)} gradients came back for {len(wanted)} parameters")
    off, size = (
        torch.stack([t.norm() for t in ts]).norm() for ts in ([a - b for a, b in pairs], [b for _, b in pairs])
    )
    return float(off / size)


def _timed(step: Callable[[], Any], device: str) -> tuple[float, float, float]:
    """(median ms, ms of steps in a row, peak GiB)."""
    if device != "cuda":
        return _on_cpu(step)
    step()
    forget(device)
    torch.cuda.reset_peak_memory_stats()
    waits = sorted(_wall(step, 1) for _ in range(TIMES))
    peak = torch.cuda.max_memory_allocated()
    # what a graph works in was allocated when it was captured, and stays
    held = torch.cuda.memory_reserved()
    captured = "captured" in step()[1]
    return waits[TIMES // 2], _wall(step, TIMES), (held if captured else peak) / 2**30


def _wall(step: Callable[[], Any], times: int) -> float:
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(times):
        step()
    torch.cuda.synchronize()
    return (time.perf_counter() - start) / times * 1e3


def _on_cpu(step: Callable[[], Any]) -> tuple[float, float, float]:
    from opake.testing.live import peak_live_bytes

    spent = []
    for _ in range(3):
        start = time.process_time()
        step()
        spent.append((time.process_time() - start) * 1e3)
    return sorted(spent)[1], sum(spent) / len(spent), peak_live_bytes(step) / 2**30
