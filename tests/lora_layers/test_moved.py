"""Models that FSDP, DDP, accelerate or torch.compile holds: weights stay the base's, names those of the model."""

from __future__ import annotations

import json
from collections.abc import Iterator
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed, nn
from torch.distributed.fsdp import fully_shard

from opake.checking.tiny import tiny_model
from opake.lora import LoRALinear, apply_lora, disable_adapter, merge_lora, remove_lora, save_peft_adapter
from opake.testing.oracle import relative_error

from .subjects import BATCH, double_model, gradients, randomised


@pytest.fixture
def group(tmp_path: Path) -> Iterator[None]:
    distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    distributed.destroy_process_group()


@pytest.mark.usefixtures("group")
@pytest.mark.filterwarnings("ignore:.*:FutureWarning")
@pytest.mark.filterwarnings("ignore:.*:UserWarning:torch")
def test_fsdp_shards_the_base_weight_and_not_the_sum() -> None:
    model = randomised(apply_lora(double_model("llama")))
    stock, (loss, want) = deepcopy(model), gradients(model)
    for layer in model.model.layers:
        fully_shard(layer)
    fully_shard(model)
    for _ in range(2):
        model.zero_grad()
        now = model(**BATCH).loss
        torch.testing.assert_close(now, loss)
        now.backward()
    got = {name: p.grad.full_tensor() for name, p in model.named_parameters() if p.grad is not None}
    assert relative_error(got, want) < 1e-9
    with disable_adapter(model), disable_adapter(stock):
        torch.testing.assert_close(model(**BATCH).logits, stock(**BATCH).logits)
    states = {name: getattr(t, "full_tensor", lambda t=t: t)() for name, t in model.state_dict().items()}
    assert all(torch.equal(t, states[name]) for name, t in stock.state_dict().items())


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize("wrap", [nn.parallel.DistributedDataParallel, lambda m: torch.compile(m, backend="eager")])
def test_a_wrapped_model_is_saved_under_the_names_of_the_model(wrap: Any, tmp_path: Path) -> None:
    model = randomised(apply_lora(tiny_model("llama"), "q_proj"))
    save_peft_adapter(wrap(model), tmp_path / "saved")
    names = json.loads((tmp_path / "saved" / "adapter_config.json").read_text())["target_modules"]
    assert names == [f"model.layers.{i}.self_attn.q_proj" for i in (0, 1)]


def test_adapters_on_offloaded_weights_are_where_the_layer_computes() -> None:
    accelerate = pytest.importorskip("accelerate", reason="offloading is accelerate's")
    model = double_model("llama").eval()
    want = randomised(apply_lora(deepcopy(model), "q_proj"))(**BATCH).logits
    accelerate.cpu_offload(model, execution_device=torch.device("cpu"))
    assert model.model.layers[0].self_attn.q_proj.weight.is_meta
    randomised(apply_lora(model, "q_proj"))
    with torch.no_grad():
        for _ in range(2):
            torch.testing.assert_close(model(**BATCH).logits, want)


def test_the_attribute_is_the_sum_for_everybody_else() -> None:
    model = randomised(apply_lora(double_model("llama"), "q_proj"))
    layer = model.model.layers[0].self_attn.q_proj
    assert isinstance(layer, LoRALinear)
    weight = layer.weight
    assert not torch.equal(weight, layer.to_wrap.weight)
    merge_lora(model)
    torch.testing.assert_close(model.model.layers[0].self_attn.q_proj.weight, weight)
    remove_lora(model)
