"""What in an ordinary training script would break privacy or silently do nothing here: refused, with the way out."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from opake.errors import InputError, UnsupportedModel
from opake.patching.target import locate
from opake.trainer.arguments import TrainingArguments

WIDE = (torch.float32, torch.float64)
DDP = "launch plain DDP, with torchrun or accelerate launch"


def refuse(model: nn.Module, args: TrainingArguments, collator: Any, dataset: Any) -> None:
    """Raise InputError, with the way out, for the first trap in what a trainer works with."""
    args.check()
    for sentence in (*_in_arguments(args), *_in_model(model), *_in_data(dataset, collator)):
        raise InputError(sentence)
    if args.use_compat_patches and not locate(model).pretrained:
        raise UnsupportedModel(f"{type(model).__name__} is no Transformers model; pass use_compat_patches=False")


def refuse_launch(trainer: Any) -> None:
    """Raise InputError for what accelerate brought along from its own configuration, or set in the arguments."""
    for sentence in _in_arguments(trainer.args):
        raise InputError(sentence)
    kinds = [name for name in ("deepspeed", "fsdp", "fsdp_xla") if getattr(trainer, f"is_{name}_enabled", False)]
    if trainer.accelerator.mixed_precision == "fp16":
        kinds.append("fp16")
    for kind in kinds:
        raise InputError(f"accelerate was launched with {kind}, which shards or scales gradients; {DDP}, without fp16")


def _in_arguments(args: TrainingArguments) -> Iterator[str]:
    for name, neutral, why in OPTIONS:
        value = getattr(args, name, neutral)
        if value and value != neutral:
            yield f"{name}={value!r} {why}"
    if args.include_num_input_tokens_seen != "no" and not args.log_private_statistics:
        yield "include_num_input_tokens_seen logs counts without noise; set log_private_statistics=True if you mean it"
    optimiser = str(getattr(args.optim, "value", args.optim))
    if "lomo" in optimiser or "layerwise" in optimiser:
        yield f"optim={optimiser!r} updates inside the backward pass, before there is noise; use adamw_torch or sgd"
    if args.n_gpu > 1:
        yield f"{args.n_gpu} GPUs in one process mean DataParallel; {DDP}, or show one with CUDA_VISIBLE_DEVICES=0"


# (name, value that does nothing, why another is refused and what to do)
OPTIONS = (
    ("max_grad_norm", 0, "would clip the noisy gradient once more; leave it 0, per_example_clip_norm bounds each row"),
    ("gradient_accumulation_steps", 1, "draws several batches an update; set expected_batch_size and microbatch_size"),
    ("train_sampling_strategy", "random", "is not Poisson sampling; leave it 'random'"),
    ("label_smoothing_factor", 0, "is normalised over the batch; smooth the loss in compute_per_example_loss"),
    ("auto_find_batch_size", False, "repeats steps; set microbatch_size to what fits into memory"),
    ("fp16", False, "scales losses, and with them what is clipped; use bf16=True, or a frozen bfloat16 base"),
    ("torch_compile", False, "compiles inside the per-example gradient, where it cannot work; leave it out"),
    ("debug", [], "looks at values inside the per-example gradient, where it cannot; leave it out"),
    ("use_liger_kernel", False, "patches whole classes; set use_performance_kernels=True instead"),
    ("deepspeed", None, f"shards gradients before they can be clipped; {DDP}"),
    ("fsdp", [], f"shards gradients before they can be clipped; {DDP}"),
    ("parallelism_config", None, f"splits rows over devices; {DDP}"),
)


def _in_data(dataset: Any, collator: Any) -> Iterator[str]:
    if isinstance(dataset, torch.utils.data.IterableDataset) or not hasattr(dataset or [], "__len__"):
        yield f"{type(dataset).__name__} has no length and cannot be sampled; pass a data set with rows by number"
    elif dataset is not None and len(dataset) == 0:
        yield "train_dataset has no rows; leave it out for evaluation alone"
    packs = any(getattr(collator, name, False) for name in ("padding_free", "packing", "return_position_ids"))
    if packs or "Flattening" in type(collator).__name__:
        name = type(collator).__name__
        yield f"{name} packs rows, so none has a gradient of its own; use opake.collate.RightPaddingCollator"


def _in_model(model: nn.Module) -> Iterator[str]:
    """Wrappers, trainable parameters, and layers that look at the whole batch."""
    if isinstance(model, nn.DataParallel | nn.parallel.DistributedDataParallel) or hasattr(model, "_orig_mod"):
        yield f"the model is wrapped in {type(model).__name__}, which gradients per example cannot enter; pass it bare"
    trainable = {name: p for name, p in model.named_parameters() if p.requires_grad}
    if not trainable:
        yield f"no parameter of {type(model).__name__} is trainable; attach adapters, or set requires_grad"
    for name, p in trainable.items():
        if p.dtype not in WIDE:
            yield (
                f"{name} is trainable in {p.dtype}, so sums would be rounded before noise is added; load with "
                "dtype=torch.float32 and set bf16=True for speed, or freeze it and train float32 adapters"
            )
    for name, module in model.named_modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            yield f"{name} is a {type(module).__name__}, which mixes rows; use GroupNorm or LayerNorm"
