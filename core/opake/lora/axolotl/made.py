"""What a class makes of itself, told from its constructors: a class has no instance to look at.

The names of the attributes that they set are read off their code; nothing is run, and nothing depends on how the source
is written.
"""

from __future__ import annotations

import dis
import re

from torch import nn

from opake.patching.instance import layers

INPUTS = re.compile(
    r"(q|k|v|qkv|kv|query|key|value|c_attn|q_attn|query_key_value|in_proj|project_[qkv]|w_?(q|k|v|qkv|pack))(_|$|[abln])",
    re.IGNORECASE,
)


def attributes_made(cls: type) -> set[str]:
    """Names of the attributes that the constructors of a class set."""
    makers = [vars(base)["__init__"] for base in cls.__mro__ if "__init__" in vars(base) and base is not nn.Module]
    # decorators are looked through by what they close over; not all of them say what they wrap
    codes = [layer.__code__ for maker in makers for layer in layers(maker)]
    return {each.argval for code in codes for each in dis.get_instructions(code) if each.opname == "STORE_ATTR"}


def projects_in(cls: type) -> list[str]:
    """The attributes, among those that a class makes, that are projections of queries, keys or values by their names.

    Their norms are not.
    """
    return [name for name in attributes_made(cls) if INPUTS.match(name) and "norm" not in name]
