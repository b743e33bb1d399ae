"""Which models have to be told about padding on the right, because something in them sees what comes later.

And the collator that follows from it.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from opake import hf
from opake.collate.right import RightPaddingCollator


def needs_mask(model: nn.Module) -> str | None:
    """Why `RightPaddingCollator` must keep the mask for this model, in words; None for causal models.

    Causal attention, windows, convolutions and recurrences reach back only: padding on the right changes no labelled
    token. Attention that looks both ways and a router's loss over all tokens see it. So do the compressed windows of
    DeepSeek-V4 in Transformers 5.8, with the mask as well, but then as that Transformers has it.
    """
    model = _inner(model)
    config: Any = getattr(model, "config", None)
    name = type(model).__name__
    if getattr(config, "is_encoder_decoder", False):
        return f"the encoder of {name} looks both ways"
    if getattr(config, "output_router_logits", False):
        return f"the router loss of {name} is over all tokens"
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    both = [m for m in model.modules() if getattr(m, "is_causal", True) is False and _reads_text(m, text)]
    if both or getattr(text, "use_bidirectional_attention", False):
        return f"attention of {name} looks both ways" + (f" ({type(both[0]).__name__})" if both else "")
    if any(map(hf.compresses_ahead, model.modules())):
        return f"attention of {name} sees compressed windows of later tokens in this Transformers"
    return None


def padding_right(model: nn.Module, processing_class: Any = None) -> RightPaddingCollator | None:
    """The collator for a causal language model, with the pad token of its tokenizer; None for any other model."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as CAUSAL

    if type(_inner(model)).__name__ not in CAUSAL.values():
        return None
    pad = getattr(processing_class, "pad_token_id", None) or 0
    return RightPaddingCollator(pad_token_id=pad, multiple_of=8, keep_mask=needs_mask(model) is not None)


def _inner(model: nn.Module) -> nn.Module:
    while (below := hf.wrapped(model)) is not None and below is not model:
        model = below
    return model


def _reads_text(module: nn.Module, text: Any) -> bool:
    """Whether the module belongs to the text part of a composite model: a vision tower sees no tokens."""
    return type(getattr(module, "config", text)) is type(text)
