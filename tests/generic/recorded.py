"""What is recorded of the installed Transformers: a model type that it cannot serve is skipped with that reason."""

from __future__ import annotations

import pytest
import transformers

from opake.checking import answers

ANSWERS = answers.for_version(transformers.__version__)


def needs(model_type: str) -> None:
    """Skip the test where the model type is recorded as not supported on the installed version."""
    answer = ANSWERS.types.get(model_type)
    if answer is not None and not answer.proven:
        pytest.skip(f"{model_type} on transformers {ANSWERS.transformers}: {answer.reason}")
