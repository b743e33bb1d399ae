"""Words of a call that would do nothing are errors, and so is everything of a wrong kind; the model is as it was."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import nn

from opake.checking.tiny import tiny_model
from opake.errors import InputError
from opake.lora import AdapterWrapper, LinearAdapter, apply_lora
from opake.testing.snapshot import differences, model_snapshot


def dims(model: Any) -> dict[str, int]:
    """The rank of every adapter, parts of combined layers included, by the end of its name."""
    return {
        name.rpartition(".adapter")[0] + name.rpartition(".adapter")[2]: module.dim
        for name, module in model.named_modules()
        if isinstance(module, LinearAdapter)
    }


WRONG: dict[str, tuple[str, dict[str, Any], str]] = {
    "exclusion": ("llama", {"exclude": "q_porj"}, "exclude: no module of .* 'q_porj'; did you mean 'q_proj'"),
    "exclusion of a container": (
        "llama",
        {"exclude": "mlp"},
        r"exclude: 'mlp' names model\.layers\.0\.mlp, not the layers inside.*gate_proj.*write 'mlp\.\*'",
    ),
    "exclusion of all": ("llama", {"exclude": "all-linear"}, "exclude: no module of .* named by 'all-linear'"),
    "exclusion beside parts": ("phi3", {"canonical": True, "exclude": "self_attn"}, r"write 'self_attn\.\*'"),
    "exclusion, none": ("llama", {"exclude": None}, "exclude=None: it takes names"),
    "rank": ("llama", {"dim_pattern": {"q_porj": 4}}, "dim_pattern: no module of .* did you mean 'q_proj'"),
    "rank of a layer without": ("llama", {"dim_pattern": {"lm_head": 4}}, "'lm_head' names no layer that gets an adap"),
    "rank of a part": ("phi3", {"dim_pattern": {"q_proj": 4}}, "dim_pattern: no module of .*'q_proj'"),
    "scale": ("llama", {"alpha_pattern": {"v_porj": 4}}, "alpha_pattern: no module of .* did you mean 'v_proj'"),
    "order": (
        "llama",
        {"dim_pattern": {"q_proj": 2, "layers.0.*.q_proj": 4}},
        r"dim_pattern: every layer that 'layers\.0\.\*\.q_proj' names takes the value of a key before it",
    ),
    "no mapping": ("llama", {"dim_pattern": 3}, "dim_pattern=3: it takes a mapping"),
    "a list": ("llama", {"alpha_pattern": ["q_proj"]}, r"alpha_pattern=\['q_proj'\]: it takes a mapping"),
    "no name": ("llama", {"dim_pattern": {3: 4}}, r"dim_pattern=\{3: 4\}: it takes a mapping"),
    "rank is a string": ("llama", {"dim_pattern": {"q_proj": "4"}}, "dim='4': the rank of an adapter is a positive"),
    "no targets": ("llama", {"targets": []}, "targets is empty"),
    "dtype is a string": ("llama", {"lora_dtype": "bf16"}, r"lora_dtype='bf16' is a str; it takes a torch\.dtype"),
    "dtype is a type": ("llama", {"lora_dtype": float}, r"it takes a torch\.dtype, e\.g\. torch\.bfloat16"),
    "dtype is nothing": ("llama", {"lora_dtype": ""}, r"lora_dtype='' is a str"),
    "scale is no number": ("llama", {"alpha": float("nan")}, "alpha=nan: it takes a finite number"),
    "scale is infinite": ("llama", {"alpha_pattern": {"q_proj": float("inf")}}, "alpha=inf: it takes a finite"),
}


@pytest.mark.parametrize("name", WRONG)
def test_it_is_said_and_nothing_is_changed(name: str) -> None:
    model_type, arguments, message = WRONG[name]
    model = tiny_model(model_type)
    before, states = model_snapshot(model), [p.requires_grad for p in model.parameters()]
    with pytest.raises(InputError, match=message):
        apply_lora(model, **arguments)
    assert list(differences(before, model_snapshot(model))) == []
    assert [p.requires_grad for p in model.parameters()] == states


@pytest.mark.parametrize(
    ("targets", "exclude", "count"),
    [
        ("all-linear", ["lm_head", "embed_tokens", "norm"], 14),
        ("all-linear", ["mlp.*"], 8),
        ("all-linear", [re.compile(r".*\.mlp\..*"), "o_proj"], 6),
        ("layers.0.*", ["self_attn", "mlp", "*norm", "act_fn"], 7),
        ("q_proj", "v_proj", 2),
    ],
)
def test_an_exclusion_that_says_what_is_true_is_taken(targets: Any, exclude: Any, count: int) -> None:
    model = apply_lora(tiny_model("llama"), targets, exclude=exclude)
    assert sum(isinstance(module, AdapterWrapper) for module in model.modules()) == count


def test_keys_may_be_wildcards_patterns_and_the_name_of_a_combined_layer() -> None:
    found = dims(apply_lora(tiny_model("llama"), "q_proj", dim_pattern={re.compile(r".*\.0\..*"): 2, "layers.*": 3}))
    assert found == {"model.layers.0.self_attn.q_proj": 2, "model.layers.1.self_attn.q_proj": 3}
    found = dims(apply_lora(tiny_model("phi3"), "qkv_proj", canonical=True, dim_pattern={"k_proj": 2, "qkv_proj": 3}))
    assert {name.rpartition("proj.")[2]: dim for name, dim in found.items()} == {"q_proj": 3, "k_proj": 2, "v_proj": 3}


def test_an_adapter_says_the_same() -> None:
    for choices, message in (
        ({"lora_dtype": "bf16"}, "lora_dtype='bf16' is a str"),
        ({"alpha": float("nan")}, "alpha=nan"),
        ({"alpha": "32"}, "alpha='32' is a str"),
    ):
        with pytest.raises(InputError, match=message):
            LinearAdapter(nn.Linear(6, 4), **choices)  # type: ignore[arg-type]
    with pytest.raises(InputError, match="lora_dtype"):
        LinearAdapter.for_shape(6, 4, lora_dtype="bf16")
    assert LinearAdapter.for_shape(6, 4, base_dtype=torch.float16).linear_in.weight.dtype == torch.float16
