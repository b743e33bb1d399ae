"""The construction under every op, on bodies of plain torch: folding, both roads through functorch, shared weights."""

import pytest
import torch
from torch.func import grad, jacrev, vjp, vmap

from opake_kernels import dispatch
from opake_kernels.fold import ROWS, SHARED, fold_rows, fold_shared, function_pair, sum_to_shape, transforms_active


def _forward(x, weight, groups, power):
    y = fold_rows(x, groups) * fold_shared(weight, groups, x).unsqueeze(1)
    return y.reshape(x.shape), fold_rows(x, groups).sum(-1).reshape(x.shape[:-1])


def _backward(grads, saved, need, groups, power):
    (dy,), (x, weight, _total) = grads, saved
    dx = (fold_rows(dy, groups) * fold_shared(weight, groups, x).unsqueeze(1)).reshape(x.shape) if need[0] else None
    dw = (fold_rows(dy, groups) * fold_rows(x, groups)).sum(1) if need[1] else None
    return dx, dw.reshape(*x.shape[:groups], x.shape[-1]) if dw is not None else None


def _make():
    return function_pair(
        "opake_scale",
        forward=_forward,
        backward=_backward,
        roles=(ROWS, SHARED),
        save_inputs=(0, 1),
        save_outputs=(1,),
        stats=1,
    )


@pytest.fixture(params=["short", "torch"])
def op(request, monkeypatch):
    if request.param == "torch":
        monkeypatch.setattr(dispatch, "SHORT_ROAD", False)
    pair = _make()
    return lambda x, weight: pair(x, weight, 0, 2)[0]


def _twin(x, weight):
    return x * weight


def test_the_short_road_is_there():
    assert dispatch.SHORT_ROAD


def test_values_and_gradients(op, check_op):
    check_op(op, _twin, [torch.randn(3, 4, 5), torch.randn(5)], (0, 1))


def test_transforms(op, check_transforms):
    check_transforms(op, _twin, [torch.randn(4, 5), torch.randn(5)], (0, 1))
    check_transforms(op, _twin, [torch.randn(4, 5), torch.randn(5)], (1,))


def test_refusals(op, check_refusals):
    check_refusals(op, [torch.randn(4, 5), torch.randn(5)], (0, 1))


def test_group_axis_in_plain_autograd():
    # what the batched engine does: the weight carries the example axis itself
    pair = _make()
    x, weight = torch.randn(3, 4, 5), torch.randn(5).expand(3, 5).clone().requires_grad_()
    (per_example,) = torch.autograd.grad(pair(x, weight, 1, 2)[0].sum(), weight)
    torch.testing.assert_close(per_example, x.sum(1))


def test_three_levels_and_outer_autograd(op):
    x, weight = torch.randn(2, 3, 2, 4, 5), torch.randn(5)
    inner = lambda f: vmap(vmap(vmap(lambda x, w: f(x, w), (0, None)), (0, None)), (0, None))  # noqa: E731
    results = []
    for f in (op, _twin):
        leaf = weight.clone().requires_grad_()
        results.append(torch.autograd.grad(inner(f)(x, leaf).square().sum(), leaf)[0])
    torch.testing.assert_close(*results)


def test_autograd_through_an_inner_gradient_of_the_other_argument(op):
    # the inner gradient by x is w itself, so the outer one must refuse rather than return zero
    x, weight = torch.randn(4, 5), torch.randn(5, requires_grad=True)
    inner = grad(lambda x: op(x, weight).sum())(x)
    with pytest.raises(RuntimeError, match="double backward is not supported"):
        inner.sum().backward()


def test_a_constant_of_an_inner_level_is_differentiated_at_the_outer_one(op):
    x, weight = torch.randn(4, 5), torch.randn(5)
    outer = lambda f: grad(lambda w: vjp(lambda x: f(x, w), x)[0].sum())(weight)  # noqa: E731
    torch.testing.assert_close(outer(op), outer(_twin))


def test_jacrev(op):
    x, weight = torch.randn(2, 3), torch.randn(3)
    torch.testing.assert_close(jacrev(op, (0, 1))(x, weight), jacrev(_twin, (0, 1))(x, weight))


def test_vjp_called_after_its_level_is_gone(op):
    x, weight, ct = torch.randn(2, 4, 5), torch.randn(5), torch.randn(2, 4, 5)
    pulls = lambda f: vmap(lambda x, c: vjp(lambda w: f(x, w), weight)[1](c))(x, ct)  # noqa: E731
    torch.testing.assert_close(pulls(op), pulls(_twin))
    _, back = vjp(lambda w: op(x, w), weight)
    torch.testing.assert_close(back(ct)[0], (x * ct).sum((0, 1)))


def test_no_grad_inside_a_transform(op):
    x, weight = torch.randn(4, 5), torch.randn(5)

    def loss(w):
        with torch.no_grad():
            fixed = op(x, w)
        return (op(x, w) * fixed).sum()

    torch.testing.assert_close(grad(loss)(weight), (x * x * weight).sum(0))


def test_the_road_keeps_the_interpreter_stack_after_an_error(monkeypatch):
    def broken(*_):
        raise ValueError("body")

    pair = function_pair("opake_broken", forward=broken, backward=_backward, roles=(ROWS, SHARED))
    with pytest.raises(ValueError, match="body"):
        vmap(grad(lambda w, x: pair(x, w, 0, 2)), (None, 0))(torch.randn(5), torch.randn(2, 4, 5))
    assert not transforms_active()


def test_sum_to_shape():
    grad_ = torch.ones(2, 3, 4)
    assert sum_to_shape(grad_, (1, 3, 4)).shape == (1, 3, 4)
    assert sum_to_shape(grad_, (1, 1, 4)).eq(6).all()
    assert sum_to_shape(grad_, (2, 3, 4)) is grad_
