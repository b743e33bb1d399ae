"""remat and what surrounds it: right at every nesting of transforms, and it saves what it promises."""

import copy
import functools

import pytest
import torch
from torch import nn
from torch.func import functional_call, grad, jacrev, vjp, vmap

from opake.checkpoint import remat
from opake.errors import InputError, OpakeError
from opake.functional import make_functional
from opake.testing.live import peak_live_bytes
from opake.testing.oracle import loop_gradients, relative_error

H = 8


class Block(nn.Module):
    """A residual block with a buffer, dropout, a non-tensor argument and nested outputs."""

    def __init__(self, dropout=0.0):
        super().__init__()
        self.up, self.down = nn.Linear(H, 3 * H), nn.Linear(3 * H, H)
        self.register_buffer("scale", torch.full((H,), 0.5))
        self.dropout = dropout

    def forward(self, x, pair=None, *, power=2, training=True):
        if pair is not None:
            x = x * pair[0] + pair[1]
        h = nn.functional.dropout(torch.tanh(self.up(x)), self.dropout, training)
        y = x + self.scale * self.down(h**power)
        return y, {"argmax": y.argmax(-1), "same": x, "power": power}


class Net(nn.Module):
    def __init__(self, use_remat, depth=3, dropout=0.0):
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(Block(dropout) for _ in range(depth))
        self.call = remat if use_remat else (lambda fn, *a, **k: fn(*a, **k))

    def forward(self, x, pair=None):
        for block in self.blocks:
            x, more = self.call(block, x, pair, power=3)
            assert more["power"] == 3
            assert more["argmax"].dtype == torch.int64
        return x


@pytest.fixture
def rows():
    g = torch.Generator().manual_seed(1)
    return torch.randn(5, 7, H, generator=g)


def loss_of(net):
    return lambda params, x, *pair: functional_call(net, params, (x, *pair)).square().mean()


def parameters(net):
    return {name: p.detach() for name, p in net.named_parameters()}


def test_vmap_grad_equals_the_loop(rows):
    net = Net(True)
    got = vmap(grad(loss_of(net)), (None, 0))(parameters(net), rows)
    assert relative_error(got, loop_gradients(loss_of(Net(False)), parameters(net), rows)) < 5e-6


def test_values_are_those_of_the_plain_call(rows):
    with torch.no_grad():
        assert torch.equal(Net(True)(rows), Net(False)(rows))
    assert torch.equal(Net(True)(rows), Net(False)(rows))
    assert torch.equal(vmap(Net(True))(rows), vmap(Net(False))(rows))


def test_nested_arguments_that_are_mapped_or_shared(rows):
    net, plain = Net(True), Net(False)
    shift = torch.randn(H)
    pairs = torch.rand(5, 7, H)

    def loss(model):
        return lambda params, x, p: functional_call(model, params, (x, (p, shift))).square().mean()

    got = vmap(grad(loss(net)), (None, 0, 0))(parameters(net), rows, pairs)
    assert relative_error(got, loop_gradients(loss(plain), parameters(net), rows, pairs)) < 5e-6


def test_gradients_of_the_arguments(rows):
    scale = torch.rand(7, H)

    def loss(net):
        return lambda inputs: net(inputs["x"], (inputs["scale"], torch.zeros(H))).square().mean()

    def per_row(net):
        return vmap(lambda x: grad(loss(net))({"x": x, "scale": scale}))(rows)

    got, want = per_row(Net(True)), per_row(Net(False))
    assert relative_error(got, want) < 5e-6


@pytest.mark.parametrize("transform", ["jacrev", "vjp", "grad_of_vmap", "vmap_vmap_grad"])
def test_other_nestings(rows, transform):
    def run(net):
        loss, params = loss_of(net), parameters(net)
        if transform == "jacrev":
            return jacrev(lambda p: functional_call(net, p, (rows[0, 0],)))(params)
        if transform == "vjp":
            out, pull = vjp(lambda p: functional_call(net, p, (rows,)), params)
            return pull(torch.ones_like(out))[0]
        if transform == "grad_of_vmap":
            return grad(lambda p: vmap(lambda x: loss(p, x))(rows).sum())(params)
        return vmap(vmap(grad(loss), (None, 0)), (None, 0))(params, rows)

    assert relative_error(run(Net(True)), run(Net(False))) < 5e-6


def test_plain_autograd_equals_the_plain_call(rows):
    got, want = Net(True), Net(False)
    got(rows).square().mean().backward()
    want(rows).square().mean().backward()
    grads = [{name: p.grad for name, p in net.named_parameters()} for net in (got, want)]
    assert relative_error(*grads) < 1e-6


def test_plain_autograd_under_autocast_recomputes_with_the_same_casts(rows):
    def grads(net):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = net(rows).float().square().mean()
        loss.backward()
        return {name: p.grad for name, p in net.named_parameters()}

    assert relative_error(grads(Net(True)), grads(Net(False))) < 1e-6


def test_a_parameter_used_inside_and_outside_under_autocast(rows):
    linear = nn.Linear(H, H)

    def grads(call):
        linear.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = (call(linear, rows) + linear(rows)).float().square().mean()
        loss.backward()
        return {name: p.grad.clone() for name, p in linear.named_parameters()}

    assert relative_error(grads(remat), grads(lambda fn, x: fn(x))) < 2e-2


def test_dropout_is_replayed_in_plain_autograd(rows):
    def grads(net):
        torch.manual_seed(3)
        net(rows).square().mean().backward()
        return {name: p.grad for name, p in net.named_parameters()}

    assert relative_error(grads(Net(True, dropout=0.4)), grads(Net(False, dropout=0.4))) < 1e-6


def test_dropout_is_replayed_under_vmap(rows):
    def grads(net):
        torch.manual_seed(3)
        return vmap(grad(loss_of(net)), (None, 0), randomness="different")(parameters(net), rows)

    got = grads(Net(True, dropout=0.4))
    assert relative_error(got, grads(Net(False, dropout=0.4))) < 5e-6
    masks_differ = vmap(grad(loss_of(Net(True, dropout=0.4))), (None, 0), randomness="different")(
        parameters(Net(True)), rows[:1].expand(3, -1, -1)
    )
    weight = masks_differ["blocks.0.up.weight"]
    assert not torch.equal(weight[0], weight[1])


def test_the_generator_ends_where_the_forward_left_it(rows):
    torch.manual_seed(3)
    loss = Net(True, dropout=0.4)(rows).square().mean()
    after_forward = torch.get_rng_state()
    loss.backward()
    assert torch.equal(torch.get_rng_state(), after_forward)


def test_frozen_parameters_cost_nothing_and_get_nothing(rows):
    net = Net(True)
    trained = {name: p for name, p in parameters(net).items() if "down" in name}
    for name, p in net.named_parameters():
        p.requires_grad_("down" in name)
    got = vmap(grad(loss_of(net)), (None, 0))(trained, rows)
    assert relative_error(got, loop_gradients(loss_of(Net(False)), trained, rows)) < 5e-6
    net(rows).square().mean().backward()
    assert [p.grad is None for _, p in net.named_parameters()] == ["down" not in n for n, _ in net.named_parameters()]


def test_swapped_parameters_are_the_ones_used(rows):
    net = Net(True)
    other = {name: p + 0.25 for name, p in parameters(net).items()}
    got = vmap(grad(loss_of(net)), (None, 0))(other, rows)
    assert relative_error(got, loop_gradients(loss_of(Net(False)), other, rows)) < 5e-6


def test_tied_parameters_get_the_sum(rows):
    def tied(use_remat):
        net = Net(use_remat)
        net.blocks[1].up = net.blocks[0].up
        net.blocks[0].down.weight = nn.Parameter(net.blocks[0].up.weight.detach().T.clone())
        net.blocks[2].down.weight = net.blocks[0].down.weight
        return net

    net = tied(True)
    got = vmap(grad(loss_of(net)), (None, 0))(parameters(net), rows)
    assert relative_error(got, loop_gradients(loss_of(tied(False)), parameters(net), rows)) < 5e-6


@pytest.mark.parametrize(
    "form",
    ["bound_method", "bound_call", "partial_of_call", "partial_of_raw_forward", "other_method", "closure", "nested"],
)
def test_every_form_of_callable(rows, form):
    class Twice(Block):
        def twice(self, x):
            return self(self(x, None)[0], None)[0]

    torch.manual_seed(0)
    block = Twice()

    def call(x):
        first = functools.partial(type(block).forward, block, power=2)
        return {
            "bound_method": lambda: remat(block.forward, x)[0],
            "bound_call": lambda: remat(block.__call__, x)[0],
            "partial_of_call": lambda: remat(functools.partial(nn.Module.__call__, block, power=2), x)[0],
            "partial_of_raw_forward": lambda: remat(functools.partial(first, training=True), x)[0],
            "other_method": lambda: remat(block.twice, x),
            "closure": lambda: remat(lambda h: block(h)[0], x),
            "nested": lambda: remat(lambda h: (lambda g: remat(block, g)[0])(h), x),
        }[form]()

    def loss(params, x):
        class Host(nn.Module):
            def __init__(self):
                super().__init__()
                self.block = block

            def forward(self, x):
                return call(x).square().mean()

        return functional_call(Host(), {f"block.{name}": p for name, p in params.items()}, (x,))

    def plain(params, x):
        return functional_call(copy.deepcopy(block), params, (x,))[0].square().mean()

    def plain_twice(params, x):
        return functional_call(block, params, (functional_call(block, params, (x,))[0],))[0].square().mean()

    got = vmap(grad(loss), (None, 0))(parameters(block), rows)
    want = loop_gradients(plain_twice if form == "other_method" else plain, parameters(block), rows)
    assert relative_error(got, want) < 5e-6


class Parent(nn.Module):
    """Hands its own method and one of its blocks to remat: two ways to the same tensors."""

    def __init__(self, call):
        super().__init__()
        torch.manual_seed(0)
        self.blocks, self.call = nn.ModuleList(nn.Linear(H, H) for _ in range(3)), call
        self.again = self.blocks[0]

    def block(self, block, x):
        return x + torch.tanh(block(x)) + self.again(x)

    def forward(self, x):
        for block in self.blocks:
            x = self.call(self.block, block, x)
        return x


def test_a_method_that_is_handed_its_own_submodule_and_a_shared_one(rows):
    net, plain = Parent(remat), Parent(lambda fn, *args: fn(*args))
    before = dict(net.named_parameters(remove_duplicate=False))
    net(rows).square().mean().backward()
    plain(rows).square().mean().backward()
    grads = [{name: p.grad for name, p in model.named_parameters()} for model in (net, plain)]
    assert relative_error(*grads) < 1e-6
    fmodel, params = make_functional(net)
    got = vmap(grad(lambda p, x: fmodel(p, x).square().mean()), (None, 0))(params, rows)
    pmodel = make_functional(plain)[0]
    assert relative_error(got, loop_gradients(lambda p, x: pmodel(p, x).square().mean(), params, rows)) < 5e-6
    after = dict(net.named_parameters(remove_duplicate=False))
    assert before.keys() == after.keys()
    assert all(before[name] is after[name] for name in before)


def test_function_without_modules_and_with_a_tuple_of_outputs(rows):
    weight = torch.randn(H, H)

    def pair(x, w):
        return torch.sin(x @ w), (x @ w).cos()

    def loss(call):
        def value(params, x):
            a, b = call(pair, x, params["w"])
            return (a * b).mean()

        return value

    got = vmap(grad(loss(remat)), (None, 0))({"w": weight}, rows)
    assert relative_error(got, loop_gradients(loss(lambda f, *a: f(*a)), {"w": weight}, rows)) < 5e-6


def test_an_output_that_nothing_depends_on(rows):
    def loss(params, x):
        used, _ = remat(lambda a, b: (a * 2, b.exp()), x, params["b"])
        return used.sum() + params["b"].sum()

    b = {"b": torch.zeros(H)}
    assert torch.equal(vmap(grad(loss), (None, 0))(b, rows)["b"], torch.ones(5, H))


@pytest.mark.parametrize("where", ["closure", "global", "default", "beside_a_module"])
def test_a_captured_live_tensor_is_refused(rows, where):
    weight = torch.randn(H, H)

    def loss(w, x):
        if where == "closure":
            return remat(lambda h: h @ w, x).sum()
        if where == "beside_a_module":
            return remat(lambda module, h: module(h) @ w, nn.Identity(), x).sum()
        if where == "default":
            return remat(lambda h, w=w: h @ w, x).sum()
        scope = {"w": w}
        exec("def captured(h): return h @ w", scope)
        return remat(scope["captured"], x).sum()

    with pytest.raises(InputError, match=r"remat\(.*captures a tensor of shape \(8, 8\).*argument"):
        vmap(grad(loss), (None, 0))(weight, rows)


def test_a_captured_object_of_unknown_kind_is_refused(rows):
    class Holder:
        def __init__(self, w):
            self.w = w

    holder = Holder(torch.randn(H, H))
    with pytest.raises(InputError, match="Holder, which may hold tensors"):
        remat(lambda h: h @ holder.w, rows)


def test_double_backward_says_so(rows):
    net = Net(True)
    with pytest.raises(OpakeError, match="double backward"):
        grad(lambda p: sum(g.square().sum() for g in grad(loss_of(net))(p, rows[0]).values()))(parameters(net))


@pytest.mark.parametrize("transformed", [False, True])
def test_a_remat_inside_a_remat_runs_once_more_and_not_twice(rows, transformed):
    calls = []

    def inner(x):
        calls.append(1)
        return torch.tanh(x)

    def loss(x):
        return remat(lambda h: remat(inner, h * 2), x).square().sum()

    if transformed:
        vmap(grad(loss))(rows)
    else:
        loss(rows.clone().requires_grad_()).backward()
    assert len(calls) == 2


def test_it_saves_memory_under_grad_and_under_vjp():
    x = torch.randn(4, 64, H)

    def peak(net, one_vjp):
        params, loss = parameters(net), loss_of(net)

        def with_vjp(x):
            out, pull = vjp(lambda p: loss(p, x), params)
            return pull(torch.ones_like(out), retain_graph=False, create_graph=False)

        if one_vjp:
            return peak_live_bytes(lambda: vmap(with_vjp)(x))
        return peak_live_bytes(lambda: vmap(grad(loss), (None, 0))(params, x))

    deep, plain = Net(True, depth=8), Net(False, depth=8)
    assert peak(deep, one_vjp=False) < 0.4 * peak(plain, one_vjp=False)
    assert peak(deep, one_vjp=True) < 0.6 * peak(plain, one_vjp=True)


def test_rows_do_not_reach_each_other(rows):
    net = Net(True)
    changed = torch.cat([rows[:1], torch.randn_like(rows[1:])])
    changed[2] = torch.nan
    one, other = (vmap(grad(loss_of(net)), (None, 0))(parameters(net), x) for x in (rows, changed))
    assert all(torch.equal(one[name][0], other[name][0]) for name in one)
