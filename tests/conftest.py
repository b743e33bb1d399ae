"""Everything that the tests of the project share: the conformance suite, as a third party would switch it on."""

import sys

import pytest

pytest_plugins = ["opake.testing", "pytester"]


@pytest.fixture(autouse=True)
def _nothing_is_left_in_the_process():
    """Which test came before must not matter: a warning comes once a process, a trainer's patches stay for good."""
    target = sys.modules.get("opake.patching.target")
    if target is not None:
        target._warned.clear()
    yield
    runtime = sys.modules.get("opake.patching.runtime")
    if runtime is not None and runtime.is_runtime_patched():
        runtime.restore_runtime()
    # several processes test on one card, and what stays in the cache of one the others cannot have
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        torch.cuda.empty_cache()
