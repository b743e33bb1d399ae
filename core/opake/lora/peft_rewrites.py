"""What the installed PEFT makes of the targets of a checkpoint before it looks for them in a model.

Checkpoints are older than the models of today: where experts were separate layers once, PEFT reads names of layers as
names of stacked experts. It is asked, not imitated, so each release answers for itself; without PEFT nothing is asked.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping
from typing import Any

from torch import nn

from opake.errors import InputError

SETTINGS = ("r", "lora_alpha", "target_modules", "target_parameters", "rank_pattern", "alpha_pattern")


def require_read_as_written(model: nn.Module, config: Mapping[str, Any]) -> None:
    """Raise InputError where PEFT would put an adapter of this config on something else than its name says."""
    convert = _conversion()
    if convert is None or not hasattr(getattr(model, "config", None), "model_type"):
        return
    # one at a time: PEFT stops at the first that it cannot place
    kinds = ("target_modules", "target_parameters")
    odd = [name for kind in kinds for name in config[kind] or () if _rewritten(convert, model, config, kind, name)]
    if odd:
        more = f" and {len(odd) - 3} more" if len(odd) > 3 else ""
        raise InputError(
            f"the installed PEFT reads {', '.join(odd[:3])}{more} in a {type(model).__name__} as names of stacked "
            "experts, and would compute something else. load_peft_adapter reads them exactly: pass for_peft=False to "
            "write for it alone, or leave these layers without adapters"
        )


def _conversion() -> Callable[..., Any] | None:
    if importlib.util.find_spec("peft") is None:
        return None
    try:
        from peft.utils import transformers_weight_conversion as conversion
    except ImportError:
        return None
    return getattr(conversion, "convert_peft_config_for_transformers", None)


def _rewritten(convert: Callable[..., Any], model: nn.Module, config: Mapping[str, Any], kind: str, name: str) -> bool:
    from peft import LoraConfig

    asked: dict[str, Any] = {"target_modules": [], "target_parameters": None, kind: [name]}
    peft: Any = LoraConfig(**{key: asked.get(key, config[key]) for key in SETTINGS})
    before = _of(peft)
    try:
        convert(peft, model=model, conversions=None)
    except ValueError:
        # half of what is one stack
        return True
    return _of(peft) != before


def _of(config: Any) -> tuple[Any, ...]:
    return (
        set(config.target_modules or ()),
        set(config.target_parameters or ()),
        dict(config.rank_pattern or {}),
        dict(config.alpha_pattern or {}),
    )
