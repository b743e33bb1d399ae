"""Keep of a declaration what is right: each record served by its model, and the gradients of the whole equal a loop.

The declaration is written as a plugin, found by entry point in a registry that sees no other, and put through the check
of `opake families check`, then through the same with LoRA on every linear layer. A flag that gives wrong numbers is
left out; what remains wrong after that is said.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from opake.checking.adapters import with_adapters
from opake.checking.family import Outcome, check_family
from opake.checking.isolated import Distribution, isolated_registry
from opake.checking.judge import judged, loop_grads, vmap_grads
from opake.checking.sweep import told
from opake.checking.tiny import tiny_batch, tiny_model
from opake.errors import InputError
from opake.patches import apply_model_patches
from opake.patching.flags import FLAGS

from . import render
from .declaration import LORA, MOE, Declaration

SERVED = ("applied", "already", "stock")


def prove(found: Declaration) -> Outcome:
    """Drop what is not served or not right from `found`, and return the outcome of the check of the rest.

    Raises InputError where the unpatched model does not run by itself, so that there is nothing to compare with.
    """
    stock = tiny_model(found.model_type)
    try:
        stock = _with_lora(stock)
    except ValueError as error:
        found.drop([line for line in found.lines if line.hook == LORA], f"PEFT: {error}")
    wanted = _by_loop(found, stock)
    _drop_unserved(found, stock)
    _drop_wrong(found, stock, wanted)
    with _installed(found):
        return check_family(found.model_type)


def _by_loop(found: Declaration, stock: Any) -> dict[str, Any]:
    try:
        return loop_grads(stock, tiny_batch())
    except Exception as error:
        raise InputError(
            f"a tiny model of {found.model_type!r} does not run by itself, so nothing can be compared: {told(error)}"
        ) from error


def _drop_unserved(found: Declaration, stock: Any) -> None:
    with _installed(found):
        report = apply_model_patches(copy.deepcopy(stock), **_flags(found))
    # a row names the line of source that declared it
    text = render.module(found).splitlines()
    for line in list(found.lines):
        source = f"{found.module}.py:{text.index(line.code) + 1}"
        rows = [row for row in report.rows if row.source == source or row.hook == line.hook == MOE]
        if not any(row.state in SERVED for row in rows):
            found.drop([line], _reason(rows))


def _drop_wrong(found: Declaration, stock: Any, wanted: dict[str, Any]) -> None:
    # without `moe` some experts do not run under transforms at all
    alone = {flag: False for flag in _flags(found) if flag != "moe"}
    if reason := _wrong(found, stock, wanted, alone):
        found.left_out.append(f"opake_compat_patches: without any of these records {reason}")
        return
    for flag in _flags(found):
        if reason := _wrong(found, stock, wanted, {**alone, flag: True}):
            found.drop([line for line in found.lines if line.flag == flag], f"with {flag}=True {reason}")


def _wrong(found: Declaration, stock: Any, wanted: dict[str, Any], flags: dict[str, bool]) -> str:
    """Why per-example gradients are not right with these flags, empty if they are."""
    model = copy.deepcopy(stock)
    try:
        with _installed(found):
            apply_model_patches(model, **flags)
            error, right, note = judged(vmap_grads(model, tiny_batch()), wanted, stock, tiny_batch())
    except Exception as error:
        return f"the model does not run under vmap: {told(error)}"
    return "" if right else f"per-example gradients are wrong by {error:.0e} ({note})"


def _flags(found: Declaration) -> dict[str, Any]:
    named = {line.flag for line in found.lines}
    return {flag: True for flag in FLAGS if flag in named}


def _reason(rows: list[Any]) -> str:
    return next((row.reason for row in rows if row.reason), "the model has no such module")


def _with_lora(model: Any) -> Any:
    import torch

    with warnings.catch_warnings(), torch.random.fork_rng(devices=[]):
        warnings.simplefilter("ignore")
        torch.manual_seed(0)
        return with_adapters(model, r=2, lora_alpha=2, init_lora_weights=False).train()


@contextmanager
def _installed(found: Declaration) -> Iterator[None]:
    modules = {found.module: render.module(found)}
    with isolated_registry(
        Distribution("scaffold", families=dict.fromkeys(found.names, found.module), modules=modules)
    ):
        yield
