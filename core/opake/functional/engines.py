"""Which engine computes the gradients of a call, and why: the seam between what is asked for and who does it.

An engine is a function `(params, rows) -> Chunk` for one microbatch. `vmap` serves every target. `batched` is offered
where it can be proved right: each trainable parameter is consumed by an op that takes it with an example axis, the
model's rows do not reach each other, and its loss is known per row. The proof is asked of the patch state, so an op
that learns the example axis widens the engine without a change here.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import NamedTuple

import torch

from opake.errors import EngineUnavailable, InputError
from opake.functional import batched_engine, vmap_engine
from opake.functional.chunk import Chunk, Engine
from opake.functional.rows import Rows
from opake.functional.target import Target
from opake_kernels.checks import ExampleAxisError

ENGINES = ("auto", "vmap", "batched")
RANDOMNESS = ("different", "same", "error")
PROOF = "every trainable parameter is consumed by an op that takes the example axis, and rows are independent"


class Choice(NamedTuple):
    """An engine, its name, and the reason in words."""

    run: Engine
    name: str
    reason: str


def check_options(engine: str, randomness: str, capture: str | bool = "auto") -> None:
    """Raise InputError for an option that does not exist."""
    if engine not in ENGINES:
        raise InputError(f"engine is one of {', '.join(ENGINES)}; got {engine!r}")
    if randomness not in RANDOMNESS:
        raise InputError(f"randomness is one of {', '.join(RANDOMNESS)}; got {randomness!r}")
    if not isinstance(capture, bool) and capture != "auto":
        raise InputError(f"capture is 'auto', True or False; got {capture!r}")


class Chooser:
    """Chooses the engine for each call of one target; the proof is made anew when what it rests on has changed.

    That is anything in the model that `Watch` sees - modes, adapters, experts, patches, configs -, its loss function,
    the names of the trainable parameters, which rows are given, and whether autograd can record.
    """

    def __init__(self, target: Target, engine: str, randomness: str, has_aux: bool) -> None:
        self._target, self._engine, self._randomness, self._has_aux = target, engine, randomness, has_aux
        self._on_vmap = vmap_engine.build(target, randomness)
        # one for all choices, since a captured graph belongs to it
        self._on_batched = None if target.model is None else self._watched(batched_engine.build(target))
        self._unreached: str | None = None
        self._token: Hashable = None
        self._basis: tuple | None = None
        self._choice: Choice | None = None

    def __call__(self, params: Mapping[str, torch.Tensor], rows: Rows) -> Choice:
        """The engine for this call; EngineUnavailable, with the reason, where `engine="batched"` cannot serve it."""
        token = None if self._target.watch is None else self._target.watch.token()
        if token is not self._token:
            # what was found out about another state of the model
            self._token, self._unreached = token, None
        basis = self._rests_on(params, rows)
        if self._choice is None or self._basis != basis:
            self._choice, self._basis = self._choose(params, rows), basis
        return self._choice

    def after(self, choice: Choice) -> Choice:
        """What a call that was made with `choice` turned out to be made by."""
        return choice if self._unreached is None else Choice(self._on_vmap, "vmap", self._unreached)

    def _rests_on(self, params: Mapping[str, torch.Tensor], rows: Rows) -> tuple:
        if self._target.model is None:
            return ()
        from opake.patching.target import locate

        loss = batched_engine.loss_of(locate(self._target.model).model)
        given = tuple(leaf is None for leaf in rows.leaves)
        inference = batched_engine.cannot_record(params, rows)
        return (self._token, loss, inference, self._unreached, *params, rows.spec, given)

    def _choose(self, params: Mapping[str, torch.Tensor], rows: Rows) -> Choice:
        if self._engine == "vmap":
            return Choice(self._on_vmap, "vmap", "engine='vmap' was asked for")
        obstacle = self._unreached or batched_engine.obstacle(
            self._target, params, rows, randomness=self._randomness, has_aux=self._has_aux
        )
        if obstacle is None:
            assert self._on_batched is not None, "only for a model there is no obstacle"
            asked = "engine='batched' was asked for; " if self._engine == "batched" else ""
            return Choice(self._on_batched, "batched", asked + PROOF)
        if self._engine == "batched":
            raise EngineUnavailable(
                f"engine='batched' cannot serve {self._target.name}: {obstacle}; use engine='auto' or 'vmap'"
            )
        return Choice(self._on_vmap, "vmap", obstacle)

    def _watched(self, on_batched: Engine) -> Engine:
        """The batched engine; what it only finds out while running sends this call, and all after it, to vmap."""

        def run(params: Mapping[str, torch.Tensor], rows: Rows) -> Chunk:
            try:
                return on_batched(params, rows)
            except (batched_engine.UnreachedError, ExampleAxisError) as error:
                self._unreached = _why(error)
                if self._engine == "batched":
                    raise EngineUnavailable(
                        f"engine='batched' cannot serve {self._target.name}: {self._unreached}; use engine='vmap'"
                    ) from None
                return self._on_vmap(params, rows)

        return run


def _why(error: Exception) -> str:
    if isinstance(error, ExampleAxisError):
        return f"a layer lays rows and tokens out as one dimension: {error}"
    names = error.args[0]
    return f"the batched backward does not reach {len(names)} parameters, {names[0]} among them"
