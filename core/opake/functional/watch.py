"""Has anything that hangs on a model changed since the last step? A few milliseconds for thousands of modules.

Which engine may serve, where the parameters lie and what a captured graph depends on are read off the whole model, and
reading takes longer than replaying a step. So one look compares, by identity alone, what every module, its tables, its
hooks and its config hold with what they held before; only after a change is anything read anew. Arithmetic on the data
of a tensor is no change, another tensor or another address is.
"""

from __future__ import annotations

import contextlib
import weakref
from collections import Counter
from collections.abc import Collection, Hashable, Iterator, Mapping
from itertools import chain
from operator import is_
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from opake.swap import Places

if TYPE_CHECKING:
    from opake.patching.report import PatchReport


def current_report(model: nn.Module) -> PatchReport | None:
    """The very report object of the last `apply_model_patches`; None if the model is not patched."""
    from opake.patching.state import state_of
    from opake.patching.target import locate

    state = state_of(locate(model).model)
    return None if state is None else state.report


class Watch:
    """Looks at one model; `token()` is the same object for as long as nothing has changed."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._adapters: tuple[Hashable, tuple[list[str], torch.dtype] | None] | None = None
        self._look: _Look | None = None
        # whether nothing has run since the last look
        self._fresh = False

    def token(self) -> Hashable:
        if self._look is None or self._look.changed():
            self._look = _Look(self._model)
        self._fresh = True
        return self._look.token

    def held(self) -> Hashable:
        """What `token()` said last, without looking: for the rest of a call in which no module has run."""
        return self.token() if self._look is None else self._look.token

    def adapters_ahead(self, params: Mapping[str, torch.Tensor]) -> contextlib.AbstractContextManager:
        """A context in which the adapters among `params` are cast to the compute dtype once for all calls.

        By the last look: what an older one knows costs a copy that nobody asks for, or a cast in each call.
        """
        from opake.lora import ahead

        token = self.held()
        if self._adapters is None or self._adapters[0] is not token:
            self._adapters = (token, ahead.lower_precision(self._model))
        return ahead.casting(self._adapters[1], params)

    def state(self) -> Hashable:
        """What the model held at the last look, by value: equal again when everything is as it was before a change."""
        self.held()
        assert self._look is not None
        return self._look.state()

    def places(self) -> Places:
        """The places of the model's tensors, as of now, for a run that follows: a second one looks again."""
        if not self._fresh:
            self.token()
        self._fresh = False
        assert self._look is not None
        return self._look.places


class _Look:
    """What a model held at one moment."""

    def __init__(self, model: nn.Module) -> None:
        self.token = object()
        self.places = Places(model)
        self._model, self._report = model, current_report(model)
        self._addresses = list(map(_address, self.places.tensors))
        self._empty: list[Collection[Any]] = []
        self._tables: list[dict] = []
        self._lists: list[Collection[Any]] = []
        self._modules = list(_modules(model))
        self._kinds = list(map(type, self._modules))
        self._forwards = [(kind, kind.forward) for kind in dict.fromkeys(self._kinds)]
        for held in (*map(vars, self._modules), *_settings(self._modules)):
            self._note(held)
        self._sizes = self._count()
        self._values = list(self._flat())

    def _note(self, held: dict[str, Any]) -> None:
        """A dictionary and, one level down, the containers in it."""
        self._tables.append(held)
        for value in held.values():
            # counting fall-backs, as every step may do, is no change
            if isinstance(value, (dict, list, set)) and type(value) is not Counter:
                kind = self._empty if not value else self._tables if isinstance(value, dict) else self._lists
                kind.append(value)  # pyright: ignore[reportArgumentType]

    def _count(self) -> tuple[int, int]:
        return sum(map(len, self._tables)), sum(map(len, self._lists))

    def _flat(self) -> Iterator[Any]:
        return chain(chain.from_iterable(map(dict.values, self._tables)), chain.from_iterable(self._lists))

    def state(self) -> _State:
        tensors = [(_address(t), t.dtype, t.shape) for t in self.places.tensors]
        held = (self._report, *self._values)
        plain = [v if type(v) in _SIMPLE else _Same(v) for v in held if not isinstance(v, _ELSEWHERE)]
        return _State((tuple(tensors), tuple(plain), tuple(self._forwards)))

    def changed(self) -> bool:
        # loops in C: there are tens of thousands of entries
        return (
            any(self._empty)
            or current_report(self._model) is not self._report
            or self._count() != self._sizes
            or not all(map(is_, self._flat(), self._values))
            or not all(map(is_, map(type, self._modules), self._kinds))
            or any(kind.forward is not forward for kind, forward in self._forwards)
            or any(_address(t) != address for t, address in zip(self.places.tensors, self._addresses, strict=True))
        )


def _address(tensor: torch.Tensor) -> int:
    """Where a tensor lies; the identity of one without memory, such as a transform that has ended may leave behind."""
    try:
        return tensor.data_ptr()
    except RuntimeError:
        return id(tensor)


_SIMPLE = (bool, int, float, str, type(None))
# their contents are among the values, or they are told by their addresses
_ELSEWHERE = (dict, list, set, torch.Tensor)


class _Same:
    """An object that equals itself alone; it is not kept alive for that."""

    def __init__(self, held: object) -> None:
        self._id = id(held)
        try:
            self._held = weakref.ref(held)
        except TypeError:
            self._held = lambda: held

    def __hash__(self) -> int:
        return self._id

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and self._held() is not None and self._held() is other._held()


class _State:
    """A long tuple that is hashed once, not at each look into a table."""

    def __init__(self, held: tuple[Hashable, ...]) -> None:
        self._held, self._hash = held, hash(held)

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _State) and (self is other or self._held == other._held)


def _settings(modules: Collection[nn.Module]) -> Iterator[dict[str, Any]]:
    """What the configs of a model hold, those inside a config too."""
    configs = {id(config): config for module in modules if (config := vars(module).get("config")) is not None}
    for config in configs.values():
        held = getattr(config, "__dict__", None)
        if isinstance(held, dict):
            yield held
            inner = (getattr(below, "__dict__", None) for name, below in held.items() if name.endswith("_config"))
            yield from (below for below in inner if isinstance(below, dict))


def _modules(model: nn.Module) -> Iterator[nn.Module]:
    """Every module once; `Module.modules` takes ten times as long on a deep model."""
    stack, seen = [model], {id(model)}
    while stack:
        module = stack.pop()
        yield module
        for child in module._modules.values():
            if child is not None and id(child) not in seen:
                seen.add(id(child))
                stack.append(child)
