"""`explain`: patches, engine and cost of a model in one object that prints as tables and converts to JSON."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from opake.patching.report import PatchReport

from .cost import Cost, cost
from .outline import config_of, outline
from .plan import rehearse


@dataclass(frozen=True)
class Explanation:
    """What opake would do to a model. `report` has a row for every record, `applied` meaning that it would be."""

    model: str
    model_type: str
    rank: int
    report: PatchReport
    engine: str
    reason: str
    cost: Cost

    def to_json(self) -> str:
        return json.dumps({**asdict(self), "report": json.loads(self.report.to_json())}, indent=2)

    def figures(self, rows: int, rate: float) -> Iterator[tuple[str, str, str]]:
        """(quantity, value, remark) for microbatches of so many rows, at `rate` TFLOP/s."""
        c = self.cost
        yield "parameters", f"{c.parameters:,}", f"{_bytes(c.weights)} of weights"
        trained = f"LoRA of rank {self.rank} on all linear layers" if self.rank else "all of them"
        yield "trainable", f"{c.trainable:,}", trained
        yield "gradients of a microbatch", _bytes(rows * c.gradient), f"{rows} rows, float32"
        if c.kept is None or c.flops is None:
            yield "activations", "not counted", c.reason
            return
        yield "activations, stock", _bytes(rows * c.kept), f"{rows} rows of {c.tokens} tokens, kept for backward"
        yield "- of them logits and loss", _bytes(rows * min(c.logits, c.kept)), "the loss without logits keeps none"
        yield "- with a checkpoint a layer", _bytes(rows * c.layers), "and one layer at a time, recomputed"
        yield "operations", f"{rows * c.flops / 1e12:.3g} TFLOP", "forward and backward, matrix products alone"
        yield "time", _time(rows * c.flops / rate / 1e12), f"a microbatch, at {rate:g} TFLOP/s"


def explain(
    model: str, *, rank: int = 16, tokens: int = 1024, dtype: str = "bfloat16", cuda: bool = False
) -> Explanation:
    """Explain the model of a directory, a `config.json` or a name on the hub; no weights are read.

    rank: of LoRA adapters on all linear layers; 0 trains everything. tokens: of a row. cuda: as if there were a CUDA
    device with Triton, else as on this machine.

    Raises InputError where there is no such config or it is none of a causal language model, and the errors of
    `opake.registry.load` where its family is broken.
    """
    config = config_of(model)
    made: Any = outline(config, rank, dtype)
    counted = cost(made, tokens)
    report, engine, reason = rehearse(made, cuda=cuda)
    return Explanation(model, config.model_type, rank, report, engine, reason, counted)


def _bytes(n: int) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if n < 1024 or unit == "GiB":
            return f"{n:.3g} {unit}" if n < 1000 else f"{n:.0f} {unit}"
        n /= 1024  # type: ignore[assignment]
    raise AssertionError("the last unit returns")


def _time(seconds: float) -> str:
    return f"{seconds:.3g} s" if seconds >= 1 else f"{1000 * seconds:.3g} ms"
