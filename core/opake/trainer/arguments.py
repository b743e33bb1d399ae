"""The arguments of private training, next to those of Transformers; each is checked when it is set.

What contradicts the model, the data or the other arguments of Transformers is refused by `opake.trainer.traps`.
"""

from __future__ import annotations

import json
import math
import warnings
from dataclasses import dataclass, field
from typing import Any

import transformers

from opake.errors import InputError, OpakeWarning, OptionTypeError
from opake.functional.engines import ENGINES
from opake.patching.flags import resolve


@dataclass
class TrainingArguments(transformers.TrainingArguments):
    """`transformers.TrainingArguments` and the fields below; two defaults differ, those of the last two fields.

    Exactly one of `target_epsilon` and `noise_multiplier` is given, and at most one of `expected_batch_size` and
    `sampling_rate`; with neither, `per_device_train_batch_size` times the number of processes is expected.

    Raises InputError, OptionTypeError or UnknownOption: a ValueError, a TypeError, a key that no patch knows.
    """

    use_compat_patches: bool = field(default=True, metadata={"help": "Make the model vmap-safe."})
    use_performance_kernels: bool = field(default=False, metadata={"help": "Fused row kernels, on CUDA."})
    performance_kernels_config: dict[str, Any] | str | None = field(default=None, metadata={"help": "Its flags."})
    target_epsilon: float | None = field(default=None, metadata={"help": "Spend at most this; calibrates noise."})
    noise_multiplier: float | None = field(default=None, metadata={"help": "Noise, in clipping norms."})
    target_delta: float | None = field(default=None, metadata={"help": "By default N ** -1.1 for N rows."})
    per_example_clip_norm: float = field(default=1.0, metadata={"help": "Largest norm of one row's gradient."})
    expected_batch_size: float | None = field(default=None, metadata={"help": "Rows of a step, on average."})
    sampling_rate: float | None = field(default=None, metadata={"help": "Probability of a row to be in a step."})
    microbatch_size: int | None = field(default=None, metadata={"help": "Rows at a time on a device."})
    noise_seed: int | None = field(default=None, metadata={"help": "For tests only: it reveals the noise."})
    engine: str = field(default="auto", metadata={"help": "Engine of gradients: auto, vmap or batched."})
    log_private_statistics: bool = field(default=False, metadata={"help": "Also log loss and sizes, without noise."})
    max_grad_norm: float = field(default=0.0, metadata={"help": "Must stay 0: gradients are clipped per example."})
    logging_nan_inf_filter: bool = field(default=False, metadata={"help": "It waits for the device at every step."})

    def __post_init__(self) -> None:
        if isinstance(self.performance_kernels_config, str):
            self.performance_kernels_config = json.loads(self.performance_kernels_config)
        self.check()
        super().__post_init__()
        if self.noise_seed is not None:
            text = f"noise_seed={self.noise_seed} is public, so the noise protects nobody; use it for tests alone"
            warnings.warn(text, OpakeWarning, stacklevel=3)

    def check(self) -> None:
        """Raise as the class does; asked again when training starts."""
        self._check_privacy()
        self._check_batches()
        self._check_patches()

    def _check_privacy(self) -> None:
        if (self.target_epsilon is None) == (self.noise_multiplier is None):
            shown = f"target_epsilon={self.target_epsilon}, noise_multiplier={self.noise_multiplier}"
            raise InputError(f"give either target_epsilon or noise_multiplier, not both and not neither; got {shown}")
        _check("target_epsilon", self.target_epsilon, "positive", lambda x: x > 0)
        _check("noise_multiplier", self.noise_multiplier, "0 or positive, and finite", lambda x: 0 <= x < math.inf)
        _check("target_delta", self.target_delta, "between 0 and 1", lambda x: 0 < x < 1)
        _check("per_example_clip_norm", self.per_example_clip_norm, "positive", lambda x: x > 0)
        if math.isinf(self.per_example_clip_norm) and self.noise_multiplier != 0:
            raise InputError("per_example_clip_norm=inf bounds nothing, so no noise suffices; it needs a finite value")
        if self.noise_seed is not None and (isinstance(self.noise_seed, bool) or not isinstance(self.noise_seed, int)):
            raise OptionTypeError(f"noise_seed is an int or None, got {self.noise_seed!r}")

    def _check_batches(self) -> None:
        expected, rate = self.expected_batch_size, self.sampling_rate
        if expected is not None and rate is not None:
            raise InputError(f"expected_batch_size={expected} and sampling_rate={rate} say the same; give one of them")
        _check("expected_batch_size", expected, "positive", lambda x: 0 < x < math.inf)
        _check("sampling_rate", rate, "above 0 and at most 1", lambda x: 0 < x <= 1)
        _check("microbatch_size", self.microbatch_size, "a whole number from 1", lambda x: isinstance(x, int) and x > 0)

    def _check_patches(self) -> None:
        config = self.performance_kernels_config
        if config is not None and not isinstance(config, dict):
            raise OptionTypeError(f"performance_kernels_config is a dict or None, got {config!r}")
        resolve("model", config or {}, compat=self.use_compat_patches, performance=True, kernels=False, peft=True)
        if self.engine not in ENGINES:
            raise InputError(f"engine is one of {', '.join(ENGINES)}; got {self.engine!r}")

    def rate_for(self, rows: int) -> float:
        """The sampling rate for a data set of this many rows."""
        expected = self.expected_batch_size or self.per_device_train_batch_size * self.world_size
        if self.sampling_rate is None and expected > rows:
            raise InputError(f"expected_batch_size={expected}, but the data set has {rows} rows; it is at most that")
        return self.sampling_rate or expected / rows

    def patch_flags(self) -> dict[str, Any]:
        """The keywords that go to both apply functions of `opake.patches`."""
        config: Any = self.performance_kernels_config or {}
        umbrellas = {"compat": self.use_compat_patches, "kernels": self.use_performance_kernels}
        return {**umbrellas, "performance": True, "peft": True, **config}


def _check(name: str, value: Any, form: str, fits: Any) -> None:
    if value is None:
        return
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise OptionTypeError(f"{name} is a number, got {value!r} ({type(value).__name__})")
    if not fits(value):
        raise InputError(f"{name} is {form}, got {value}")
