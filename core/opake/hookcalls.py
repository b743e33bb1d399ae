"""What a plugin's hooks return, each record with the line of source that made it.

pluggy hands generators on unconsumed and knows nothing of lines. Here every implementation is wrapped before it is
registered: what it yields becomes a list, so that a wrapper of an extension can drop, replace and reorder records, and
the line of each `yield` is kept in a ledger. Which plugins take part is the registry's business.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import CodeType, GeneratorType, ModuleType
from typing import Any, NamedTuple

import pluggy

from opake import hookspecs
from opake.errors import FamilyInvalid, OpakeError
from opake.hookspecs import HOOKS, PROJECT

# what the core asks of every record, see opake.records
RECORD_METHODS = ("sites", "fits", "apply")


class Source(NamedTuple):
    """A line of a plugin: `name` is short and readable (`opake_families/llama.py:12`), `path` the whole file name."""

    name: str
    path: str


class Planned(NamedTuple):
    """One record of a family's plan, the hook that returned it and where, e.g. `opake_families/llama.py:12`."""

    record: Any
    hook: str
    source: str
    path: str


@dataclass(frozen=True, slots=True)
class Plugin:
    """An imported plugin: the object that carries the hooks, a unique name, and a label for messages."""

    name: str
    label: str
    target: Any


@dataclass(slots=True)
class Ledger:
    """Where each record of one call was made. Records are held by identity: two equal ones may stand on two lines."""

    _entries: dict[int, tuple[Any, Source]] = field(default_factory=dict)

    def note(self, record: Any, source: Source) -> None:
        self._entries.setdefault(id(record), (record, source))

    def source(self, record: Any) -> Source:
        return self._entries[id(record)][1]


def manager(plugins: Sequence[Plugin], ledger: Ledger | None = None) -> pluggy.PluginManager:
    """A manager of its own for one family and its extensions, so that no other family can answer.

    plugins: the family first, then its extensions; pluggy calls the last registered first, hence the reversal
    Raises FamilyInvalid on an unknown hook or argument and on a plugin without any hook.
    """
    pm = pluggy.PluginManager(PROJECT)
    pm.add_hookspecs(hookspecs)
    for plugin in reversed(plugins):
        traced = _traced_plugin(pm, plugin, ledger or Ledger())
        try:
            pm.register(traced, plugin.name)
            pm.check_pending()
        except pluggy.PluginValidationError as error:
            raise FamilyInvalid(f"{plugin.label}: {error}; the hooks are {', '.join(HOOKS)}") from error
        if not pm.get_hookcallers(traced):
            raise FamilyInvalid(f"{plugin.label} implements no hook; the hooks are {', '.join(HOOKS)}")
    return pm


def plan(plugins: Sequence[Plugin], hf: Any, config: Any, hooks: Iterable[str]) -> list[Planned]:
    """Ask the hooks, in the order given, and return their records in the order called, the family's first."""
    ledger = Ledger()
    pm = manager(plugins, ledger)
    planned = []
    for hook in hooks:
        answer = getattr(pm.hook, hook)(hf=hf, config=config)
        for record in _flat(hook, answer):
            planned.append(Planned(record, hook, *ledger.source(record)))
    return planned


def _traced_plugin(pm: pluggy.PluginManager, plugin: Plugin, ledger: Ledger) -> ModuleType:
    """A stand-in that carries the plugin's hook implementations, each wrapped."""
    stand_in = ModuleType(plugin.name)
    for name in dir(plugin.target):
        options = pm.parse_hookimpl_opts(plugin.target, name)
        if options is None:
            continue
        hook = options.get("specname") or name
        if options.get("hookwrapper"):
            raise FamilyInvalid(
                f"{plugin.label}: {hook} says hookwrapper=True; write hookimpl(wrapper=True), see pluggy"
            )
        trace = _traced_wrapper if options.get("wrapper") else _traced_impl
        setattr(stand_in, name, trace(getattr(plugin.target, name), hook, plugin.label, ledger))
    return stand_in


def _traced_impl(function: Callable[..., Any], hook: str, label: str, ledger: Ledger) -> Callable[..., Any]:
    # functools.wraps keeps both the marker of the hookimpl and the signature that pluggy checks
    @functools.wraps(function)
    def traced(*args: Any) -> Any:
        where = _first_line(function)
        try:
            made = list(_made(function(*args), hook, where))
        except OpakeError:
            raise
        except (Exception, SystemExit) as error:
            raise FamilyInvalid(f"{label}: {hook} raised {_described(error, where)}") from error
        for record, source in made:
            _check_record(record, hook, label, source)
            ledger.note(record, source)
        records = [record for record, _ in made]
        return records if hook != "opake_moe_patch" else (records[0] if records else None)

    return traced


def _traced_wrapper(function: Callable[..., Any], hook: str, label: str, ledger: Ledger) -> Callable[..., Any]:
    @functools.wraps(function)
    def traced(*args: Any) -> Iterator[Any]:
        where = _first_line(function)
        try:
            result = yield from _one_yield(function(*args))
            _require_answer(result, hook)
        except OpakeError:
            raise
        except (Exception, SystemExit) as error:
            raise FamilyInvalid(f"{label}: the wrapper of {hook} raised {_described(error, where)}") from error
        for record in _flat(hook, result):
            _check_record(record, hook, label, where)
            ledger.note(record, where)
        return result

    return traced


def _one_yield(wrapper: Any) -> Iterator[Any]:
    """Runs the wrapper, which has to be a generator that yields once."""
    if not isinstance(wrapper, GeneratorType):
        raise TypeError("a wrapper asks the others with `answers = yield` and returns what it makes of them")
    stop = object()
    if next(wrapper, stop) is stop:
        raise TypeError("it ended without a yield, so nobody else was asked")
    try:
        answers = yield
    except Exception as error:
        return _ended(wrapper.throw, error)
    return _ended(wrapper.send, answers)


def _ended(go_on: Callable[[Any], Any], value: Any) -> Any:
    try:
        go_on(value)
    except StopIteration as end:
        return end.value
    raise TypeError("it yielded a second time")


def _require_answer(result: Any, hook: str) -> None:
    """A wrapper that forgets to return would drop every record of everybody; [] says so on purpose."""
    if hook != "opake_moe_patch" and not isinstance(result, list | tuple):
        raise TypeError(f"returned {result!r}, not the list of lists of records that `answers = yield` gave it")


def _made(result: Any, hook: str, where: Source) -> Iterator[tuple[Any, Source]]:
    """The records of one implementation with their lines; nothing is returned by a hook that returns None."""
    if result is None:
        return
    if hook == "opake_moe_patch":
        if isinstance(result, GeneratorType):
            raise TypeError("yields; this hook returns its one record, or None")
        yield result, where
    elif isinstance(result, GeneratorType):
        for record in result:
            yield record, _yield_line(result)
    elif isinstance(result, Iterable) and not isinstance(result, str | bytes):
        for record in result:
            yield record, where
    else:
        raise TypeError(f"returned {result!r}, not an iterable of records")


def _flat(hook: str, answer: Any) -> Iterator[Any]:
    """Records of an answer: one or None from the firstresult hook, else a list for each implementation."""
    if hook == "opake_moe_patch":
        answer = [answer]
    for part in answer or ():
        if isinstance(part, list | tuple):
            yield from part
        elif part is not None:
            yield part


def _check_record(record: Any, hook: str, label: str, source: Source) -> None:
    missing = [name for name in RECORD_METHODS if not callable(getattr(record, name, None))]
    if missing or isinstance(record, type):
        kind = f"the class {record.__name__}" if isinstance(record, type) else repr(record)
        raise FamilyInvalid(
            f"{label}: {hook} returned {kind} ({source.name}), not a record of opake.records"
            f" (a record has {', '.join(RECORD_METHODS)})"
        )


def _first_line(function: Callable[..., Any]) -> Source:
    code = getattr(function, "__func__", function).__code__
    return _source(code, function.__module__, code.co_firstlineno)


def _yield_line(generator: GeneratorType) -> Source:
    """The line of the `yield` at which this generator stands; `yield from helper()` is followed into the helper."""
    while isinstance(generator.gi_yieldfrom, GeneratorType):
        generator = generator.gi_yieldfrom
    frame = generator.gi_frame
    assert frame is not None, "a generator that has just yielded has a frame"
    return _source(frame.f_code, frame.f_globals.get("__name__", ""), frame.f_lineno)


def _source(code: CodeType, module: str, line: int) -> Source:
    path = Path(code.co_filename)
    depth = module.count(".") + (2 if path.stem == "__init__" else 1)
    return Source(f"{'/'.join(path.parts[-depth:])}:{line}", str(path))


def _described(error: BaseException, where: Source) -> str:
    """The error and the plugin's own line that raised it: the deepest frame in the file of the hook."""
    place = where.name
    frame = error.__traceback__
    while frame is not None:
        if frame.tb_frame.f_code.co_filename == where.path:
            module = frame.tb_frame.f_globals.get("__name__", "")
            place = _source(frame.tb_frame.f_code, module, frame.tb_lineno).name
        frame = frame.tb_next
    return f"{type(error).__name__}: {error} ({place})"
