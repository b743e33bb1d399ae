"""On a GPU a step of the trainer waits for nothing, so its work on the host is hidden behind that of the device."""

from __future__ import annotations

import warnings

import pytest
import torch
from transformers import TrainerCallback

from opake.checking.tiny import tiny_model
from opake.demo.model import with_adapters
from opake.patches import restore_runtime
from opake.trainer import DPTrainer

from .subjects import arguments

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


class Watched(TrainerCallback):
    """Has torch raise where something waits, from the fifth step on; the ones before build what is replayed."""

    def on_step_begin(self, args, state, control, **kwargs):
        if state.global_step == 5:
            torch.cuda.set_sync_debug_mode("error")

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == 12:
            torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("engine", ["batched", "vmap"])
def test_a_step_waits_for_no_device(tmp_path, engine) -> None:
    data = [{"input_ids": list(range(3, 11))}] * 16
    # every row in every step: an empty batch would show less
    plan = {"sampling_rate": 1.0, "microbatch_size": 8, "max_steps": 14, "optim": "adamw_torch"}
    options = {"use_cpu": False, "use_compat_patches": True, "engine": engine, "dataloader_pin_memory": True}
    it = DPTrainer(with_adapters(tiny_model("llama")), arguments(tmp_path, **plan, **options), train_dataset=data)
    it.add_callback(Watched())
    try:
        with warnings.catch_warnings():
            # torch says that this mode is a prototype
            warnings.simplefilter("ignore", UserWarning)
            it.train()
    finally:
        torch.cuda.set_sync_debug_mode("default")
        restore_runtime()
    assert it.history.steps == 14
    assert any("captured in a CUDA graph" in reason for reason in it.engines)
