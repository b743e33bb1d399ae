"""A PEFT checkpoint read onto a bare model: which layers it adapts, with what, and what of it our layers cannot do."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import nn

from opake.errors import InputError

from .adapter import LinearAdapter
from .canonical import CanonicalAdapter
from .driver import _require_bare, install, require_switch
from .gating import gating_module
from .peft_settings import read_settings, require_plain
from .plan import Choices, Step, make_plan
from .shapes import shape_of
from .targets import Target, is_router_name
from .wrapper import AdapterWrapper

Model = TypeVar("Model", bound=nn.Module)
WEIGHTS, CONFIG, PREFIX = "adapter_model.safetensors", "adapter_config.json", "base_model.model."
# ranks of the parts of combined layers, which PEFT has no word for, in the metadata of the weights
CANONICAL = "opake_canonical"
Ranks = dict[str, dict[str, int]]
KEY = re.compile(r"(?P<name>.+)\.lora_(?P<kind>[AB])(?:\.[^.]+)?\.weight")
# an adapted head is saved with the adapter
BASE = ".base_layer."


def load_peft_adapter(
    model: Model, directory: str | Path, *, canonical: bool = False, dropout: float | None = None
) -> Model:
    """Put the adapters of a PEFT checkpoint on a bare model as layers of ours; returns the same model.

    canonical: a combined layer gets an adapter for each part, as with `apply_lora`
    dropout: another probability than the checkpoint's

    Adapters keep the dtype of the file. The model is frozen but for them.

    Raises:
        InputError: no checkpoint there or a broken one; one that is not plain LoRA (DoRA, biases, embeddings, stacked
            experts, saved modules, ...) on the base as it is (PiSSA, OLoRA, LoftQ, CorDA, LoRA-GA change it); names or
            shapes that the model does not have.
        UnsupportedModel: as of `apply_lora`. Nothing is changed then.
    """
    _require_bare(model)
    require_switch("canonical", canonical)
    config, tensors, ranks = _read(Path(directory))
    _require_pairs_alone(tensors)
    pairs = _pairs(_without_base(model, tensors))
    steps = []
    for name, (A, B) in pairs.items():
        _require_fit(model, name, A, B)
        rest = {
            "dropout": config.get("lora_dropout", 0.0) if dropout is None else dropout,
            "dropout_position": "pre",
            "lora_A_init_method": "xavier",
            "lora_dtype": A.dtype,
        }
        scale, place = _scale(config, name, A.shape[0]), _router_of(model, name)
        steps.append(_step(model, place, scale, A, rest, ranks.get(name), canonical))
    placed = install(model, steps)
    with torch.no_grad():
        for (name, (A, B)), wrapper in zip(pairs.items(), placed.values(), strict=True):
            _fill(wrapper.adapter, A, B, ranks.get(name))
    return model


def _read(folder: Path) -> tuple[dict[str, Any], dict[str, torch.Tensor], Ranks]:
    """(config, tensors, ranks of the parts of combined layers, if we wrote them)."""
    for file in (folder / CONFIG, folder / WEIGHTS):
        if not file.is_file():
            raise InputError(f"{folder} is no PEFT checkpoint with safetensors: there is no {file.name}")
    from safetensors import SafetensorError, safe_open

    config = read_settings(folder / CONFIG)
    require_plain(config)
    try:
        with safe_open(folder / WEIGHTS, framework="pt") as file:
            tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
            ranks = json.loads((file.metadata() or {}).get(CANONICAL, "{}"))
    except (SafetensorError, ValueError) as error:
        raise InputError(f"{folder / WEIGHTS} cannot be read: {error}; save the adapter again") from None
    return config, tensors, ranks


def _require_pairs_alone(tensors: Mapping[str, torch.Tensor]) -> None:
    strange = [key for key in tensors if not key.startswith(PREFIX) or not (KEY.fullmatch(key) or BASE in key)]
    if strange:
        raise InputError(f"the checkpoint holds more than plain LoRA weights: {', '.join(strange[:3])}; use PEFT")


def _without_base(model: nn.Module, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The adapters alone; a base weight that comes with them must be the model's own."""
    own = model.state_dict()
    for key, tensor in tensors.items():
        if not KEY.fullmatch(key):
            name = key.removeprefix(PREFIX).replace(BASE, ".")
            there = own.get(name)
            if there is None or there.shape != tensor.shape or not torch.equal(there.cpu().to(tensor.dtype), tensor):
                raise InputError(
                    f"the checkpoint brings a {name} of its own, and the model has another; load that first"
                )
    return {key: tensor for key, tensor in tensors.items() if KEY.fullmatch(key)}


def _pairs(tensors: Mapping[str, torch.Tensor]) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    found: dict[str, dict[str, torch.Tensor]] = {}
    for key, tensor in tensors.items():
        match = KEY.fullmatch(key.removeprefix(PREFIX))
        assert match is not None, "checked by _require_pairs_alone"
        found.setdefault(match["name"], {})[match["kind"]] = tensor
    lone = [name for name, pair in found.items() if len(pair) != 2]
    if lone or not found:
        raise InputError(f"the checkpoint has one of lora_A and lora_B alone, or neither: {', '.join(lone) or 'empty'}")
    return {name: (pair["A"], pair["B"]) for name, pair in found.items()}


def _require_fit(model: nn.Module, name: str, A: torch.Tensor, B: torch.Tensor) -> None:
    try:
        module = model.get_submodule(name)
    except AttributeError:
        raise InputError(
            f"{type(model).__name__} has no {name}, which the checkpoint adapts; is it of another model?"
        ) from None
    if isinstance(module, AdapterWrapper):
        raise InputError(f"{name} has an adapter already; take it off with opake.lora.remove_lora(model) first")
    if not isinstance(getattr(module, "weight", None), torch.Tensor):
        raise InputError(
            f"{name} is a {type(module).__name__} without a weight of its own, such as stacked experts; use PEFT"
        )
    shape = shape_of(module)
    if shape.device.type == "meta":
        raise InputError(f"{name} is on the meta device, where an adapter would have no values; load the model first")
    a, b, want = tuple(A.shape), tuple(B.shape), (shape.in_features, shape.out_features)
    if A.dim() != 2 or B.dim() != 2 or a[0] != b[1] or (a[1], b[0]) != want:
        raise InputError(
            f"{name} maps {want[0]} to {want[1]}, and lora_A has shape {a} and lora_B {b}, expected "
            f"(rank, {want[0]}) and ({want[1]}, rank); is the checkpoint of another model?"
        )


def _router_of(model: nn.Module, name: str) -> str:
    """The name of the router whose logits a linear layer makes; of any other layer, its own."""
    owner, _, last = name.rpartition(".")
    if not is_router_name(owner):
        return name
    try:
        inner, _ = gating_module(model.get_submodule(owner))
    except InputError:
        return name
    return owner if inner == last else name


def _scale(config: Mapping[str, Any], name: str, rank: int) -> float:
    alpha = config["lora_alpha"]
    for pattern, value in (config.get("alpha_pattern") or {}).items():
        if re.match(rf"(.*\.)?({pattern})$", name):
            alpha = value
            break
    return alpha / math.sqrt(rank) if config.get("use_rslora") else alpha / rank


def _step(
    model: nn.Module,
    name: str,
    scale: float,
    A: torch.Tensor,
    rest: Mapping[str, Any],
    ranks: Mapping[str, int] | None,
    canonical: bool,
) -> Step:
    """The plan of one layer; the parts of a combined one have the ranks they were saved with, or the whole rank."""
    rank, owner = A.shape[0], name.rpartition(".")[0]
    own = {f"{owner}.{part}": each for part, each in (ranks or {}).items()} if canonical else {}
    targets = [re.compile(re.escape(each)) for each in own or [name]]
    dims: dict[Target, int] = {**own}
    choices = Choices(rank, scale * rank, dims, {each: scale * r for each, r in own.items()}, rest)
    (step,) = make_plan(model, targets, [], choices, canonical)
    return step


def _fill(adapter: nn.Module, A: torch.Tensor, B: torch.Tensor, ranks: Mapping[str, int] | None) -> None:
    """Copy the factors; each part of a combined layer takes its rows of B and its columns, all where none are known."""
    if isinstance(adapter, LinearAdapter):
        adapter.linear_in.weight.copy_(A)
        adapter.linear_out.weight.copy_(B)
        return
    assert isinstance(adapter, CanonicalAdapter), "made by apply_lora's plan"
    row = column = 0
    for part, rows in adapter.parts.items():
        rank = A.shape[0] if ranks is None else ranks.get(part, 0)
        columns = slice(None) if ranks is None else slice(column, column + rank)
        if part in adapter._modules:
            _fill(adapter.get_submodule(part), A[columns], B[row : row + rows, columns], None)
        row, column = row + rows, column + rank
