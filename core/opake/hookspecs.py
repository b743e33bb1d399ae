"""The four hooks that a family plugin may implement: the whole contract between a family and the core.

A plugin is a module named by an entry point of group `opake.families` (it owns a model_type) or `opake.extensions` (it
adds to a model_type that somebody else owns). It implements any of the hooks below and takes only the arguments it
needs. A hook returns records (`opake.records`) and patches nothing itself. What the core then does with the records
belongs to `opake.patching`, how a plugin is found to `opake.registry`.

Arguments, the same for every hook:

hf:      the Transformers modeling module of the model at hand, e.g. `transformers.models.llama.modeling_llama`. It is
         handed in, so that a family writes `hf.LlamaRMSNorm` and imports neither torch nor Transformers.
config:  the model's config; branch on it where checkpoints of one model_type differ.
"""

from __future__ import annotations

from collections.abc import Iterable
from types import ModuleType
from typing import TYPE_CHECKING, Any

import pluggy

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

PROJECT = "opake"

hookspec = pluggy.HookspecMarker(PROJECT)
hookimpl = pluggy.HookimplMarker(PROJECT)


@hookspec
def opake_compat_patches(hf: ModuleType, config: PreTrainedConfig) -> Iterable[Any] | None:
    """What this family needs to run under `torch.func.vmap` besides that which the core does for every decoder.

    Called with `compat=True`. Attention, masks, the batch dimension, the cache, the loss and checkpointing are the
    core's own, so most families do not implement this hook.

    Return:  an iterable of compat records; order does not matter, each site at most once

        @hookimpl
        def opake_compat_patches(hf, config):
            if config.output_router_logits:
                yield RouterAuxLoss(hf.MixtralForCausalLM)
    """


@hookspec
def opake_kernel_patches(hf: ModuleType, config: PreTrainedConfig) -> Iterable[Any] | None:
    """Which fused kernels this family takes, and where.

    Called for the flags `rope`, `rms_norm`, `activation`, `cross_entropy` and `fused_linear_cross_entropy`.

    Return:  an iterable of Rotary, RMSNorm, AddRMSNorm, GatedMLP, CrossEntropy, LinearCrossEntropy, ...;
             order does not matter, each site at most once

        @hookimpl
        def opake_kernel_patches(hf):
            yield Rotary(hf)
            yield RMSNorm(hf.LlamaRMSNorm)
    """


@hookspec
def opake_lora_fusions(hf: ModuleType, config: PreTrainedConfig) -> Iterable[Any] | None:
    """Which groups of adapted projections share an input and may be computed together.

    Called with `peft=True` on a model that carries LoRA adapters. Single projections are the core's own business.

    Return:  an iterable of FuseQKV and FuseMLP; order does not matter, each site at most once

        @hookimpl
        def opake_lora_fusions(hf):
            yield FuseQKV(hf.LlamaAttention)
            yield FuseMLP(hf.LlamaMLP)
    """


@hookspec(firstresult=True)
def opake_moe_patch(hf: ModuleType, config: PreTrainedConfig) -> Any | None:
    """How this family's experts are computed.

    Called with `moe=True`. The first answer that is not None counts: an extension's, called after the family's, is only
    asked when the family leaves the experts to Transformers.

    Return:  one Experts record, or None to leave the experts to Transformers

        @hookimpl
        def opake_moe_patch(hf):
            return Experts(hf.MixtralExperts)
    """


HOOKS = tuple(f.__name__ for f in (opake_compat_patches, opake_kernel_patches, opake_lora_fusions, opake_moe_patch))
