"""Run by torchrun: what each of several processes ends with is written into a folder, one file a process."""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from safetensors.torch import save_file

if __name__ == "__main__":
    # torchrun runs this file as a script, outside the package of the tests
    sys.path.insert(0, str(Path(__file__).parents[1]))
    from trainer.subjects import Gradients, trainer, weights

    folder, device = Path(sys.argv[1]), sys.argv[2]
    options = {"use_cpu": device == "cpu", **({"ddp_backend": "gloo"} if device == "cpu" else {})}
    exact = {"noise_multiplier": 0.0, "per_example_clip_norm": float("inf"), "learning_rate": 0.1}
    drawn = Gradients()
    full = trainer(folder / "full", callbacks=[drawn], sampling_rate=1.0, max_steps=3, **exact, **options)
    rank = full.args.process_index
    if rank:
        # the first process decides which weights everybody starts from
        torch.nn.init.zeros_(full.model.head.weight)
    full.train()
    noise = Gradients()
    alone = trainer(
        folder / "alone", callbacks=[noise], sampling_rate=1e-6, max_steps=200, learning_rate=1e-9, **options
    )
    alone.train()
    mixed = trainer(
        folder / "mixed", max_steps=30, learning_rate=0.01, noise_seed=1, log_private_statistics=True, **options
    )
    mixed.train()
    mixed.save_model()
    found = {
        "full": weights(full.model),
        "gradient": drawn.stacked(),
        "noise": noise.stacked() * alone.sampler.expected,
        "after_noise": weights(alone.model),
        "mixed": weights(mixed.model),
        "batch_size": mixed._statistics._total,
        "share": torch.tensor([len(mixed.sampler.draw(step)) for step in range(30)]),
        "epsilon": torch.tensor([mixed.epsilon(), mixed.history.steps, mixed.args.world_size], dtype=torch.float64),
    }
    save_file(
        {name: value.detach().cpu().contiguous() for name, value in found.items()}, folder / f"{rank}.safetensors"
    )
