"""What is wrong with a call is said before anything runs, in the same words by every engine."""

import pytest
import torch
from peft import LoraConfig, get_peft_model

from opake.checking.tiny import tiny_batch, tiny_model
from opake.errors import InputError, OptionTypeError, PatchError
from opake.functional import clipped_grad, per_example_grads
from opake.patches import apply_model_patches, restore

B, T = 3, 12
FULL = tiny_batch(padding="none")
ONES = torch.ones(B, T, dtype=torch.long)
ENGINES = ("vmap", "batched", "auto")


def clipped(model, **options):
    return clipped_grad(model, clip_norm=1.0, **options)


@pytest.fixture
def model():
    model = get_peft_model(tiny_model("llama"), LoraConfig(r=2, target_modules="all-linear", task_type="CAUSAL_LM"))
    apply_model_patches(model)
    return model


def trainable(model):
    return {name: p.detach() for name, p in model.named_parameters() if p.requires_grad}


def refuse(model, monkeypatch):
    monkeypatch.setattr(type(model.base_model.model.model), "forward", lambda *_, **__: pytest.fail("it runs"))


BAD = {
    "fewer labels": ({"labels": FULL["labels"][:, :-1]}, None, InputError, r"labels has shape \(3, 11\)"),
    "more labels": ({"labels": torch.zeros(B, 13, dtype=torch.long)}, None, InputError, r"shape \(3, 13\)"),
    "flat labels": ({"labels": FULL["labels"][:, 0]}, None, InputError, r"labels has shape \(3,\)"),
    "deep labels": ({"labels": FULL["labels"][..., None]}, None, InputError, r"labels has shape \(3, 12, 1\)"),
    "float labels": ({"labels": FULL["labels"].float()}, None, OptionTypeError, "labels are torch.float32"),
    "float ids": ({"input_ids": FULL["input_ids"].float()}, None, OptionTypeError, "input_ids are torch.float32"),
    "shorter mask": ({"attention_mask": ONES[:, 1:]}, None, InputError, r"attention_mask has shape \(3, 11\)"),
    "a tuple": ({"return_dict": False}, None, InputError, "leave return_dict out"),
    **{
        f"shared {name}": (
            {"attention_mask": ONES, name: ONES[:1]},
            {name: None},
            InputError,
            rf"{name} has shape \(1, 12\) and is shared.*pass {name}.squeeze\(0\)",
        )
        for name in ("attention_mask", "position_ids", "labels", "input_ids")
    },
}


@pytest.mark.parametrize("make", [per_example_grads, clipped])
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("case", BAD)
def test_bad_rows(case, engine, make, model, monkeypatch):
    rows, in_dims, error, words = BAD[case]
    refuse(model, monkeypatch)
    with pytest.raises(error, match=words):
        make(model, engine=engine, in_dims=in_dims)(trainable(model), **{**FULL, **rows})


@pytest.mark.parametrize("engine", ENGINES)
def test_a_config_that_asks_for_tuples(engine, model):
    model.base_model.model.config.return_dict = False
    f, params = per_example_grads(model, engine=engine), trainable(model)
    with pytest.raises(InputError, match=r"return_dict=False.*config\.return_dict = True"):
        f(params, **FULL)


@pytest.mark.parametrize("engine", ENGINES)
def test_shared_positions_of_one_row_are_fine(engine, model):
    f = per_example_grads(model, engine=engine, in_dims={"position_ids": None})
    rows = {**FULL, "attention_mask": ONES, "position_ids": torch.arange(T)}
    assert all(g.shape[0] == B for g in f(trainable(model), **rows).values())


@pytest.mark.parametrize("make", [per_example_grads, clipped])
@pytest.mark.parametrize("engine", ENGINES)
def test_a_model_restored_since(engine, make, model):
    f, params = make(model, engine=engine), trainable(model)
    f(params, **FULL)
    restore(model)
    for rows in (FULL, {name: t[:0] for name, t in FULL.items()}):
        with pytest.raises(PatchError, match="is not patched"):
            f(params, **rows)
    apply_model_patches(model)
    f(params, **FULL)


@pytest.mark.parametrize("make", [per_example_grads, clipped])
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("rows", [0, B])
def test_unknown_names_and_wrong_shapes(rows, engine, make, model):
    given = {name: t[:rows] for name, t in FULL.items()}
    f, params = make(model, engine=engine), trainable(model)
    first = next(iter(params))
    with pytest.raises(InputError, match="has no parameter 'nope'"):
        f({**params, "nope": torch.zeros(3)}, **given)
    with pytest.raises(InputError, match=r"params has \(2, 2\)"):
        f({**params, first: torch.zeros(2, 2)}, **given)
    f(params, **given)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_eight_bits_are_not_clipped(dtype):
    def loss(params, x):
        pytest.fail("it runs")

    with pytest.raises(InputError, match=rf"params\['w'\] has dtype {dtype}.*bfloat16"):
        clipped(loss)({"w": torch.ones(4).to(dtype)}, torch.randn(B, 4))
