"""`opake bench kernels`: runs the cases for each provider in one process and prints one row a measurement."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch

from . import attention_cases, head_cases, lora_cases, norm_rope_cases  # noqa: F401 - they register their cases
from .cases import CASES, Case, Op
from .measure import captured, copy_bandwidth, group, per_example, plain, python_cost, time_ms

__all__ = ["PROVIDERS", "Row", "machine", "run"]

PROVIDERS = ("ours", "torch", "compile", "liger")


@dataclass(frozen=True, slots=True)
class Row:
    """One measurement. mode: plain | vmap | group | python plain | python vmap. `error` says why there is none."""

    op: str
    size: str
    provider: str
    mode: str
    ms: float | None = None
    gbs: float | None = None
    peak_gib: float | None = None
    error: str = ""

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


def machine() -> dict[str, Any]:
    """The card, the versions, and the measured copy bandwidth that figures are held against."""
    import triton

    found: dict[str, Any] = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__}
    found["triton"] = triton.__version__
    found["copy_gbs"] = round(copy_bandwidth(), 1)
    return found


def _provider(case: Case, name: str) -> Op | None:
    if name == "compile":
        return torch.compile(case.torch, dynamic=False)
    if name == "liger":
        return case.liger() if case.liger else None
    return case.ours if name == "ours" else case.torch


def _modes(case: Case, name: str, op: Op) -> Iterator[tuple[str, Callable[[], Callable[[], Any]]]]:
    if name not in ("ours", "torch"):
        # some rivals read the device, which no capture allows
        yield "plain", lambda: plain(op, case.arguments(False), case.diff)
        return
    yield "plain", lambda: captured(plain(op, case.arguments(False), case.diff))
    if case.maps:
        yield "vmap", lambda: captured(per_example(op, case, case.arguments(False)))
    if name == "ours" and case.grouped is not None:
        yield "group", lambda: captured(group(op, case, case.arguments(False)))


def _row(case: Case, name: str, mode: str, measured: Callable[[], dict[str, Any]]) -> Row:
    try:
        found = Row(case.op, case.size, name, mode, **measured())
    except Exception as error:
        # a rival that fails at a size is a result, not the end of the run
        found = Row(case.op, case.size, name, mode, error=f"{type(error).__name__}: {str(error)[:160]}")
    gc.collect()
    torch.cuda.empty_cache()
    return found


def _timed(case: Case, make: Callable[[], Callable[[], Any]]) -> dict[str, float]:
    ms, peak = time_ms(make())
    return {"ms": round(ms, 4), "gbs": round(case.nbytes / ms / 1e6, 1), "peak_gib": round(peak, 3)}


def _measured(case: Case, name: str, op: Op) -> Iterator[Row]:
    for mode, make in _modes(case, name, op):
        yield _row(case, name, mode, partial(_timed, case, make))
    if name in ("ours", "torch"):
        for mapped in (False, True) if case.maps else (False,):
            yield _row(case, name, "python vmap" if mapped else "python plain", partial(_python, case, op, mapped))


def _python(case: Case, op: Op, mapped: bool) -> dict[str, float]:
    return {"ms": round(python_cost(op, case, mapped) / 1e3, 4)}


def run(ops: Sequence[str] = (), providers: Sequence[str] = PROVIDERS) -> Iterator[Row]:
    """Measure `ops` (all by default) for `providers`; rows come as they are made. KeyError for an unknown op."""
    for name in ops or CASES:
        case = CASES[name]()
        for provider in providers:
            try:
                op = _provider(case, provider)
            except ImportError as error:
                yield Row(case.op, case.size, provider, "plain", error=str(error))
                continue
            if op is not None:
                yield from _measured(case, provider, op)
        torch._dynamo.reset()
