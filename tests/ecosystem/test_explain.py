"""`opake explain` says what patching then does, without weights, and counts what can be reckoned by hand."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, LlamaConfig

from opake import hf
from opake.checking.tiny import tiny_batch, tiny_config
from opake.cli import main
from opake.errors import InputError
from opake.explain import explain
from opake.functional import clipped_grad
from opake.patches import apply_model_patches

LARGE = LlamaConfig(
    hidden_size=8192, intermediate_size=28672, num_hidden_layers=80, num_attention_heads=64, vocab_size=128256
)


def saved(config: Any, where: Path) -> str:
    config.save_pretrained(where)
    return str(where)


@pytest.mark.parametrize("model_type", ["llama", "gemma2", "phi3", "gpt2", "olmo"])
def test_it_says_what_patching_does(model_type: str, tmp_path: Path) -> None:
    config = tiny_config(model_type)
    told = explain(saved(config, tmp_path), rank=2, tokens=12, dtype="float32")
    model = adapted(AutoModelForCausalLM.from_config(config))
    report = apply_model_patches(model) if told.report.family != "generic" else quietly(model)
    assert [(row.record, row.site, row.state) for row in told.report.rows] == [
        (row.record, row.site, row.state) for row in report.rows
    ]
    trainable = {name: p for name, p in model.named_parameters() if p.requires_grad}
    assert told.cost.trainable == sum(p.numel() for p in trainable.values())
    step = clipped_grad(model, clip_norm=1.0)(trainable, **tiny_batch())
    assert (told.engine, told.cost.reason) == (step.engine, "")


def adapted(model: Any) -> Any:
    options = LoraConfig(r=2, target_modules="all-linear", task_type="CAUSAL_LM")
    with warnings.catch_warnings():
        # of PEFT, about transposed weights
        warnings.simplefilter("ignore")
        return get_peft_model(model, options)


def quietly(model: Any) -> Any:
    from opake.errors import GenericFamilyWarning

    with pytest.warns(GenericFamilyWarning):
        return apply_model_patches(model)


def test_operations_are_those_of_the_products(tmp_path: Path) -> None:
    found = explain(saved(tiny_config("llama"), tmp_path), rank=0, tokens=64, dtype="float32").cost
    layers, heads, width = 2, 4, 8
    embedding, vectors = 97 * 32, 5 * 32
    products = 2 * 3 * 64 * (found.parameters - embedding - vectors)
    attention = 7 * layers * heads * 64 * 64 * width
    # older Transformers multiplies positions and frequencies as matrices, too
    assert found.flops == pytest.approx(products + attention, rel=1e-3)
    assert found.weights == 4 * found.parameters
    assert found.kept is not None
    assert found.kept > found.logits > 0


def test_experts_count_for_the_tokens_that_chose_them(tmp_path: Path) -> None:
    one, two = (
        explain(saved(tiny_config("mixtral", num_experts_per_tok=k), tmp_path / str(k)), rank=2, tokens=16).cost
        for k in (1, 2)
    )
    assert one.reason == ""
    assert one.flops is not None
    assert two.flops is not None
    layers, hidden, inner = 2, 32, tiny_config("mixtral").intermediate_size
    # frozen: forward and the gradient of tokens, of gate, up and down
    assert two.flops - one.flops == 2 * 2 * 16 * layers * 3 * hidden * inner


def test_a_large_model_takes_no_memory_and_a_checkpoint_a_layer_is_told(tmp_path: Path) -> None:
    found = explain(saved(LARGE, tmp_path), rank=16, tokens=4096)
    assert found.cost.parameters > 68e9
    assert found.cost.layers == 4096 * 8192 * 80 * 2
    assert found.engine == "batched"
    assert len(found.report.find(flag="lora_mlp", state="applied")) == 80


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_a_cuda_device_can_be_supposed(tmp_path: Path) -> None:
    where = saved(tiny_config("llama"), tmp_path)
    here, there = (explain(where, tokens=12, cuda=cuda).report.find(flag="rope") for cuda in (False, True))
    assert {(row.state, row.reason) for row in here} == {("off", "no CUDA device")}
    assert {row.state for row in there} == {"applied"}


def test_nothing_is_left_behind(tmp_path: Path) -> None:
    before = set(hf.attention_functions()), set(hf.mask_functions())
    explain(saved(tiny_config("llama"), tmp_path), tokens=12)
    assert (set(hf.attention_functions()), set(hf.mask_functions())) == before


def test_the_verb_prints_tables_and_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    where = saved(tiny_config("llama"), tmp_path)
    for arguments in ([where, "--tokens", "12", "--rows", "2"], [f"{where}/config.json", "--json"]):
        with pytest.raises(SystemExit) as done:
            main(["explain", *arguments])
        assert done.value.code == 0
        out = capsys.readouterr().out
        if "--json" in arguments:
            assert json.loads(out)["model_type"] == "llama"
        else:
            assert "per-example gradients by the batched engine" in out
            assert "LoRA of rank 16 on all linear layers" in out
            assert "activations, stock" in out


LLAMA = {"model_type": "llama", "hidden_size": 32, "num_attention_heads": 4, "num_hidden_layers": 1}
BROKEN = {
    "no JSON": "{",
    "null": "null",
    "a list": "[1]",
    "no model_type": '{"hidden_size": 8}',
    "an unknown model_type": '{"model_type": "lama"}',
    "a size as text": json.dumps({**LLAMA, "hidden_size": "big"}),
    "sizes that do not fit": json.dumps({**LLAMA, "hidden_size": 30}),
    "a negative size": json.dumps({**LLAMA, "intermediate_size": -3}),
    "no layers": json.dumps({**LLAMA, "num_hidden_layers": 0}),
    "an unknown activation": json.dumps({**LLAMA, "hidden_act": "foo"}),
    "an unknown rotation": json.dumps({**LLAMA, "rope_scaling": {"rope_type": "zzz"}}),
    "an unknown dtype": json.dumps({**LLAMA, "dtype": "float99"}),
    "an unknown attention": json.dumps({**LLAMA, "attn_implementation": "zzz"}),
}


@pytest.mark.parametrize("text", BROKEN.values(), ids=BROKEN)
def test_a_broken_config_is_told_in_a_line(text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(SystemExit) as done:
        main(["explain", str(tmp_path)])
    assert done.value.code == 2
    (line,) = [line for line in capsys.readouterr().err.splitlines() if not line.startswith("[transformers]")]
    assert line.startswith("error: no c")


def test_code_of_a_model_is_not_run_and_nobody_is_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "mine", "auto_map": {"AutoConfig": "code.Mine"}}')
    (tmp_path / "code.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    monkeypatch.setattr("builtins.input", lambda *_: "y")
    with pytest.raises(InputError, match="contains custom code"):
        explain(str(tmp_path))
    assert not (tmp_path / "ran").exists()
    assert "[y/N]" not in capsys.readouterr().out


def test_a_name_on_the_hub(tmp_path: Path) -> None:
    """As the hub's client keeps it on disk; the tests have no network."""
    where = tmp_path / "hub" / "models--someone--small"
    saved(tiny_config("llama"), where / "snapshots" / "0123abc")
    (where / "refs").mkdir()
    (where / "refs" / "main").write_text("0123abc")
    command = [sys.executable, "-m", "opake.cli", "explain", "someone/small", "--tokens", "12", "--json"]
    offline = {**os.environ, "HF_HOME": str(tmp_path), "HF_HUB_CACHE": str(tmp_path / "hub"), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, env=offline, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-1000:]
    assert json.loads(done.stdout)["model_type"] == "llama"


def test_a_file_by_another_name_is_that_file(tmp_path: Path) -> None:
    saved(tiny_config("gpt2"), tmp_path)
    saved(tiny_config("llama"), tmp_path / "other")
    (tmp_path / "other" / "config.json").rename(tmp_path / "llama.json")
    assert explain(str(tmp_path / "llama.json"), tokens=12).model_type == "llama"
    with pytest.raises(InputError, match="there is no file"):
        explain(str(tmp_path / "none.json"))


def test_more_tokens_than_positions_are_told(tmp_path: Path) -> None:
    found = explain(saved(tiny_config("bert"), tmp_path), rank=2, tokens=100).cost
    assert found.reason.endswith("; 100 tokens are more than the 64 positions of the model")


@pytest.mark.parametrize("bad", ["no/such/place", "t5"])
def test_what_is_no_causal_model_is_refused(bad: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    where = bad
    if bad == "t5":
        where = str(tmp_path)
        (tmp_path / "config.json").write_text('{"model_type": "t5"}')
    with pytest.raises(InputError, match=r"no causal language model|no config of a model"):
        explain(where)
    with pytest.raises(SystemExit) as done:
        main(["explain", where])
    assert done.value.code == 2
