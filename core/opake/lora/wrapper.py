"""`AdapterWrapper`: a module with an adapter beside it, under the names that the module had alone.

The wrapper shares the parameter and buffer tables of the module that it wraps. So `q_proj.weight` is still the name of
the base weight, in `named_parameters` and under `functional_call`, and the adapter's names stand below
`q_proj.adapter`. State dicts are written and read under the same names. `get_parameter("q_proj.weight")` does not find
it: it reads the attribute, which is the effective weight; ask for `q_proj.to_wrap.weight`.
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from opake.errors import InputError

BASE, ADAPTER = "to_wrap.", "adapter."


class AdapterWrapper(nn.Module):
    """Base of the layers that add an adapter to `to_wrap`; a subclass says in `forward` where the two meet.

    to_wrap: the module; its parameters are not copied, renamed or frozen
    adapter: a module that computes the difference

    Attributes that the wrapper does not have are those of `to_wrap`. A strict `load_state_dict` takes the wrapper's own
    state dict, and one of the bare module as well, which leaves the adapter as it is; where a whole model is loaded, it
    takes one without any adapter, and misses one layer's if others are there. Raises InputError for a module that is
    such a wrapper itself.
    """

    def __init__(self, to_wrap: nn.Module, adapter: nn.Module) -> None:
        super().__init__()
        for name, module in {"to_wrap": to_wrap, "adapter": adapter}.items():
            if not isinstance(module, nn.Module):
                raise InputError(f"{name}={module!r:.80} is a {type(module).__name__}; it takes an nn.Module")
        if isinstance(to_wrap, AdapterWrapper):
            raise InputError(
                f"this {type(to_wrap.to_wrap).__name__} has an adapter already, and two would have the same names; "
                "wrap its to_wrap with an adapter of a higher rank"
            )
        self.to_wrap = to_wrap
        self.adapter = adapter
        self._adapter_enabled, self._paused = True, False
        # one table under two modules: whoever replaces a tensor in it replaces it for both
        self._parameters = to_wrap._parameters
        self._buffers = to_wrap._buffers
        self._non_persistent_buffers_set = to_wrap._non_persistent_buffers_set
        self.register_load_state_dict_post_hook(_name_as_saved)
        self.train(to_wrap.training)

    def enable_adapter_layers(self) -> None:
        """Add the adapter's output from now on."""
        self._adapter_enabled, self._paused = True, False

    def disable_adapter_layers(self) -> None:
        """Compute what `to_wrap` computes, bit for bit, until the adapter is enabled again."""
        self._adapter_enabled, self._paused = False, False

    def pause_adapter(self) -> None:
        """As `disable_adapter_layers`, for a block that enables it again; a copy made meanwhile has it enabled."""
        self._adapter_enabled, self._paused = False, True

    def base_linear_forward(
        self, x: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]:
        """(output, bias, input of the linear map) of `to_wrap`; the last is its norm's output where it returns one."""
        from .outputs import read_output

        found = read_output(self.to_wrap(x, *args, **kwargs), self.to_wrap, x)
        return found.output, found.bias, found.linear_input

    def adapter_forward(self, adapter: nn.Module, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        """`adapter(x)`, with the further arguments where its forward takes them all; there to be overridden."""
        if (args or kwargs) and _takes(adapter, x, *args, **kwargs):
            return adapter(x, *args, **kwargs)
        return adapter(x)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name in ("to_wrap", "adapter") or name.startswith("__"):
                raise
        return getattr(super().__getattr__("to_wrap"), name)

    def __getstate__(self) -> dict[str, Any]:
        # the block that paused the adapter will not know of the copy
        return {**self.__dict__, **({"_adapter_enabled": True, "_paused": False} if self._paused else {})}

    def named_modules(
        self, memo: set[nn.Module] | None = None, prefix: str = "", remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Module]]:
        """As of any module; but where duplicates are kept, shared tables are listed once, under the wrapper's name.

        `functional_call` swaps every place it is told of, and would restore a place that it swapped twice wrongly.
        """
        base = self.to_wrap
        for name, module in super().named_modules(memo, prefix, remove_duplicate):
            if remove_duplicate or module is not base:
                yield name, module

    def state_dict(self, *args: Any, destination: Any = None, prefix: str = "", keep_vars: bool = False) -> Any:
        """As of any module, with the names of `to_wrap` unchanged and those of the adapter below `adapter.`."""
        if args:
            # the old positional form
            destination, prefix, keep_vars = [*args, *[destination, prefix, keep_vars][len(args) :]]
        found = super().state_dict(destination=destination, prefix=prefix, keep_vars=keep_vars)
        inner = prefix + BASE
        for key in [key for key in found if key.startswith(inner)]:
            value = found.pop(key)
            found.setdefault(prefix + key[len(inner) :], value)
        return found

    def _load_from_state_dict(
        self,
        state_dict: dict[str, Any],
        prefix: str,
        local_metadata: Any,
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        """Hand every name on to the child that owns it; nothing is loaded here."""
        for hook in self._load_state_dict_pre_hooks.values():
            hook(state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs)
        names = [key[len(prefix) :] for key in state_dict if key.startswith(prefix)]
        for name in names:
            if not name.startswith((BASE, ADAPTER)):
                state_dict[prefix + BASE + name] = state_dict[prefix + name]
        if any(name.startswith(ADAPTER) for name in names):
            _loads.found(missing_keys)
        else:
            kept = self.adapter.state_dict(prefix=prefix + ADAPTER, keep_vars=True)
            state_dict.update(kept)
            _loads.kept(missing_keys, list(kept))


class _Loads(threading.local):
    """What the `load_state_dict` that runs left as it was, to be called missing once some layer's adapter is there.

    A wrapper is handed its own part of the state dict alone; the list of missing names is one for the whole load.
    """

    def __init__(self) -> None:
        self._missing: list[str] | None = None
        self._kept: list[str] = []
        self._some_there = False

    def found(self, missing: list[str]) -> None:
        """A wrapper's adapter is in the state dict."""
        self._begin(missing)
        self._some_there = True
        self._settle(missing)

    def kept(self, missing: list[str], names: list[str]) -> None:
        """Nothing of a wrapper's adapter is; these are its names."""
        self._begin(missing)
        self._kept += names
        self._settle(missing)

    def _begin(self, missing: list[str]) -> None:
        if missing is not self._missing:
            self._missing, self._kept, self._some_there = missing, [], False

    def _settle(self, missing: list[str]) -> None:
        if self._some_there:
            missing += self._kept
            self._kept = []


_loads = _Loads()


def _takes(adapter: nn.Module, *args: Any, **kwargs: Any) -> bool:
    try:
        inspect.signature(adapter.forward).bind(*args, **kwargs)
    except TypeError:
        return False
    return True


def _name_as_saved(module: nn.Module, incompatible: Any) -> None:
    """Report missing and unexpected names as a state dict has them."""
    del module
    for names in (incompatible.missing_keys, incompatible.unexpected_keys):
        names[:] = [name.replace("." + BASE, ".").removeprefix(BASE) for name in names]
