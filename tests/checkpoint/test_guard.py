"""The checkpointing functions that ask where they run."""

import copy
import functools
import inspect
import warnings

import pytest
import torch
import torch.utils.checkpoint as stock
from torch import nn
from torch.func import functional_call, grad, vmap

from opake.checkpoint import RematCheckpoint, guarded_checkpoint
from opake.errors import OpakeWarning
from opake.testing.live import peak_live_bytes
from opake.testing.oracle import loop_gradients, relative_error

H = 8


class Net(nn.Module):
    def __init__(self, checkpoint, depth=4, **options):
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(H, 4 * H), nn.Tanh(), nn.Linear(4 * H, H)) for _ in range(depth)
        )
        self.checkpoint, self.options = checkpoint, options

    def forward(self, x):
        for block in self.blocks:
            x = x + self.checkpoint(block, x, **self.options)
        return x


def plainly(fn, *args, **_):
    return fn(*args)


def loss_of(net):
    return lambda params, x: functional_call(net, params, (x,)).square().mean()


def parameters(net):
    return {name: p.detach() for name, p in net.named_parameters()}


@pytest.fixture
def rows():
    return torch.randn(3, 5, H, generator=torch.Generator().manual_seed(1))


OPTIONS = [
    {"use_reentrant": False},
    {"use_reentrant": True},
    {"use_reentrant": False, "preserve_rng_state": False, "determinism_check": "none", "debug": False},
]


@pytest.mark.parametrize("options", OPTIONS)
def test_stock_checkpoint_fails_under_vmap_and_the_guarded_one_is_right(rows, options):
    params = parameters(Net(plainly))
    with pytest.raises(RuntimeError):
        vmap(grad(loss_of(Net(stock.checkpoint, **options))), (None, 0))(params, rows)
    got = vmap(grad(loss_of(Net(guarded_checkpoint(stock.checkpoint), **options))), (None, 0))(params, rows)
    assert relative_error(got, loop_gradients(loss_of(Net(plainly)), params, rows)) < 5e-6


def test_the_guarded_one_saves_memory():
    rows = torch.randn(3, 128, H)

    def peak(checkpoint):
        net = Net(checkpoint, depth=8, use_reentrant=False)
        return peak_live_bytes(lambda: vmap(grad(loss_of(net)), (None, 0))(parameters(net), rows))

    assert peak(guarded_checkpoint(stock.checkpoint)) < 0.4 * peak(plainly)


@pytest.mark.parametrize("make", [guarded_checkpoint, RematCheckpoint])
def test_outside_transforms_the_original_is_called_untouched(make):
    calls = []

    def original(function, *args, use_reentrant=None, **kwargs):
        calls.append((function, args, use_reentrant, kwargs))
        return "result"

    assert make(original)(len, 1, 2, use_reentrant=True, other=3) == "result"
    assert calls == [(len, (1, 2), True, {"other": 3})]


def test_the_guarded_one_keeps_name_and_signature():
    guarded = guarded_checkpoint(stock.checkpoint)
    assert guarded.__name__ == "checkpoint"
    assert guarded.__wrapped__ is stock.checkpoint
    assert inspect.signature(guarded) == inspect.signature(stock.checkpoint)


def test_a_closure_over_live_tensors_runs_plainly_with_one_warning(rows):
    checkpoint = guarded_checkpoint(stock.checkpoint)
    w = torch.randn(H, H)

    def loss(call):
        def value(params, x):
            for _ in range(2):
                x = call(lambda h: torch.tanh(h @ params["w"]), x)
            return x.square().mean()

        return value

    with pytest.warns(OpakeWarning, match=r"without rematerialisation .*captures a tensor of shape \(8, 8\)") as seen:
        got = vmap(grad(loss(functools.partial(checkpoint, use_reentrant=False))), (None, 0))({"w": w}, rows)
    assert len(seen) == 1
    assert relative_error(got, loop_gradients(loss(plainly), {"w": w}, rows)) < 5e-6
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        vmap(grad(loss(functools.partial(checkpoint, use_reentrant=False))), (None, 0))({"w": w}, rows)


def test_a_closure_over_modules_is_rematerialised():
    class Old(Net):
        """The custom-forward idiom of older models."""

        def forward(self, x):
            def custom(module):
                def run(*inputs):
                    return module(*inputs)

                return run

            for block in self.blocks:
                x = x + self.checkpoint(custom(block), x, use_reentrant=False)
            return x

    rows = torch.randn(3, 128, H)
    net, plain = Old(guarded_checkpoint(stock.checkpoint), depth=8), Net(plainly, depth=8)
    got = vmap(grad(loss_of(net)), (None, 0))(parameters(net), rows)
    assert relative_error(got, loop_gradients(loss_of(plain), parameters(net), rows)) < 5e-6
    peaks = [peak_live_bytes(lambda m=m: vmap(grad(loss_of(m)), (None, 0))(parameters(m), rows)) for m in (net, plain)]
    assert peaks[0] < 0.4 * peaks[1]


def test_remat_checkpoint_copies_and_holds_the_stock_function():
    one = RematCheckpoint(stock.checkpoint)
    assert one.stock is stock.checkpoint
    assert copy.deepcopy(one).stock is stock.checkpoint
