"""Which engine computes the gradients of a call, and why: the seam between what is asked for and who does it.

An engine is a function `(params, rows) -> Chunk` for one microbatch. `vmap` serves every target. `batched` is offered
where it can be proved right: each trainable parameter is consumed by an op that takes it with an example axis, the
model's rows do not reach each other, and its loss is known per row. The proof is asked of the patch state, so an op
that learns the example axis widens the engine without a change here.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch

from opake.errors import EngineUnavailable, InputError
from opake.functional import batched_engine, vmap_engine
from opake.functional.chunk import Engine
from opake.functional.rows import Rows
from opake.functional.target import Target

ENGINES = ("auto", "vmap", "batched")
RANDOMNESS = ("different", "same", "error")


class Choice(NamedTuple):
    """An engine, its name, and the reason in words."""

    run: Engine
    name: str
    reason: str


def check_options(engine: str, randomness: str, capture: str | bool = "auto") -> None:
    """Raise InputError for an option that does not exist, EngineUnavailable for one that does not exist yet."""
    if engine not in ENGINES:
        raise InputError(f"engine is one of {', '.join(ENGINES)}; got {engine!r}")
    if randomness not in RANDOMNESS:
        raise InputError(f"randomness is one of {', '.join(RANDOMNESS)}; got {randomness!r}")
    if capture is True:
        raise EngineUnavailable("capture=True: CUDA graph capture is not built yet; use capture='auto' or False")
    if capture is not False and capture != "auto":
        raise InputError(f"capture is 'auto', True or False; got {capture!r}")


def choose(
    target: Target,
    params: Mapping[str, torch.Tensor],
    rows: Rows,
    engine: str,
    *,
    randomness: str = "different",
    has_aux: bool = False,
) -> Choice:
    """The engine for this call.

    Raises EngineUnavailable, with the reason, where `engine="batched"` cannot serve it.
    """
    on_vmap = vmap_engine.build(target, randomness)
    if engine == "vmap":
        return Choice(on_vmap, "vmap", "engine='vmap' was asked for")
    obstacle = batched_engine.obstacle(target, params, rows, randomness=randomness, has_aux=has_aux)
    if obstacle is None:
        asked = "engine='batched' was asked for; " if engine == "batched" else ""
        proof = "every trainable parameter is consumed by an op that takes the example axis, and rows are independent"
        return Choice(batched_engine.build(target), "batched", asked + proof)
    if engine == "batched":
        raise EngineUnavailable(f"engine='batched' cannot serve {target.name}: {obstacle}; use engine='auto' or 'vmap'")
    return Choice(on_vmap, "vmap", obstacle)
