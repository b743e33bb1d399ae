"""The models, batches and reference gradients of one suite, each made once and handed to every test that asks.

Stock models are never patched and patched ones are built from their own config, so that a test compares two models
that share nothing but the values of their parameters. A test that changes a model builds one for itself.
"""

# ruff: noqa: TID253
from __future__ import annotations

import contextlib
import copy
import functools
import gc
import warnings
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch

from opake.checking.tiny import tiny_batch, tiny_config, tiny_model
from opake.errors import GenericFamilyWarning
from opake.patches import PatchReport, apply_model_patches
from opake.patching.builtin import forget_registrations
from opake.patching.state import any_live

from .adapters import with_lora
from .oracle import batch_gradients, model_loop_gradients, relative_errors
from .tables import keep_fresh

if TYPE_CHECKING:
    from peft import PeftModel
    from transformers import PreTrainedConfig, PreTrainedModel

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp64": torch.float64}
MADE_ONCE = ("fresh", "fresh_adapted", "stock", "patched", "reference", "adapted_reference", "rounding", "applicable")
Rows = dict[str, torch.Tensor]


class Bench:
    """What the tests of one suite share. `suite` is a class with the attributes and hooks of `ModelSuite`."""

    def __init__(self, suite: Any) -> None:
        self.suite = suite
        # the libraries are a million objects that every collection would walk through
        gc.freeze()
        for method in MADE_ONCE:
            setattr(self, method, functools.cache(getattr(self, method)))

    def close(self) -> None:
        """Let go of every model, and of our names in the public registries if no patched model is left."""
        for method in MADE_ONCE:
            delattr(self, method)
        # models are cycles
        gc.unfreeze()
        gc.collect()
        if not any_live():
            forget_registrations()

    def config(self) -> PreTrainedConfig:
        """A fresh config."""
        given = self.suite.config
        return tiny_config(self.suite.model_type, **given) if isinstance(given, Mapping) else copy.deepcopy(given)

    def build(self, attention: str, dtype: str = "fp32") -> PreTrainedModel:
        """A fresh stock model in training mode; its parameters depend on nothing but the suite."""
        return copy.deepcopy(self.fresh(attention, dtype))

    def adapted(self, attention: str) -> PeftModel:
        """A fresh stock model with a LoRA on every linear layer, see `with_lora`."""
        return copy.deepcopy(self.fresh_adapted(attention))

    def fresh(self, attention: str, dtype: str = "fp32") -> PreTrainedModel:
        """What `build` copies, which takes a quarter of the time of making it; never run, and never changed."""
        model = tiny_model(self.config(), attention=attention)
        self.suite.settle(model)
        model = model if dtype == "fp32" else self._cast(model, attention, DTYPES[dtype])
        if dtype == "fp64" and getattr(model.config, "_experts_implementation", None):
            # Transformers' grouped products know no float64
            model.set_experts_implementation("eager")
        keep_fresh(model)
        return model

    def fresh_adapted(self, attention: str) -> PeftModel:
        """What `adapted` copies; never changed."""
        return with_lora(self.build(attention))

    def _cast(self, model: PreTrainedModel, attention: str, dtype: torch.dtype) -> PreTrainedModel:
        # built in its dtype, as from_pretrained would: a cast of the whole model would round the rotary tables too
        from transformers import AutoModelForCausalLM

        with torch.random.fork_rng(devices=[]):
            cast = AutoModelForCausalLM.from_config(self.config(), attn_implementation=attention, dtype=dtype)
        with torch.no_grad():
            for mine, theirs in zip(cast.parameters(), model.parameters(), strict=True):
                mine.copy_(theirs)
        return cast.train()

    def stock(self, attention: str, dtype: str = "fp32") -> PreTrainedModel:
        """The shared stock model; `rounded` is float32 with parameters that bfloat16 can hold."""
        if dtype != "rounded":
            return self.build(attention, dtype)
        model = self.build(attention)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.copy_(parameter.bfloat16())
        return model

    def patched(self, attention: str, dtype: str = "fp32", **flags: Any) -> PreTrainedModel:
        """The shared patched model."""
        model = self.build(attention, dtype)
        self.apply(model, **flags)
        return model

    def apply(self, model: torch.nn.Module, **flags: Any) -> PatchReport:
        """Patch a model; that the generic patches are used is no news in a suite that is about them."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", GenericFamilyWarning)
            return apply_model_patches(model, **{**self.suite.flags, **flags})

    def batch(self, padding: str = "right", **sizes: int) -> Rows:
        """Rows of different lengths; `ones` are full rows with a mask of ones."""
        rows = tiny_batch(padding="none" if padding == "ones" else padding, **sizes)
        if padding == "ones":
            rows["attention_mask"] = torch.ones_like(rows["input_ids"])
        return self.suite.inputs(rows)

    def reference(self, attention: str, dtype: str, padding: str) -> Rows:
        """Per-example gradients of the stock model, one row and one backward at a time."""
        return model_loop_gradients(self.stock(attention, dtype), **self.batch(padding))

    def adapted_reference(self, attention: str, padding: str) -> Rows:
        """Per-example gradients of the adapters of the stock model, one row and one backward at a time."""
        return model_loop_gradients(self.adapted(attention), **self.batch(padding))

    def applicable(self, *flags: str) -> tuple[tuple[str, ...], str]:
        """Which of these flags find something to patch in the suite's model, and what is said where none does."""
        report = self.apply(self.build(self.suite.attentions[0]), **dict.fromkeys(flags, True))
        rows = [row for flag in flags for row in report.find(flag=flag)]
        applied = {row.flag for row in rows if row.state == "applied"}
        reasons = {f"{row.record}: {row.reason}" for row in rows}
        return tuple(sorted(applied)), "; ".join(sorted(reasons)) or f"the family declares no {', '.join(flags)}"

    def rounding(self, attention: str, each: bool = True) -> dict[str, float]:
        """How far the stock model is from itself in float32 when every number of its backward pass rounds otherwise.

        Relative, by parameter, at worst over paddings, for the gradients of each row or of the whole batch; the loss is
        multiplied by a small odd number and the gradient divided by it. The gradient of one number that sums over all
        tokens may lose a hundred times what others do.
        """
        stock, worst = self.build(attention), dict[str, float]()
        gradients: Any = model_loop_gradients if each else batch_gradients
        for padding in ("right", "none", "left"):
            rows = self.batch(padding)
            want = gradients(stock, **rows)
            for factor in (3, 5, 7):
                with _loss_times(stock, factor):
                    found = {name: gradient / factor for name, gradient in gradients(stock, **rows).items()}
                for name, error in relative_errors(found, want).items():
                    worst[name] = max(error, worst.get(name, 0.0))
        return worst


@contextlib.contextmanager
def _loss_times(model: torch.nn.Module, factor: float) -> Iterator[None]:
    def scale(_: Any, __: Any, output: Any) -> None:
        output.loss = output.loss * factor

    handle = model.register_forward_hook(scale)
    try:
        yield
    finally:
        handle.remove()
