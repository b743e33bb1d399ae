"""Which layers are linear layers: by what they answer, not by their class; and which of them can take an adapter in."""

from __future__ import annotations

from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch import nn
from torch.nn import functional
from transformers.models.falcon.modeling_falcon import FalconLinear
from transformers.models.idefics.modeling_idefics import IdeficsDecoupledLinear

from opake.errors import InputError, PatchError
from opake.functional import per_example_grads
from opake.lora import (
    AdapterWrapper,
    FusedLoRALinear,
    LayerNormLinear,
    LinearAdapter,
    LoRALinear,
    apply_lora,
    load_peft_adapter,
    merge_lora,
    remove_lora,
    save_peft_adapter,
)
from opake.testing.oracle import model_loop_gradients, relative_error

from .subjects import BATCH, double_model, fused, gradients, loop_and_vmap, patch, randomised, trainable

pytestmark = pytest.mark.filterwarnings("ignore:Could not find a config file in:UserWarning")


def adapted(model: nn.Module) -> dict[str, AdapterWrapper]:
    return {name: module for name, module in model.named_modules() if isinstance(module, AdapterWrapper)}


def rows(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


class Quantised(nn.Linear):
    """As a library for quantised weights has it: integers, and a forward that knows what they mean."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__(layer.in_features, layer.out_features, bias=False)
        self.weight = nn.Parameter((layer.weight * 100).round().to(torch.int8), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functional.linear(x, self.weight.to(x.dtype) / 100)


Quantised.__module__ = "bitsandbytes.nn.modules"


class Shifted(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * super().forward(x) + torch.rand(())


class Noisy(nn.Linear):
    """Linear, and its first call draws random numbers."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(functional.dropout(x, 0.0, True))


class Grouped(nn.Linear):
    """As the grouped product of DeepSeek-V4: rows of another width."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functional.linear(x.view(*x.shape[:-1], 2, -1), self.weight.view(2, self.out_features // 2, -1)[0])


def test_falcon_by_name_and_by_all_linear() -> None:
    stock = double_model("falcon").eval()
    model = randomised(apply_lora(deepcopy(stock)))
    kinds = {name.rpartition(".")[2]: type(module.to_wrap) for name, module in adapted(model).items()}
    assert kinds == dict.fromkeys(("query_key_value", "dense", "dense_h_to_4h", "dense_4h_to_h"), FalconLinear)
    assert len(adapted(apply_lora(deepcopy(stock), "dense"))) == 2
    want = model(**BATCH).logits
    assert not torch.allclose(want, stock(**BATCH).logits)
    torch.testing.assert_close(merge_lora(deepcopy(model))(**BATCH).logits, want)
    assert torch.equal(remove_lora(model)(**BATCH).logits, stock(**BATCH).logits)


# its own call of SDPA, which torch 2.15 maps in a loop on a CPU
@pytest.mark.filterwarnings("ignore:There is a performance drop:UserWarning")
def test_falcon_has_per_example_gradients() -> None:
    model = randomised(apply_lora(double_model("falcon")))
    want = model_loop_gradients(model, **BATCH)
    assert fused(gradients(model)[0]) == {"w": 8}
    patch(model)
    assert relative_error(per_example_grads(model, engine="vmap")(trainable(model), **BATCH), want) < 1e-9


def test_falcon_goes_to_peft_and_comes_back(tmp_path: Path) -> None:
    base = double_model("falcon").eval()
    model = randomised(apply_lora(deepcopy(base)))
    save_peft_adapter(model, tmp_path)
    peft = PeftModel.from_pretrained(deepcopy(base), tmp_path).double().eval()
    with torch.no_grad():
        want = model(**BATCH).logits
        torch.testing.assert_close(peft(**BATCH).logits, want, rtol=1e-6, atol=1e-6)
        config = LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM")
        theirs = randomised(get_peft_model(deepcopy(base), config).double()).eval()
        theirs.save_pretrained(tmp_path / "theirs")
        back = load_peft_adapter(base, tmp_path / "theirs")
        torch.testing.assert_close(back(**BATCH).logits, theirs(**BATCH).logits, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("kind", [FalconLinear, Shifted, Noisy])
def test_a_layer_written_otherwise_is_taken(kind: Any) -> None:
    model = nn.Sequential(kind(6, 4)).double()
    plain = nn.Sequential(nn.Linear(6, 4)).double()
    state = torch.random.get_rng_state()
    apply_lora(model, dim=2)
    made = torch.random.get_rng_state()
    torch.random.set_rng_state(state)
    apply_lora(plain, dim=2)
    assert torch.equal(torch.random.get_rng_state(), made), "looking at a layer draws no random numbers"
    wrapped: Any = randomised(model)[0]
    assert isinstance(wrapped, LoRALinear)
    x = rows(3, 5, 6)
    torch.manual_seed(0)
    got = wrapped(x)
    torch.manual_seed(0)
    torch.testing.assert_close(got, wrapped.to_wrap(x) + wrapped.adapter(x))


def test_what_answers_otherwise_is_left_by_all_linear_and_refused_by_name() -> None:
    decoupled = IdeficsDecoupledLinear(6, 4, out_additional_features=2, bias=False)
    model = nn.ModuleDict({"decoupled": decoupled, "grouped": Grouped(6, 4), "plain": nn.Linear(6, 6)})
    for name, message in {
        "decoupled": "is a IdeficsDecoupledLinear, which is neither a linear layer",
        "grouped": "is a Grouped, which is neither a linear layer",
    }.items():
        with pytest.raises(InputError, match=message):
            apply_lora(model, name)
    apply_lora(model, dim=2)
    assert list(adapted(model)) == ["decoupled.additional_fc", "plain"]
    with pytest.raises(InputError, match=r"0\.weight has no shape before the first forward of Sequential"):
        apply_lora(nn.Sequential(nn.LazyLinear(4), nn.Linear(4, 4)), "1")
    with pytest.raises(InputError, match="LazyLinear has no shape before its first forward"):
        LinearAdapter(nn.LazyLinear(4))
    for other in (nn.Embedding(6, 4), nn.EmbeddingBag(6, 4)):
        with pytest.raises(InputError, match="goes beside a linear layer, got Embedding"):
            LinearAdapter(other)


def test_all_linear_takes_quantised_layers() -> None:
    model = nn.Sequential(Quantised(nn.Linear(6, 4)), nn.Linear(4, 4))
    with pytest.raises(InputError, match=r"cannot be trained in torch\.int8; pass lora_dtype"):
        apply_lora(model)
    apply_lora(model, lora_dtype=torch.float32, dim=2)
    assert list(adapted(model)) == ["0", "1"]
    wrapped: Any = randomised(model)[0]
    x = torch.randn(3, 6)
    torch.testing.assert_close(wrapped(x), wrapped.to_wrap(x) + wrapped.adapter(x))
    loop, got = loop_and_vmap(model, torch.randn(3, 5, 6))
    for name, want in loop.items():
        torch.testing.assert_close(got[name], want, rtol=1e-4, atol=1e-5)
    with pytest.raises(PatchError, match="a Quantised cannot take a LinearAdapter into its weight"):
        merge_lora(model)


class Pair(nn.Linear):
    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, None]:  # type: ignore[override]
        return super().forward(x), None


@pytest.mark.parametrize("kind", [LayerNormLinear, Pair])
def test_what_peft_has_no_adapter_for_is_not_written(kind: Any, tmp_path: Path) -> None:
    base = kind(6, 4)
    model = nn.ModuleDict({"a": LoRALinear(base, LinearAdapter(base))})
    with pytest.raises(InputError, match=f"a: PEFT and load_peft_adapter have no adapter for a {kind.__name__}"):
        save_peft_adapter(model, tmp_path / "new")
    assert not (tmp_path / "new").exists()


class Halves(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) / 2


@pytest.mark.parametrize("kind", [Halves, LayerNormLinear])
def test_what_would_come_out_as_another_is_not_merged(kind: Any) -> None:
    base = kind(6, 4).double()
    model = nn.Sequential(nn.Linear(6, 6).double(), LoRALinear(base, LinearAdapter(base, dim=2)))
    state = {name: tensor.clone() for name, tensor in randomised(model).state_dict().items()}
    with pytest.raises(PatchError, match=rf"1: {kind.__name__} has a forward of its own"):
        merge_lora(model)
    assert all(torch.equal(tensor, state[name]) for name, tensor in model.state_dict().items())


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_what_comes_out_the_same_is_merged(dtype: torch.dtype) -> None:
    falcon, norm = FalconLinear(6, 6), LayerNormLinear(6, 4)
    model = nn.Sequential(
        LoRALinear(falcon, LinearAdapter(falcon, dim=2)), FusedLoRALinear(norm, LinearAdapter(norm, dim=2))
    ).to(dtype)
    randomised(model)
    x = rows(3, 6).to(dtype)
    want = model(x)[0]
    got = merge_lora(model)(x)
    torch.testing.assert_close(got, want, rtol=4e-2, atol=4e-2)
    if dtype == torch.float64:
        torch.testing.assert_close(got, want)
