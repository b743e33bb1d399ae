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

from opake.checking.family import TOLERANCE, Outcome, check_family, loop_grads, relative_error, vmap_grads
from opake.checking.isolated import Distribution, isolated_registry
from opake.checking.tiny import tiny_batch, tiny_model
from opake.patches import apply_model_patches
from opake.patching.flags import FLAGS

from . import render
from .declaration import LORA, MOE, Declaration

SERVED = ("applied", "already", "stock")


def prove(found: Declaration) -> Outcome:
    """Drop what is not served or not right from `found`, and return the outcome of the check of the rest."""
    stock = tiny_model(found.model_type)
    try:
        stock = _with_lora(stock)
    except ValueError as error:
        found.drop([line for line in found.lines if line.hook == LORA], f"PEFT: {error}")
    _drop_unserved(found, stock)
    _drop_wrong(found, stock)
    with _installed(found):
        return check_family(found.model_type)


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


def _drop_wrong(found: Declaration, stock: Any) -> None:
    batch = tiny_batch()
    wanted = loop_grads(stock, batch)
    # without `moe` some experts do not run under transforms at all
    others = {flag: False for flag in _flags(found) if flag != "moe"}
    for flag in _flags(found):
        with _installed(found):
            model = copy.deepcopy(stock)
            apply_model_patches(model, **{**others, flag: True})
            error = relative_error(vmap_grads(model, batch), wanted)
        if not error <= TOLERANCE:
            lines = [line for line in found.lines if line.flag == flag]
            found.drop(lines, f"with {flag}=True per-example gradients are wrong by {error:.0e}")


def _flags(found: Declaration) -> dict[str, Any]:
    named = {line.flag for line in found.lines}
    return {flag: True for flag in FLAGS if flag in named}


def _reason(rows: list[Any]) -> str:
    return next((row.reason for row in rows if row.reason), "the model has no such module")


def _with_lora(model: Any) -> Any:
    import torch
    from peft import LoraConfig, get_peft_model

    with warnings.catch_warnings(), torch.random.fork_rng(devices=[]):
        warnings.simplefilter("ignore")
        torch.manual_seed(0)
        options = LoraConfig(r=2, lora_alpha=2, target_modules="all-linear", init_lora_weights=False)
        return get_peft_model(model, options).train()


@contextmanager
def _installed(found: Declaration) -> Iterator[None]:
    modules = {found.module: render.module(found)}
    with isolated_registry(Distribution("scaffold", families={found.model_type: found.module}, modules=modules)):
        yield
