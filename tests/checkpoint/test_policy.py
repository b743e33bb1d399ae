"""Checkpointing of whole models as users switch it on: policies between nothing and every layer, and every argument."""

from __future__ import annotations

import collections
import functools
import gc
import inspect
import threading
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.utils.checkpoint
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM, OPTConfig, OPTForCausalLM

from opake import hf
from opake.checking.tiny import tiny_config, tiny_model
from opake.checkpoint import rematerialise, selective_checkpointing
from opake.checkpoint.guard import RematCheckpoint
from opake.checkpoint.replay import Replay
from opake.checkpoint.step import batched_step, in_batched_step
from opake.errors import InputError, OptionTypeError
from opake.functional import per_example_grads
from opake.patches import apply_model_patches, apply_runtime_patches, restore_runtime
from opake.rows import rms_norm
from opake.testing.live import LiveBytes, peak_live_bytes
from opake.testing.oracle import model_loop_gradients, relative_error

LAYERS = 4
# stock experts loop over the rows where no family serves them; that is another page
LOOPS = pytest.mark.filterwarnings("ignore:There is a performance drop", "ignore:no family for")


def built(**options: Any) -> LlamaForCausalLM:
    torch.manual_seed(0)
    sizes = {"vocab_size": 61, "hidden_size": 32, "intermediate_size": 88, "num_hidden_layers": LAYERS}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(**sizes, **heads, **options)).train()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    return model


def batch(T: int = 16) -> dict[str, torch.Tensor]:
    ids = torch.randint(3, 61, (3, T), generator=torch.Generator().manual_seed(1))
    return {"input_ids": ids, "labels": ids.clone()}


def gradients(model: Any, rows: dict[str, torch.Tensor], engine: str = "vmap") -> dict[str, torch.Tensor]:
    params = {name: p.detach() for name, p in model.named_parameters() if p.requires_grad}
    return per_example_grads(model, engine=engine)(params, **rows)


def enabler(model: Any) -> Callable[..., None]:
    """What switches checkpointing on, under its newest name."""
    kind = "activation" if hasattr(model, "activation_checkpointing_enable") else "gradient"
    return getattr(model, f"{kind}_checkpointing_enable")


POLICIES = [
    {},
    {"every": 2},
    {"every": LAYERS + 1},
    {"part": "attention"},
    {"part": "attention", "every": 3},
    {"part": "mlp"},
    {"part": "mlp", "every": 2, "save_on_cpu": True},
    {"save_on_cpu": True},
]


@pytest.mark.parametrize("policy", POLICIES, ids=str)
def test_policies_do_not_change_gradients_and_are_taken_back(policy: dict[str, Any]) -> None:
    model, rows = built(), batch()
    want = model_loop_gradients(model, **rows)
    apply_model_patches(model)
    before = [dict(vars(m)) for m in model.modules()]
    with selective_checkpointing(model, **policy) as selected:
        expected = range(0, LAYERS, policy.get("every", 1))
        suffix = {"attention": ".self_attn", "mlp": ".mlp"}.get(policy.get("part", ""), "")
        assert selected.sites == tuple(f"model.layers.{i}{suffix}" for i in expected)
        assert relative_error(gradients(model, rows), want) < 5e-6
        # ordinary training follows the policy too
        assert relative_error(model_loop_gradients(model, **rows), want) < 5e-6
    for module, kept in zip(model.modules(), before, strict=True):
        assert {k: v for k, v in vars(module).items() if k != "_opake_notes"}.keys() == kept.keys()
    selected.undo()


@pytest.mark.parametrize("engine", ["vmap", "batched"])
def test_peaks_are_strictly_ordered(engine: str) -> None:
    rows = batch(64)
    peaks = {}
    policies = {
        "none": None,
        "attention": {"part": "attention"},
        "mlp": {"part": "mlp"},
        "half": {"every": 2},
        "all": {},
    }
    for name, policy in policies.items():
        model = built()
        for key, parameter in model.named_parameters():
            parameter.requires_grad_("norm" in key)
        apply_model_patches(model, rms_norm=True)
        if policy is not None:
            selective_checkpointing(model, **policy)
        peaks[name] = peak_live_bytes(functools.partial(gradients, model, rows, engine))
    assert peaks["none"] > peaks["half"] > peaks["all"]
    assert peaks["none"] > peaks["attention"] > peaks["all"]
    assert peaks["none"] > peaks["mlp"] > peaks["all"]


def adapted(**options: Any) -> Any:
    model = built()
    config = LoraConfig(r=3, target_modules="all-linear", init_lora_weights=False, **options)
    return get_peft_model(model, config).train()


FUSED = "opake_lora_mlp_rematerialisedBackward"


def nodes(loss: torch.Tensor) -> collections.Counter[str]:
    """The nodes of a graph by name."""
    seen, todo = set(), [loss.grad_fn]
    while todo:
        node = todo.pop()
        if node is not None and node not in seen:
            seen.add(node)
            todo += [before for before, _ in node.next_functions]
    return collections.Counter(node.name() for node in seen)


@pytest.mark.parametrize("engine", ["vmap", "batched"])
def test_a_fused_mlp_makes_gate_and_up_again_by_itself(engine: str) -> None:
    model, rows = adapted(), batch(64)
    want = model_loop_gradients(model, **rows)
    apply_model_patches(model, rms_norm=True)
    whole = peak_live_bytes(functools.partial(gradients, model, rows, engine))
    with selective_checkpointing(model, part="mlp"):
        assert nodes(model(**rows).loss)[FUSED] == LAYERS
        assert relative_error(gradients(model, rows, engine), want) < 5e-6
        assert relative_error(model_loop_gradients(model, **rows), want) < 5e-6
        less = peak_live_bytes(functools.partial(gradients, model, rows, engine))
    assert not nodes(model(**rows).loss)[FUSED]
    # gate and up of all layers but the one that is being made again
    assert whole - less > (LAYERS - 2) * 2 * rows["input_ids"].numel() * 88 * 4


def test_the_fused_sum_before_the_mlp_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    model, calls = adapted(), []
    real = rms_norm.opake_fused_add_rms_norm
    monkeypatch.setattr(rms_norm, "opake_fused_add_rms_norm", lambda *a, **k: calls.append(1) or real(*a, **k))
    apply_model_patches(model, rms_norm=True)
    with selective_checkpointing(model, part="mlp"):
        model(**batch())
    assert len(calls) == LAYERS


def kept(model: Any, rows: dict[str, torch.Tensor]) -> int:
    """Bytes that a forward leaves for its backward."""
    with LiveBytes() as live:
        loss = model(**rows).loss
    gc.collect()
    assert loss.requires_grad
    return live.now()


@pytest.mark.parametrize("state", ["dropout", "disabled", "trainable", "away"])
def test_an_mlp_that_is_not_fused_is_rematerialised_all_the_same(state: str) -> None:
    model, rows = adapted(lora_dropout=0.2 if state == "dropout" else 0.0), batch(64)
    if state == "disabled":
        model.base_model.disable_adapter_layers()
        for name, parameter in model.named_parameters():
            parameter.requires_grad_("norm" in name)
    if state == "trainable":
        for name, parameter in model.named_parameters():
            if "down_proj.base_layer" in name:
                parameter.requires_grad_()
    apply_model_patches(model)
    plain, whole = nodes(model(**rows).loss), kept(model, rows)
    torch.manual_seed(7)
    want = model_loop_gradients(model, **rows)
    with selective_checkpointing(model, part="mlp", save_on_cpu=state == "away"):
        assert nodes(model(**rows).loss)[FUSED] == 0
        assert whole - kept(model, rows) >= LAYERS * 2 * rows["input_ids"].numel() * 88 * 4
        torch.manual_seed(7)
        assert relative_error(model_loop_gradients(model, **rows), want) < 5e-6
    assert nodes(model(**rows).loss) == plain


def test_models_without_such_parts_are_refused() -> None:
    sizes = {"vocab_size": 61, "hidden_size": 32, "ffn_dim": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    with pytest.raises(InputError, match="no layer of OPTForCausalLM has an MLP of its own; part='layer' takes any"):
        selective_checkpointing(OPTForCausalLM(OPTConfig(**sizes, word_embed_proj_dim=32)), part="mlp")


@LOOPS
@pytest.mark.parametrize("model_type", ["mixtral", "qwen3_next", "falcon", "gpt_neox", "gpt2", "bloom", "lfm2"])
def test_every_kind_of_mlp_is_found(model_type: str) -> None:
    model = tiny_model(tiny_config(model_type)).train()
    layers = [m for m in model.modules() if hf.is_checkpointing_layer(m)]
    want = model_loop_gradients(model, **(rows := batch()))
    apply_model_patches(model)
    with selective_checkpointing(model, part="mlp") as selected:
        assert len(selected.sites) == len(layers)
        assert relative_error(gradients(model, rows), want) < 5e-6


def test_what_flows_into_a_part_is_sent_away_and_comes_back(monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[torch.Size] = []

    def send(tensors: list[torch.Tensor], needs: Any, given: int) -> dict[int, torch.device]:
        away = {i: t.device for i, t in enumerate(tensors) if i >= given and needs[i]}
        for i in away:
            sent.append(tensors[i].shape)
            tensors[i] = tensors[i].clone()
        return away

    monkeypatch.setattr(rematerialise, "_send_away", send)
    model, rows = built(), batch()
    want = model_loop_gradients(model, **rows)
    apply_model_patches(model)
    selective_checkpointing(model, save_on_cpu=True)
    assert relative_error(gradients(model, rows), want) < 5e-6
    # the hidden states of each layer and nothing that layers share
    assert [tuple(shape[-2:]) for shape in sent] == [(16, 32)] * LAYERS


def test_what_was_sent_away_is_freed(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[weakref.ref[torch.Tensor]] = []
    alive: list[int] = []

    def send(tensors: list[torch.Tensor], needs: Any, given_count: int) -> dict[int, torch.device]:
        gc.collect()
        alive.append(sum(ref() is not None for ref in given))
        away = {i: t.device for i, t in enumerate(tensors) if i >= given_count and needs[i]}
        for i in away:
            given.append(weakref.ref(tensors[i]))
            tensors[i] = tensors[i].detach().clone()
        return away

    monkeypatch.setattr(rematerialise, "_send_away", send)
    model, rows = built(), batch()
    apply_model_patches(model)
    selective_checkpointing(model, save_on_cpu=True)
    with batched_step():
        loss = model(**rows, use_cache=False).loss
    loss.backward()
    # the stream that enters a layer is gone when the next but one is reached
    assert len(alive) == LAYERS
    assert max(alive) <= 1


def test_transformers_own_policies_reach_transforms() -> None:
    model, rows = built(), batch()
    enable = enabler(model)
    if "every_n_layers" not in inspect.signature(enable).parameters:
        pytest.skip("this Transformers has no policies of its own")
    want = model_loop_gradients(model, **rows)
    apply_model_patches(model)
    enabler(model)(every_n_layers=2, offload=True)
    wrapped = [vars(layer).get("_gradient_checkpointing_func") for layer in model.model.layers]
    assert all(isinstance(w, RematCheckpoint) and w.away for w in wrapped if w is not None)
    assert any(w is not None for w in wrapped)
    assert [layer.gradient_checkpointing for layer in model.model.layers].count(True) == LAYERS // 2
    assert relative_error(gradients(model, rows), want) < 5e-6


@pytest.mark.parametrize("arguments", [None, {"use_reentrant": False}, {"use_reentrant": True}], ids=str)
@pytest.mark.parametrize("kind", ["full", "peft", "frozen", pytest.param("moe", marks=LOOPS)])
@pytest.mark.parametrize("before", [True, False])
def test_every_argument_and_kind_of_model(kind: str, arguments: dict[str, Any] | None, before: bool) -> None:
    model: Any = tiny_model(tiny_config("mixtral"), attention="sdpa").train() if kind == "moe" else built()
    if kind == "peft":
        model = get_peft_model(model, LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM"))
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                torch.nn.init.normal_(parameter, std=0.1)
    if kind == "frozen":
        for name, parameter in model.named_parameters():
            parameter.requires_grad_("v_proj" in name)
    if kind == "moe":
        for name, parameter in model.named_parameters():
            parameter.requires_grad_("experts" not in name)
    rows = batch()
    want = model_loop_gradients(model, **rows)
    if before:
        enabler(model)(arguments)
    apply_model_patches(model)
    if not before:
        enabler(model)(arguments)
    assert relative_error(gradients(model, rows), want) < 5e-6


@pytest.mark.parametrize("policy", [{}, {"part": "attention"}, {"every": 2}], ids=str)
def test_dropout_is_replayed(policy: dict[str, Any]) -> None:
    model, rows = built(attention_dropout=0.3), batch()
    apply_model_patches(model)
    torch.manual_seed(3)
    want = gradients(model, rows)
    with selective_checkpointing(model, **policy):
        torch.manual_seed(3)
        got = gradients(model, rows)
    assert relative_error(got, want) < 5e-6
    torch.manual_seed(4)
    assert relative_error(gradients(model, rows), want) > 1e-2


def test_without_the_flag_torch_stays_as_it_was() -> None:
    stock = torch.utils.checkpoint.checkpoint
    apply_runtime_patches(vmap_checkpointing=False)
    try:
        assert torch.utils.checkpoint.checkpoint is stock
    finally:
        restore_runtime()
    model = built()
    enabler(model)()
    held = [vars(m).get("_gradient_checkpointing_func") for m in model.modules()]
    apply_model_patches(model, vmap_checkpointing=False)
    assert [vars(m).get("_gradient_checkpointing_func") for m in model.modules()] == held


def test_a_recomputation_in_another_thread_knows_which_engine_runs() -> None:
    # the threads of a CUDA backward start without the context of the step
    with batched_step():
        replay = Replay([torch.zeros(1)])
    found: list[bool] = []

    def recompute() -> None:
        found.append(in_batched_step())
        with replay():
            found.append(in_batched_step())
        found.append(in_batched_step())

    thread = threading.Thread(target=recompute)
    thread.start()
    thread.join()
    assert found == [False, True, False]


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"every": 0}, InputError, "every is at least 1"),
        ({"every": 1.5}, OptionTypeError, "number of layers"),
        ({"part": "norm"}, InputError, "layer, attention, mlp"),
    ],
)
def test_wrong_policies(options: dict[str, Any], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        selective_checkpointing(built(), **options)
    with pytest.raises(InputError, match="no layers"):
        selective_checkpointing(torch.nn.Linear(2, 2))
