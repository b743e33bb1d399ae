"""Every probe of what the installed Transformers and PEFT offer, by signature or attribute, and nothing else.

No version string is compared anywhere: a feature is there or it is not. What follows from it is up to the caller.
"""

from __future__ import annotations

import functools
import inspect
import sys
import weakref
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from types import ModuleType
from typing import Any

import torch
from torch import nn

INPUT_GRAD_HOOK = "make_inputs_require_grad"


def is_pretrained(model: object) -> bool:
    """Whether this is a Transformers model (as opposed to any `nn.Module`)."""
    from transformers import PreTrainedModel

    return isinstance(model, PreTrainedModel)


def model_type(model: Any) -> str:
    """`config.model_type` of a Transformers model."""
    return model.config.model_type


def modeling_module(model: nn.Module) -> ModuleType:
    """The modeling module of a model, also where its class was derived at run time (by FSDP or a user)."""
    classes = [c for c in type(model).__mro__ if c.__module__.rpartition(".")[2].startswith("modeling_")]
    return sys.modules[(classes[0] if classes else type(model)).__module__]


class Absent:
    """Stands in for a class that the installed Transformers does not have; a record about it is skipped."""

    def __init__(self, module: str, name: str) -> None:
        self.__qualname__ = name
        self.reason = f"{module} of the installed Transformers has no {name}"
        self._module = module

    def __getattr__(self, name: str) -> Absent:
        # what hangs on an absent class is absent as well
        if name.startswith("_"):
            raise AttributeError(name)
        return Absent(self._module, f"{self.__qualname__}.{name}")


class ModelingModule:
    """A modeling module as a family sees it: a missing name disables one record, not the whole family."""

    def __init__(self, module: ModuleType) -> None:
        self.module = module
        self.__name__ = module.__name__.rpartition(".")[2]

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        found = getattr(self.module, name, None)
        return Absent(self.__name__, name) if found is None else found

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ModelingModule) and other.module is self.module

    def __hash__(self) -> int:
        return hash(self.module)


def wrapped(model: nn.Module) -> nn.Module | None:
    """The model inside a wrapper (PEFT, DistributedDataParallel, torch.compile), or None if this is no wrapper."""
    base = getattr(model, "get_base_model", None)
    if callable(base):
        return base()  # type: ignore[return-value]
    inner = getattr(model, "_orig_mod", None)
    if inner is None and isinstance(model, nn.parallel.DistributedDataParallel | nn.DataParallel):
        inner = model.module
    return inner


def output_embeddings(model: nn.Module) -> nn.Module | None:
    """The module that turns hidden states into logits, None if the model has none."""
    try:
        head = model.get_output_embeddings()  # type: ignore[operator]
    except (AttributeError, NotImplementedError):
        return None
    return head if isinstance(head, nn.Module) else None


def wrapped_layers(module: nn.Module) -> list[nn.Module]:
    """The layers inside a wrapper of PEFT's: the base layer of an adapter, or the copies of `modules_to_save`."""
    held = module._modules
    copies = held.get("modules_to_save")
    layers = [held.get("original_module"), held.get("base_layer"), *(copies.children() if copies is not None else ())]
    return [layer for layer in layers if layer is not None]


def _parameters(fn: Callable[..., Any]) -> Mapping[str, inspect.Parameter]:
    """Parameters of `fn` through its decorators; remembered as long as `fn` lives, since forwards ask at every call."""
    found = _signatures.get(fn)
    if found is None:
        found = _signatures[fn] = inspect.signature(fn).parameters
    return found


_signatures: weakref.WeakKeyDictionary[Callable[..., Any], Mapping[str, inspect.Parameter]]
_signatures = weakref.WeakKeyDictionary()


def accepts(fn: Callable[..., Any], name: str) -> bool:
    """Whether `fn` names a parameter `name`, looking through decorators."""
    return name in _parameters(fn)


def takes_use_cache(model: nn.Module, forward: Callable[..., Any]) -> bool:
    """Whether `forward`, the unbound forward of `model`, names `use_cache` or passes it on to a model that does."""
    if accepts(forward, "use_cache"):
        return True
    inner = getattr(model, "base_model", None)
    if inner is model:
        # a composite model hands its keywords to its text model
        inner = getattr(model, "language_model", None)
    passes_on = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in _parameters(forward).values())
    if not passes_on or inner is model or not isinstance(inner, nn.Module):
        return False
    return takes_use_cache(inner, type(inner).forward)


def positional_names(fn: Callable[..., Any]) -> tuple[str, ...]:
    """Names of the positional parameters of an unbound method, `self` left out."""
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return tuple(p.name for p in _parameters(fn).values() if p.kind in kinds)[1:]


def arguments(fn: Callable[..., Any]) -> tuple[str, ...]:
    """Names of all parameters of a function."""
    return tuple(_parameters(fn))


def position_of(fn: Callable[..., Any], name: str) -> int | None:
    """The place of a positional parameter of an unbound method, not counting `self`; None if it is not positional."""
    names = positional_names(fn)
    return names.index(name) if name in names else None


CACHE_KEYWORDS = ("cache", "past_key_values", "layer_past", "cache_params")


def attention_functions() -> MutableMapping[str, Any]:
    """The process-wide table behind `AttentionInterface.register`."""
    from transformers import AttentionInterface

    return AttentionInterface._global_mapping


def mask_functions() -> MutableMapping[str, Any]:
    """The process-wide table behind `AttentionMaskInterface.register`."""
    from transformers import AttentionMaskInterface

    return AttentionMaskInterface._global_mapping


def attention_name(model: nn.Module) -> str | None:
    """The attention implementation that the model's config selects."""
    return getattr(model.config, "_attn_implementation", None)


def selects_attention(model: nn.Module) -> bool:
    """Whether the model dispatches its attention through the public interface at all.

    Older modeling files carry their own attention; setting a name there is accepted in silence and changes nothing.
    """
    probe = getattr(model, "_can_set_attn_implementation", None)
    if probe is not None:
        return bool(probe())
    return hasattr(modeling_module(model), "ALL_ATTENTION_FUNCTIONS")


def configs(root: Any) -> Iterator[Any]:
    """A config and every config nested in it, each once."""
    # not from the package, whose lazy attributes would then count as new
    from transformers.configuration_utils import PreTrainedConfig

    seen: set[int] = set()
    waiting = [root]
    while waiting:
        config = waiting.pop()
        if id(config) in seen or not isinstance(config, PreTrainedConfig):
            continue
        seen.add(id(config))
        yield config
        waiting.extend(vars(config).values())


def caches_by_default(model: Any) -> bool:
    """Whether a forward that is not told otherwise makes a KV cache; of a composite model, its text part says so."""
    config = model.config
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    return bool(getattr(text, "use_cache", False))


def is_checkpointing(model: nn.Module) -> bool:
    """Whether any layer of the model checkpoints its activations."""
    return any(getattr(module, "gradient_checkpointing", False) for module in model.modules())


def is_checkpointing_layer(module: nn.Module) -> bool:
    """Whether this is a layer that checkpoints itself when it is told to."""
    from transformers.modeling_layers import GradientCheckpointingLayer

    return isinstance(module, GradientCheckpointingLayer)


def records_outputs(hook: object) -> bool:
    """Whether this is the hook by which Transformers hands out hidden states and attention weights.

    It is placed by the first call that asks for them and stays, idle until the next such call.
    """
    module, name = getattr(hook, "__module__", None), getattr(hook, "__name__", None)
    return name == "output_capturing_hook" and str(module).startswith("transformers.")


def compresses_ahead(module: nn.Module) -> bool:
    """Whether this attention lets early tokens see windows of later ones that were compressed into one.

    DeepSeek-V4 in Transformers 5.8, whose compressor gave no bias along with the windows.
    """
    compressor: Any = getattr(module, "compressor", None)
    if not hasattr(compressor, "compress_rate"):
        return False
    hints = inspect.get_annotations(type(compressor).forward, eval_str=True)
    return hints.get("return") is torch.Tensor


# None is a model whose class name says nothing, such as GPT2LMHeadModel; its loss is the causal one
TOKEN_LOSSES = (None, "ForCausalLM", "ForMaskedLM", "ForTokenClassification", "ForConditionalGeneration")


def labels_are_tokens(model: Any) -> bool:
    """Whether `labels` has one entry for each entry of `input_ids`, by the kind of loss the model's class has."""
    inner = model
    while (below := wrapped(inner)) is not None and below is not inner:
        inner = below
    encodes = getattr(inner.config, "is_encoder_decoder", False)
    return getattr(inner, "loss_type", None) in TOKEN_LOSSES and not encodes


def causal_loss() -> Callable[..., Any]:
    """Transformers' loss of causal language models."""
    from transformers.loss.loss_utils import ForCausalLMLoss

    return ForCausalLMLoss


def masked_loss() -> Callable[..., Any]:
    """Transformers' loss of masked language models."""
    from transformers.loss.loss_utils import ForMaskedLMLoss

    return ForMaskedLMLoss


@functools.cache
def rope_tables() -> MutableMapping[str, Any]:
    """Transformers' functions that make rotary frequencies, by type."""
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    return ROPE_INIT_FUNCTIONS


def collator_names() -> list[tuple[Any, str]]:
    """(class, "__call__") of every Transformers collator that has a call of its own."""
    from transformers.data import data_collator as module

    tokenizing = ("DataCollatorWithPadding", "DataCollatorForSeq2Seq", "DataCollatorForTokenClassification")
    language = ("DataCollatorForLanguageModeling", "DataCollatorForWholeWordMask")
    names = (*tokenizing, *language, "DefaultDataCollator", "DataCollatorWithFlattening", "DataCollatorMixin")
    classes = [getattr(module, name) for name in names if hasattr(module, name)]
    return [(cls, "__call__") for cls in classes if "__call__" in vars(cls)]


def holders(modules: Sequence[str], name: str, value: Any) -> list[ModuleType]:
    """The named modules, where imported, whose global `name` is `value`."""
    found = (sys.modules.get(module) for module in modules)
    return [module for module in found if module is not None and vars(module).get(name) is value]


def packed_position_check() -> tuple[ModuleType, str]:
    """(module, name) of the function that looks for several sequences packed in one row."""
    from transformers import masking_utils

    return masking_utils, "find_packed_sequence_indices"


def masking_module() -> str:
    """Name of the module that builds attention masks."""
    from transformers import masking_utils

    return masking_utils.__name__


def experts_functions() -> MutableMapping[str, Any]:
    """The process-wide table behind `ExpertsInterface.register`."""
    from transformers.integrations.moe import ExpertsInterface

    return ExpertsInterface._global_mapping


def eager_experts(cls: type[nn.Module]) -> Callable[..., Any]:
    """The forward that a class of experts has besides those of the table: what its decorator wraps."""
    return cls.forward.__wrapped__  # type: ignore[attr-defined]


def experts_name(experts: Any) -> str | None:
    """The implementation that the config of an experts module selects."""
    return getattr(experts.config, "_experts_implementation", None)
