"""The names under which our attention and mask functions stand in Transformers' public tables, and what they answer."""

from __future__ import annotations

from typing import Any


class Name(str):
    """A name under which functions are found, and which a modeling file that asks "is this sdpa?" takes for sdpa.

    Some attention classes (sparse indexers, image masks) compare the selected implementation with the names they know,
    and leave a mask out for any other. Ours takes and makes the masks of sdpa, so the answer is yes.
    """

    __slots__ = ()

    def __eq__(self, other: object) -> bool:
        return other == "sdpa" or str.__eq__(self, other)  # type: ignore[arg-type]

    def __ne__(self, other: object) -> bool:
        return not self == other

    __hash__ = str.__hash__


# a name may not contain "sdpa" or "flash_attention": Transformers gives those a meaning of its own
NAMES = {(True, True): Name("opake"), (True, False): Name("opake_attention"), (False, True): Name("opake_masking")}
SERVED = ("sdpa", "flash_attention_2", "flash_attention_3", "flex_attention", *NAMES.values())


class Windowed(Name):
    """The name of a model whose attention layers all hand their window on to the attention function."""

    __slots__ = ()


def hands_on_windows(config: Any) -> bool:
    """Whether the model of this config was found to hand its windows on when it was patched."""
    return isinstance(getattr(config, "_attn_implementation", None), Windowed)
