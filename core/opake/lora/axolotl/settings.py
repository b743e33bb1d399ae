"""The keys of an axolotl config that are read here, from a mapping or from the attributes of any object."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from opake.errors import InputError, OptionTypeError

KERNELS = ("lora_mlp_kernel", "lora_qkv_kernel", "lora_o_kernel", "lora_embedding_kernel")


def setting(cfg: Any, key: str) -> Any:
    """`cfg[key]` or `cfg.key`; None where it is absent."""
    return cfg.get(key) if isinstance(cfg, Mapping) else getattr(cfg, key, None)


def switch(cfg: Any, key: str) -> bool | None:
    """A setting that is True, False or not there."""
    value = setting(cfg, key)
    if value is not None and not isinstance(value, bool):
        raise OptionTypeError(f"cfg has {key}={value!r}, a {type(value).__name__}; it takes True, False or None")
    return value


def switches(cfg: Any) -> dict[str, bool]:
    """Every kernel switch; what is absent is off."""
    if cfg is None or isinstance(cfg, str | bytes | int | float | list | tuple | set):
        raise OptionTypeError(f"cfg is a {type(cfg).__name__}; it takes a mapping or an object with {KERNELS[0]}, ...")
    return {key: bool(switch(cfg, key)) for key in KERNELS}


def base_model(cfg: Any) -> str:
    """The path or name of the model; InputError (a ValueError) where there is none."""
    name = setting(cfg, "base_model")
    if not name:
        raise InputError(
            "base_model must be specified in config: a path or a name that AutoConfig.from_pretrained takes"
        )
    return name
