"""Dropout set to zero until restore: in `nn.Dropout` modules and in the plain numbers that attention modules keep."""

from __future__ import annotations

from torch import nn

from opake.patching.undo import Undo, put

KINDS = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout)


def apply(model: nn.Module) -> Undo:
    changes = []
    for name, module in model.named_modules():
        numbers = ["p"] if isinstance(module, KINDS) else _probabilities(module)
        for key in numbers:
            if vars(module)[key] != 0:
                changes.append(put(module, key, 0.0, where=f"{name}.{key}"))
    return Undo(changes)


def active(model: nn.Module) -> bool:
    """Whether any module would drop something if it ran now."""
    for module in model.modules():
        names = ["p"] if isinstance(module, KINDS) else _probabilities(module)
        if module.training and any(vars(module)[name] != 0 for name in names):
            return True
    return False


def _probabilities(module: nn.Module) -> list[str]:
    """Attributes such as `attention_dropout` or `layerdrop` that hold a probability."""
    return [
        key
        for key, value in vars(module).items()
        if isinstance(value, float)
        and (key.endswith(("dropout", "_pdrop", "dropout_prob", "dropout_p")) or key == "layerdrop")
    ]
