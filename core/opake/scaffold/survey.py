"""What the classes of a model compute, found by running them, as lines of a family's declaration.

Asks the same questions of the same code that decides at patching time, so that what is declared is what will be served.
What a family might need under vmap besides the core's repairs is left to the author.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from torch import nn

from opake import hf
from opake.checking.sweep import told
from opake.checking.tiny import tiny_batch, tiny_model
from opake.errors import InputError
from opake.lm_head import wrapper
from opake.records import AddRMSNorm, CrossEntropy, LinearCrossEntropy, Rotary
from opake.rows import cross_entropy, gated_mlp, rms_norm, rotary

from .declaration import KERNELS, LORA, MOE, Declaration, Line
from .residual import Sum, sums

QKV = ("q_proj", "k_proj", "v_proj")


def survey(model_type: str) -> Declaration:
    """Everything that the vocabulary of opake can say about a causal language model, as far as it can be seen.

    Raises InputError where no tiny model of it can be built, or where its checkpoints say another model type.
    """
    model = _built(model_type)
    modeling = hf.modeling_module(model).__name__
    asked = hf.model_type(model)
    found = Declaration(model_type, asked, type(model).__name__, modeling, _attentions(model_type))
    _refuse_alias(found)
    classes = dict(_classes(model))
    for look in (_rotary, _norms, _mlps, _loss, _projections, _experts):
        _carefully(look, model, classes, found)
    return found


def _built(model_type: str) -> Any:
    try:
        return tiny_model(model_type)
    except InputError:
        raise
    except Exception as error:  # of Transformers, or of a package that it asks for
        raise InputError(f"no tiny model of {model_type!r} can be built: {told(error)}") from error


def _refuse_alias(found: Declaration) -> None:
    """A name that no config says, such as that of a checkpoint that uses the classes of another model."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    if (said := CONFIG_MAPPING[found.model_type].model_type) != found.model_type:
        raise InputError(
            f"a config of {found.model_type!r} says model_type {said!r}, and its family is found by that;"
            f" write: opake families new {said} DIRECTORY"
        )


def _carefully(look: Callable[..., None], model: Any, classes: Any, found: Declaration) -> None:
    """A look that a strange model makes fail costs what it would have found, and nothing else."""
    try:
        look(model, classes, found)
    except Exception as error:
        found.left_out.append(f"{look.__name__.strip('_')}: looking at it raised {told(error)}")


def _classes(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """(name, first instance) of every class of the model that its modeling module knows by that name."""
    modeling = hf.modeling_module(model)
    seen: set[type] = set()
    for module in model.modules():
        cls = type(module)
        if cls not in seen and getattr(modeling, cls.__name__, None) is cls and module is not model:
            seen.add(cls)
            yield cls.__name__, module


def _attentions(model_type: str) -> tuple[str, ...]:
    try:
        tiny_model(model_type, attention="sdpa")
    except ValueError:
        return ("eager",)
    return ("sdpa", "eager")


def _rotary(model: nn.Module, classes: dict[str, nn.Module], found: Declaration) -> None:
    modeling = hf.ModelingModule(hf.modeling_module(model))
    layout = rotary.layout_of(modeling.module)
    if not hasattr(modeling.module, rotary.NAME):
        found.left_out.append(f"Rotary: the modeling file has no {rotary.NAME}")
    elif layout is None:
        found.left_out.append(f"Rotary: {rotary.NAME} rotates in a layout that the op does not know")
    elif not list(rotary.sites(Rotary(modeling), model)):
        found.left_out.append(f"Rotary: no forward of the modeling file calls {rotary.NAME}")
    else:
        pairs = "neighbouring columns" if layout.interleaved else "halves of a head"
        found.lines.append(
            Line(KERNELS, "Rotary(hf)", "rope", f"rotates {pairs}; tables hold the angles as {_tables(layout)}")
        )


def _tables(layout: Any) -> str:
    return {"halves": "two equal halves", "pairs": "pairs", "once": "they are"}[layout.tables]


def _norms(model: Any, classes: dict[str, nn.Module], found: Declaration) -> None:
    known: set[type] = set()
    for name, module in classes.items():
        variant = rms_norm.variant_of(module)
        if variant is not None:
            known.add(type(module))
            cast = {"before": "rounds before the weight", "after": "rounds once, at the end"}[variant.cast]
            offset = ", weight is an offset from one" if variant.offset else ""
            found.lines.append(Line(KERNELS, f"RMSNorm(hf.{name})", "rms_norm", cast + offset))
        elif "Norm" in name:
            found.left_out.append(f"RMSNorm(hf.{name}): it computes something else than the RMSNorm of the op")
    plain = {type(m).__name__ for m in model.modules() if type(m) in (nn.LayerNorm, nn.RMSNorm)}
    found.left_out += [f"RMSNorm: the model uses torch.nn.{name}, which stays" for name in sorted(plain)]
    if known:
        _sums(model, known, found)


def _sums(model: Any, known: set[type], found: Declaration) -> None:
    layers = dict(_layers(model, known))
    batch = {key: value for key, value in tiny_batch(padding="none").items() if key != "labels"}
    options = {"use_cache": False} if hf.takes_use_cache(model, type(model).forward) else {}
    seen = sums(model, lambda: model(**batch, **options), layers, lambda norm: type(norm) in known)
    for name in dict.fromkeys(type(layer).__name__ for layer in layers.values()):
        of_class = {each for layer, each in zip(layers.values(), seen, strict=True) if type(layer).__name__ == name}
        (first, *others) = of_class
        if first is None or others:
            reason = "no norm of the layer sees its input plus the output of one submodule"
            found.left_out.append(f"AddRMSNorm(hf.{name}): {reason}")
        else:
            found.lines.append(_add_line(name, first))


def _layers(model: Any, known: set[type]) -> Iterator[tuple[str, nn.Module]]:
    """Decoder layers: modules that can be checkpointed, hold a norm, and are not the model that holds the layers."""
    modeling = hf.modeling_module(model)
    for name, module in model.named_modules():
        layer = hasattr(module, "gradient_checkpointing") and module is not model.base_model and module is not model
        ours = getattr(modeling, type(module).__name__, None) is type(module)
        if layer and ours and any(type(child) in known for child in module.children()):
            yield name, module


def _add_line(name: str, found: Sum) -> Line:
    defaults = AddRMSNorm.__dataclass_fields__
    named = {"addend": found.addend, "norm": found.norm}
    extra = "".join(f', {key}="{value}"' for key, value in named.items() if value != defaults[key].default)
    because = f"{found.norm} sees the layer's input plus the output of {found.addend}"
    return Line(KERNELS, f"AddRMSNorm(hf.{name}{extra})", "rms_norm", because)


def _mlps(model: Any, classes: dict[str, nn.Module], found: Declaration) -> None:
    for name, module in classes.items():
        skip = gated_mlp.fits(None, module) if "down_proj" in module._modules or "MLP" in name else False  # pyright: ignore
        if skip is False:
            continue
        if skip is not None and skip.state != "stock":
            found.left_out.append(f"GatedMLP(hf.{name}): {skip.reason}")
            continue
        activation = gated_mlp.activation_of(module)
        kind = activation.kind if activation else "one without a kernel, which stays"
        combined = gated_mlp.projections(module) == gated_mlp.COMBINED
        shape = "gate and up in one projection" if combined else "gate and up apart"
        found.lines.append(
            Line(KERNELS, f"GatedMLP(hf.{name})", "activation", f"{shape}; by default the activation is {kind}")
        )
        found.lines.append(Line(LORA, f"FuseMLP(hf.{name})", "lora_mlp"))


def _loss(model: Any, classes: dict[str, nn.Module], found: Declaration) -> None:
    name, cls = type(model).__name__, type(model)
    asked = {
        ("CrossEntropy", "cross_entropy"): cross_entropy.fits(CrossEntropy(cls), model),
        ("LinearCrossEntropy", "fused_linear_cross_entropy"): wrapper.fits(LinearCrossEntropy(cls), model),
    }
    for (record, flag), skip in asked.items():
        if skip is None:
            found.lines.append(Line(KERNELS, f"{record}(hf.{name})", flag))
        else:
            found.left_out.append(f"{record}(hf.{name}): {skip.reason}")


def _projections(model: Any, classes: dict[str, nn.Module], found: Declaration) -> None:
    for name, module in classes.items():
        held = [part for part in QKV if isinstance(module._modules.get(part), nn.Linear)]
        if len(held) == len(QKV):
            found.lines.insert(_first_lora(found), Line(LORA, f"FuseQKV(hf.{name})", "lora_qkv"))
        elif "Attention" in name:
            parts = ", ".join(child for child, each in module._modules.items() if each is not None) or "no submodules"
            found.left_out.append(f"FuseQKV(hf.{name}): it has {parts}, not {', '.join(QKV)}")


def _experts(model: Any, classes: dict[str, nn.Module], found: Declaration) -> None:
    """The class that holds stacked experts; the hook takes one record, so a second class is left to the author."""
    names = [name for name, module in classes.items() if {"gate_up_proj", "down_proj"} <= module._parameters.keys()]
    found.lines += [Line(MOE, f"Experts(hf.{name})", "moe") for name in names[:1]]
    found.left_out += [f"Experts(hf.{name}): the hook takes one record" for name in names[1:]]


def _first_lora(found: Declaration) -> int:
    return next((i for i, line in enumerate(found.lines) if line.hook == LORA), len(found.lines))
