"""Everything that the tests of the project share: the conformance suite, as a third party would switch it on."""

import sys

import pytest

pytest_plugins = ["opake.testing", "pytester"]


@pytest.fixture(autouse=True)
def _no_process_wide_patches_are_left():
    """A trainer or a bench puts them in place for good, which the next test in the process must not see."""
    yield
    runtime = sys.modules.get("opake.patching.runtime")
    if runtime is not None and runtime.is_runtime_patched():
        runtime.restore_runtime()
