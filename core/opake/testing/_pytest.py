"""The pytest side of the suite: fixtures, parameters, marks and the line that names this run's part of the grid."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest

from .cells import PART, chosen, grid, part_name

if TYPE_CHECKING:
    from .workbench import Bench


@pytest.fixture(scope="class")
def bench(request: pytest.FixtureRequest) -> Iterator[Bench]:
    """The models, batches and reference gradients that the tests of one suite share."""
    import torch

    from .workbench import Bench

    # tensors this small only wait for a second thread
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    shared = Bench(request.cls)
    yield shared
    torch.set_num_threads(threads)
    shared.close()


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "slow: cells outside this run's part of the grid; -m 'not slow' leaves them out")


def pytest_report_header() -> str:
    name = part_name()
    return f"opake: part {name} of the grid of cells ({PART}={name} repeats it, {PART}=all is every cell)"


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Spread the cases of a suite over what its family can be loaded with."""
    attentions = getattr(metafunc.cls, "attentions", None)
    if metafunc.cls is None or attentions is None:
        return
    if "attention" in metafunc.fixturenames:
        metafunc.parametrize("attention", attentions, scope="class")
    if "cell" in metafunc.fixturenames:
        metafunc.parametrize("cell", _cells(metafunc.cls, attentions))


def _cells(suite: Any, attentions: tuple[str, ...]) -> list[Any]:
    cells = grid(attentions, suite.dtypes)
    part = chosen(suite.__name__, cells, part_name())
    return [pytest.param(c, id=str(c), marks=() if c in part else pytest.mark.slow) for c in cells]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what a suite says its family cannot pass, with the reason that it gives."""
    for item in items:
        without = getattr(getattr(item, "cls", None), "without", None)
        name = getattr(item, "originalname", item.name).removeprefix("test_")
        if without and name in without:
            item.add_marker(pytest.mark.skip(reason=without[name]))
