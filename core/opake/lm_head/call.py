"""One loss-only call of a model: while it runs, the linear inside the model's head returns `DeferredLogits`.

The linear's forward is wrapped once, on the instance, and asks a context variable whether such a call is under way; so
calls nest, threads do not meet, and a deep copy works. The innermost plain linear is what is wrapped: LoRA around it
adds to what it returns, `modules_to_save` chooses between copies, and both go on working by themselves.
"""

# ruff: noqa: TID253
from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any

import torch
from torch import nn

from opake import hf
from opake.patching import notes
from opake.patching.instance import untouched
from opake_kernels.launch import autocasting

from .deferred import DeferredLogits
from .head import Head

_call: ContextVar[LossOnly | None] = ContextVar("opake_loss_only", default=None)
# how many calls are under way on all threads: torch.compile can read a number, but no context variable
_runs = 0
_counting = threading.Lock()


class LossOnly:
    """A loss-only call of `model`: defers its head and notes on the model why logits were computed all the same."""

    def __init__(self, model: nn.Module, chunk: int | bool | None, by_row: bool) -> None:
        self.model, self.chunk, self.by_row, self.deferred, self.noted = model, chunk, by_row, 0, False

    def note(self, reason: str) -> None:
        # one reason a call: the first is the cause
        if not self.noted:
            self.noted = True
            head = hf.output_embeddings(self.model)
            kind = "" if head is None or is_plain(head) else f" (the head is a {_named(type(head))})"
            notes.note(self.model, f"loss_only: logits were computed, {reason}{kind}")

    def defer(self, inner: Callable[..., Any], linear: Any, x: torch.Tensor) -> Any:
        weight, bias = linear.weight, linear.bias
        reason = _unplain(linear, weight, bias)
        if reason is not None:
            self.note(reason)
            return inner(linear, x)
        self.deferred += 1
        weight, bias = _of_the_same_examples(weight, bias)
        compute = (lambda: inner(linear, x)) if weight.dim() == 2 else (lambda: _by_example(x, weight, bias))
        autocast = autocasting(x)
        dtype = torch.get_autocast_dtype(x.device.type) if autocast else x.dtype
        # fused on CUDA, chunked elsewhere, also where Triton is interpreted
        chunk = self.chunk or (None if x.is_cuda else True)
        return DeferredLogits(Head(weight, bias, compute, self.note, chunk, self.by_row), x, dtype)


def _unplain(linear: nn.Module, weight: Any, bias: Any) -> str | None:
    """Why the linear is none that the fused loss could replace, None if it could."""
    for tensor in (weight, bias):
        if tensor is not None and (type(tensor) not in (torch.Tensor, nn.Parameter) or tensor.is_meta):
            return f"the head's weight is a {type(tensor).__name__} on {tensor.device}"
    if not untouched(linear, "forward"):
        return "somebody wrapped the head's forward"
    # hooks run on what forward returns; those of the forward's input have run already
    if linear._forward_hooks or linear._backward_hooks or linear._backward_pre_hooks:
        return "the head has hooks that look at its output"
    return None


def _named(cls: type) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"


def _of_the_same_examples(weight: torch.Tensor, bias: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Weight and bias, where only one of them has an example axis both with it; nothing is copied."""
    if bias is None or weight.dim() == bias.dim() + 1:
        return weight, bias
    if bias.dim() == 2:
        return weight.expand(len(bias), *weight.shape), bias
    return weight, bias.expand(len(weight), *bias.shape)


def _by_example(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """The logits where each example has a weight (B, V, H) of its own."""
    B, H = weight.shape[0], x.shape[-1]
    logits = x.reshape(B, -1, H) @ weight.transpose(1, 2)
    if bias is not None:
        logits = logits + bias.unsqueeze(1)
    return logits.reshape(*x.shape[:-1], -1)


def linear_forward(inner: Callable[..., Any], self: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """The wrapped forward of a linear in a head."""
    if not _runs:
        return inner(self, *args, **kwargs)
    call = _call.get()
    if call is None or len(args) != 1 or kwargs:
        return inner(self, *args, **kwargs)
    return call.defer(inner, self, args[0])


@contextlib.contextmanager
def running(call: LossOnly | None) -> Iterator[None]:
    """Make `call` the one under way; None suspends it, for an ordinary call inside a loss-only one."""
    _count(1)
    token = _call.set(call)
    try:
        yield
    finally:
        _call.reset(token)
        _count(-1)


def _count(step: int) -> None:
    global _runs
    with _counting:
        _runs += step


def under_way() -> bool:
    return bool(_runs) and _call.get() is not None


def is_plain(module: nn.Module) -> bool:
    """Whether this is a linear layer that computes as `nn.Linear` does."""
    return isinstance(module, nn.Linear) and type(module).forward is nn.Linear.forward


def head_linears(head: nn.Module) -> list[nn.Linear]:
    """The plain linears that may be what a head computes with: itself, or those inside PEFT's wrappers.

    One whose forward somebody wrapped on the instance is left out: what is wrapped around it may load its weight.
    """
    if is_plain(head):
        return [head] if "forward" not in vars(head) else []  # type: ignore[list-item]
    return [linear for module in hf.wrapped_layers(head) for linear in head_linears(module)]
