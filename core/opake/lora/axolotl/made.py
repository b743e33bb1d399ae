"""What a class makes of itself, told from its constructors: a class has no instance to look at.

The names of the attributes that they set are read off their code; nothing is run, and nothing depends on how the source
is written.
"""

from __future__ import annotations

import dis
import re
from types import FunctionType
from typing import Any

from torch import nn

INPUTS = re.compile(
    r"(q|k|v|qkv|kv|query|key|value|c_attn|q_attn|query_key_value|in_proj|project_[qkv]|w_?(q|k|v|qkv|pack))(_|$|[abln])",
    re.IGNORECASE,
)


def attributes_made(cls: type) -> set[str]:
    """Names of the attributes that the constructors of a class set."""
    makers = [vars(base)["__init__"] for base in cls.__mro__ if "__init__" in vars(base) and base is not nn.Module]
    codes = [plain.__code__ for maker in makers if isinstance(plain := _undecorated(maker), FunctionType)]
    return {each.argval for code in codes for each in dis.get_instructions(code) if each.opname == "STORE_ATTR"}


def projects_in(cls: type) -> list[str]:
    """The attributes, among those that a class makes, that are projections of queries, keys or values by their names.

    Their norms are not.
    """
    return [name for name in attributes_made(cls) if INPUTS.match(name) and "norm" not in name]


def _undecorated(fn: Any) -> Any:
    while hasattr(fn, "__wrapped__"):
        fn = fn.__wrapped__
    return fn
