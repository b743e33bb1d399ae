"""One reversible change of one attribute, and the two words a record answers with: `Undo` and `Skip`.

An `Undo` holds what was there before and what opake put there, so that `restore` can tell its own object from a wrapper
that someone else added later. It holds no closure: a deep copy of a patched model carries undos of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final


class _Missing:
    """Marks a key that was absent; one object in the process, also across deep copies."""

    def __repr__(self) -> str:
        return "<absent>"

    def __copy__(self) -> _Missing:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> _Missing:
        return self


MISSING: Final = _Missing()


@dataclass(frozen=True, slots=True)
class Skip:
    """Why a record does not apply to a site. `state` is `stock` where the stock code is the right answer."""

    reason: str
    state: str = "skipped"


@dataclass(slots=True)
class Change:
    """The attribute or dictionary entry `key` of `owner` was `before` and is now `ours`; `where` names it in messages.

    `container` names the dictionary attribute of the owner that holds the key (hooks, say); None means the owner's own
    attributes. The owner is kept, not its `__dict__`, so that a deep copy points into the copied owner.
    """

    where: str
    owner: object
    key: Any
    before: Any
    ours: Any
    container: str | None = None

    def store(self) -> Any:
        return vars(self.owner) if self.container is None else vars(self.owner)[self.container]

    def slot(self) -> tuple[int, str | None, Any]:
        """The same for two changes of one place."""
        return id(self.owner), self.container, self.key

    def now(self) -> Any:
        return self.store().get(self.key, MISSING)

    def set(self, value: Any) -> None:
        """Write the place directly: nothing of the owner's `__setattr__` runs, except where the owner is a class."""
        if isinstance(self.owner, type):
            type.__delattr__(self.owner, self.key) if value is MISSING else type.__setattr__(
                self.owner, self.key, value
            )
        elif value is MISSING:
            self.store().pop(self.key, None)
        else:
            self.store()[self.key] = value

    def revert(self) -> None:
        self.set(self.before)


@dataclass(slots=True)
class Undo:
    """The changes that one record made at one site, newest last, with an optional step before they are taken back.

    `before_revert` is called with `args`; both must survive `copy.deepcopy` (a module-level function and plain data).
    """

    changes: list[Change] = field(default_factory=list)
    before_revert: Callable[..., None] | None = None
    args: tuple[Any, ...] = ()

    def __call__(self) -> None:
        if self.before_revert is not None:
            self.before_revert(*self.args)
        for change in reversed(self.changes):
            change.revert()


def put(owner: object, key: Any, ours: Any, *, where: str | None = None, container: str | None = None) -> Change:
    """Set one instance attribute (or one entry of a dictionary attribute) and return the change that takes it back.

    `__setattr__` is not used: nothing of the owner's class runs, and its class and other instances are untouched.
    """
    change = Change(where or f"{type(owner).__name__}.{container or key}", owner, key, MISSING, ours, container)
    change.before = change.now()
    change.set(ours)
    return change


def conflicts(undos: Sequence[Undo]) -> list[str]:
    """What stands in the way of taking `undos` (oldest first) back: somebody else's object on top of ours."""
    now: dict[tuple[int, str | None, Any], Any] = {}
    found = []
    for change in (change for undo in reversed(undos) for change in reversed(undo.changes)):
        there = now.get(change.slot(), change.now())
        if there is not change.ours:
            found.append(f"{change.where} is {there!r:.200}, but opake put {change.ours!r:.200} there")
        now[change.slot()] = change.before
    return found
