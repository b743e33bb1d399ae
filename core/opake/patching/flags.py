"""The flags of the patching API: one table, and the rule that turns umbrellas and overrides into values."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from opake.errors import OptionTypeError, UnknownOption

from .hardware import no_kernels_because

Scope = Literal["model", "runtime"]
UMBRELLAS = ("compat", "performance", "kernels", "peft")


@dataclass(frozen=True, slots=True)
class Flag:
    """A per-concern switch: the umbrella that sets its default, the scopes it acts in, what it switches."""

    group: str
    scopes: tuple[Scope, ...]
    help: str
    # whether its default needs CUDA and Triton, where its group does
    plain: bool = False


MODEL: tuple[Scope, ...] = ("model",)
RUNTIME: tuple[Scope, ...] = ("runtime",)
BOTH: tuple[Scope, ...] = ("model", "runtime")

FLAGS: Mapping[str, Flag] = {
    "eager_attention": Flag("compat", MODEL, "the attention function and its mask arithmetic"),
    "vmap_masking": Flag("compat", BOTH, "the mask function; the packed-position check"),
    "batchify": Flag("compat", MODEL, "adding and removing the batch dimension; no KV cache inside a transform"),
    "moe": Flag("compat", MODEL, "the experts implementation, router aux loss"),
    "empty_batches": Flag("compat", RUNTIME, "the Hugging Face collators on an empty list"),
    "vmap_checkpointing": Flag("compat", BOTH, "rematerialisation under transforms"),
    "kv_cache": Flag("performance", MODEL, "no cache allocation in training forwards outside transforms"),
    "fused_linear_cross_entropy": Flag("performance", MODEL, "the conditional loss-only head"),
    "chunked_linear_cross_entropy": Flag("", MODEL, "True or a tile width forces the chunked loss"),
    "rope": Flag("kernels", MODEL, "rotary embeddings"),
    "rms_norm": Flag("kernels", MODEL, "RMSNorm and residual add + RMSNorm"),
    "activation": Flag("kernels", MODEL, "gated activations"),
    "cross_entropy": Flag("kernels", MODEL, "cross-entropy over logits"),
    "grouped_moe": Flag("kernels", MODEL, "grouped expert paths; False = dense", plain=True),
    "lora_w": Flag("peft", MODEL, "fused LoRA projection"),
    "lora_qkv": Flag("peft", MODEL, "fused LoRA query, key and value"),
    "lora_mlp": Flag("peft", MODEL, "fused LoRA MLP"),
    "dropout": Flag("", MODEL, "None leaves dropout alone; False sets it to zero until restore"),
}


@dataclass(slots=True)
class Switches:
    """The value of every flag for one call, and why a flag is off."""

    values: dict[str, Any]
    reasons: dict[str, str] = field(default_factory=dict)

    def on(self, flag: str) -> bool:
        value = self.values[flag]
        return value is False if flag == "dropout" else bool(value)

    def reason(self, flag: str) -> str:
        if flag == "dropout":
            return "dropout is left as it is; dropout=False sets it to zero"
        return self.reasons.get(flag, f"{flag}=False")


def resolve(scope: Scope, flags: Mapping[str, Any], **umbrellas: Any) -> Switches:
    """Values of all flags from the umbrellas (`compat`, `performance`, `kernels`, `peft`) and per-concern overrides.

    An explicit per-concern value wins over its umbrella, also where the umbrella is forced off for want of CUDA.

    Raises:
        UnknownOption: a keyword that is no flag; the nearest known name is given.
        OptionTypeError: a value that is no bool (or, for a tile width, a positive int).
    """
    del scope
    groups = _groups(umbrellas)
    _check(flags)
    values: dict[str, Any] = {}
    reasons: dict[str, str] = {}
    for name, flag in FLAGS.items():
        if flags.get(name) is not None:
            values[name] = flags[name]
            continue
        group = f"plain {flag.group}" if flag.plain else flag.group
        values[name] = groups[group][0] if group else (False if name != "dropout" else None)
        if values[name] is False and group:
            reasons[name] = groups[group][1]
    return Switches(values, reasons)


def _groups(umbrellas: Mapping[str, Any]) -> dict[str, tuple[bool, str]]:
    for name, value in umbrellas.items():
        if not isinstance(value, bool) and not (name == "kernels" and value is None):
            raise OptionTypeError(f"{name}={value!r} is a {type(value).__name__}; it takes True or False")
    groups = {name: (bool(umbrellas[name]), f"{name}=False") for name in ("compat", "performance", "peft")}
    kernels = umbrellas["kernels"]
    wanted = groups["performance"][0] if kernels is None else kernels
    missing = no_kernels_because() if wanted else None
    why = "performance=False" if kernels is None else "kernels=False"
    groups["kernels"] = (wanted and missing is None, missing or why)
    groups["plain kernels"] = (wanted, why)
    return groups


def _check(flags: Mapping[str, Any]) -> None:
    for name, value in flags.items():
        if name not in FLAGS:
            near = difflib.get_close_matches(name, [*FLAGS, *UMBRELLAS, "strict"], n=1)
            hint = f"; did you mean {near[0]}?" if near else f"; known: {', '.join(FLAGS)}"
            raise UnknownOption(f"unknown option {name!r}{hint}")
        width = name == "chunked_linear_cross_entropy" and isinstance(value, int) and value > 0
        if not (value is None or isinstance(value, bool) or width):
            takes = (
                "True, False or a positive tile width" if name == "chunked_linear_cross_entropy" else "True or False"
            )
            raise OptionTypeError(f"{name}={value!r} is a {type(value).__name__}; it takes {takes}")
    if flags.get("dropout") is True:
        raise OptionTypeError("dropout=True has no meaning; None leaves dropout alone, False sets it to zero")
