"""per_example_grads of functions and of plain modules, against a loop of one-row backward passes."""

import pytest
import torch
from torch import nn

from opake.errors import EngineUnavailable, InputError, OptionTypeError
from opake.functional import make_functional, per_example_grads
from opake.testing.live import peak_live_bytes
from opake.testing.oracle import loop_gradients, model_loop_gradients, relative_error
from opake.testing.trace import first_difference, operator_trace

B, T, H = 5, 3, 4


def loss(params, x, y):
    return ((torch.tanh(x @ params["w"] + params["b"]) * params["s"] - y) ** 2).mean()


def named_loss(params, x, *, y):
    return loss(params, x, y)


@pytest.fixture
def params():
    g = torch.Generator().manual_seed(0)
    return {"w": torch.randn(H, H, generator=g), "b": torch.randn(H, generator=g), "s": torch.tensor(2.0)}


@pytest.fixture
def rows():
    g = torch.Generator().manual_seed(1)
    return torch.randn(B, T, H, generator=g), torch.randn(B, T, H, generator=g)


@pytest.mark.parametrize("size", [None, 1, 2, 3, 5, 50])
def test_equals_the_loop_in_any_microbatch_size(params, rows, size):
    got = per_example_grads(loss, microbatch_size=size)(params, *rows)
    assert {name: g.shape for name, g in got.items()} == {n: (B, *p.shape) for n, p in params.items()}
    assert relative_error(got, loop_gradients(loss, params, *rows)) < 5e-6


def test_one_row(params, rows):
    one = tuple(row[:1] for row in rows)
    assert relative_error(per_example_grads(loss)(params, *one), loop_gradients(loss, params, *one)) < 5e-6


def test_rows_by_name_and_nested(params, rows):
    want = loop_gradients(loss, params, *rows)
    x, y = rows
    assert relative_error(per_example_grads(named_loss)(params, x, y=y), want) < 5e-6
    nested = per_example_grads(lambda p, batch: loss(p, batch["x"], batch["more"][0]), microbatch_size=2)
    assert relative_error(nested(params, {"x": x, "more": (y, None, "text", 3)}), want) < 5e-6


@pytest.mark.parametrize(
    ("in_dims", "move", "names"),
    [
        (1, (1, 1), False),
        ((1, 0), (1, 0), False),
        ((None, -1, 2), (2, 2), False),
        ({"x": 1}, (1, 0), True),
        ({"x": 2, "y": 1}, (2, 1), True),
    ],
)
@pytest.mark.parametrize("size", [None, 2])
def test_in_dims(params, rows, in_dims, move, names, size):
    want = loop_gradients(loss, params, *rows)
    moved = [row.movedim(0, d) for row, d in zip(rows, move, strict=True)]
    f = per_example_grads(loss, in_dims=in_dims, microbatch_size=size)
    got = f(params, **dict(zip("xy", moved, strict=True))) if names else f(params, *moved)
    assert relative_error(got, want) < 5e-6


def test_shared_arguments_have_no_row_dimension(params, rows):
    x, y = rows
    want = loop_gradients(loss, params, x, y[:1].expand(B, -1, -1))
    assert relative_error(per_example_grads(loss, in_dims=(0, None))(params, x, y[0]), want) < 5e-6
    assert (
        relative_error(per_example_grads(loss, in_dims={"y": None}, microbatch_size=2)(params, x=x, y=y[0]), want)
        < 5e-6
    )
    nested = per_example_grads(lambda p, b: loss(p, b["x"], b["y"]), in_dims=({"x": 0, "y": None},))
    assert relative_error(nested(params, {"x": x, "y": y[0]}), want) < 5e-6


@pytest.mark.parametrize("size", [None, 2])
def test_has_aux(params, rows, size):
    def with_aux(p, x, y):
        value = loss(p, x, y)
        return value, {"value": value, "pred": (x.sum(0), y[0])}

    grads, aux = per_example_grads(with_aux, has_aux=True, microbatch_size=size)(params, *rows)
    assert relative_error(grads, loop_gradients(loss, params, *rows)) < 5e-6
    torch.testing.assert_close(aux["value"], torch.stack([loss(params, *row) for row in zip(*rows, strict=True)]))
    torch.testing.assert_close(aux["pred"][0], rows[0].sum(1))
    assert not aux["value"].requires_grad


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_any_dtype(params, rows, dtype):
    low = {name: p.to(dtype) for name, p in params.items()}
    cast = [row.to(dtype) for row in rows]
    got = per_example_grads(loss, microbatch_size=2)(low, *cast)
    assert {g.dtype for g in got.values()} == {dtype}
    want = loop_gradients(loss, params, *rows)
    limit = {torch.float64: 1e-6, torch.float16: 1e-2, torch.bfloat16: 8e-2}[dtype]
    assert relative_error(got, want) < limit


def test_mixed_dtypes_are_kept(params, rows):
    params["b"] = params["b"].to(torch.bfloat16)
    got = per_example_grads(loss)(params, *rows)
    assert {name: g.dtype for name, g in got.items()} == {n: p.dtype for n, p in params.items()}


def test_parameters_and_rows_that_require_grad_leave_no_graph(params, rows):
    params = {name: nn.Parameter(p) for name, p in params.items()}
    rows = [row.requires_grad_() for row in rows]
    captured = torch.ones(H, requires_grad=True)
    grads, aux = per_example_grads(lambda p, x, y: (loss(p, x * captured, y), x), has_aux=True)(params, *rows)
    assert not any(t.requires_grad for t in [*grads.values(), aux])


def test_an_unused_parameter_gets_zeros_that_can_be_written(params, rows):
    params["unused"] = torch.ones(2, 3)
    got = per_example_grads(loss)(params, *rows)["unused"]
    assert got.shape == (B, 2, 3)
    got += 1
    assert got.eq(1).all()


@pytest.mark.parametrize("engine", ["auto", "vmap"])
def test_zero_rows_do_not_call_the_function(params, rows, engine):
    def never(params, x, y):
        raise AssertionError("called")

    empty = [row[:0] for row in rows]
    got = per_example_grads(never, engine=engine)(params, *empty)
    assert {name: g.shape for name, g in got.items()} == {n: (0, *p.shape) for n, p in params.items()}
    grads, aux = per_example_grads(never, has_aux=True, microbatch_size=2)(params, *empty)
    assert aux is None
    assert grads["w"].dtype == params["w"].dtype


def dropout_loss(params, x):
    return (nn.functional.dropout(x, 0.5) @ params["w"]).square().mean()


def test_randomness(params):
    x = torch.ones(B, 8, H)
    torch.manual_seed(0)
    different = per_example_grads(dropout_loss)(params, x)["w"]
    assert not torch.equal(different[0], different[1])
    same = per_example_grads(dropout_loss, randomness="same")(params, x)["w"]
    assert torch.equal(same[0], same[1])
    assert same[0].abs().sum() > 0
    with pytest.raises(RuntimeError, match="random"):
        per_example_grads(dropout_loss, randomness="error")(params, x)


def test_row_independence_is_bitwise_and_the_trace_does_not_move(params, rows):
    x, y = rows
    f = per_example_grads(loss)
    x2, y2 = torch.cat([x[:1], torch.randn(B - 1, T, H)]), torch.cat([y[:1], torch.full((B - 1, T, H), torch.nan)])
    one, other = f(params, x, y), f(params, x2, y2)
    assert all(torch.equal(one[name][0], other[name][0]) for name in one)
    assert other["w"][1:].isnan().all()
    traces = [operator_trace(lambda pair=pair: f(params, *pair)) for pair in ((x, y), (x2, y2))]
    assert len(traces[0]) > 10
    assert first_difference(*traces) is None


class Plain(nn.Module):
    """No Transformers model: its forward takes a batch and returns a mapping with its loss."""

    def __init__(self, key="loss"):
        super().__init__()
        torch.manual_seed(0)
        self.norm, self.head, self.key = nn.LayerNorm(H), nn.Linear(H, 3), key
        self.register_buffer("offset", torch.ones(H))

    def forward(self, features, labels=None, scale=1.0):
        assert features.dim() == 3
        logits = self.head(self.norm(features + self.offset)).mean(1) * scale
        return {self.key: nn.functional.cross_entropy(logits, labels), "logits": logits}


FEATURES = torch.randn(B, T, H, generator=torch.Generator().manual_seed(2))
LABELS = torch.arange(B) % 3


@pytest.mark.parametrize("size", [None, 2])
def test_a_module_with_its_own_loss(size):
    model = Plain()
    params = make_functional(model)[1]
    got, aux = per_example_grads(model, has_aux=True, microbatch_size=size)(
        params, features=FEATURES, labels=LABELS, scale=2.0
    )
    want = model_loop_gradients(model, features=FEATURES, labels=LABELS, scale=2.0)
    assert relative_error(got, want) < 5e-6
    torch.testing.assert_close(aux["logits"], model(FEATURES, LABELS, 2.0)["logits"])


def test_a_subset_of_a_modules_parameters():
    model = Plain()
    params = {"head.weight": model.head.weight}
    got = per_example_grads(model)(params, features=FEATURES, labels=LABELS)
    model.requires_grad_(False)
    model.head.weight.requires_grad_()
    assert relative_error(got, model_loop_gradients(model, features=FEATURES, labels=LABELS)) < 5e-6


def test_a_module_that_returns_an_object():
    class Output:
        def __init__(self, loss):
            self.loss = loss

    class Wrapped(Plain):
        def forward(self, features, labels):
            return Output(super().forward(features, labels)["loss"])

    params = make_functional(Plain())[1]
    got = per_example_grads(Wrapped())(params, features=FEATURES, labels=LABELS)
    assert relative_error(got, model_loop_gradients(Plain(), features=FEATURES, labels=LABELS)) < 5e-6


def test_modules_refuse_what_they_cannot_use():
    f, params = per_example_grads(Plain("other")), make_functional(Plain())[1]
    with pytest.raises(InputError, match="Plain returned no loss for the rows features, labels"):
        f(params, features=FEATURES, labels=LABELS)
    with pytest.raises(OptionTypeError, match="rows of a model are passed by name, got 1 positional"):
        f(params, FEATURES)
    with pytest.raises(InputError, match=r"Plain has no parameter 'haed.weight'; the nearest is 'head.weight'"):
        f({"haed.weight": params["head.weight"]}, features=FEATURES, labels=LABELS)
    with pytest.raises(InputError, match=r"'head.bias' of Plain has shape \(3,\), params has \(4,\)"):
        f({"head.bias": torch.zeros(4)}, features=FEATURES, labels=LABELS)


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        (
            lambda p, x, y: per_example_grads(loss)(p, x, y[:2]),
            InputError,
            "row argument 0 has 5 rows, but row argument 1 has 2",
        ),
        (lambda p, x, y: per_example_grads(loss)(p, x=x, y=y[:2]), InputError, "x has 5 rows, but y has 2"),
        (lambda p, x, y: per_example_grads(loss)(p, {"x": x, "y": y[:2]}), InputError, r"argument 0\['y'\] has 2"),
        (lambda p, x, y: per_example_grads(loss)(p), InputError, "no tensor with a row dimension .* none were passed"),
        (
            lambda p, x, y: per_example_grads(loss, in_dims=(None, None))(p, x, y),
            InputError,
            "no tensor with a row dim",
        ),
        (
            lambda p, x, y: per_example_grads(loss)(p, x, torch.tensor(1.0)),
            InputError,
            r"argument 1 has shape \(\).*in_dims",
        ),
        (lambda p, x, y: per_example_grads(loss, in_dims=3)(p, x, y), InputError, "no row dimension 3"),
        (lambda p, x, y: per_example_grads(loss, in_dims=(0,))(p, x, y), InputError, "1 entries for 2 positional"),
        (lambda p, x, y: per_example_grads(loss, in_dims=("a", 0))(p, x, y), OptionTypeError, "in_dims holds ints"),
        (lambda p, x, y: per_example_grads(loss, in_dims=((0, 1), 0))(p, x, y), InputError, r"entry \(0, 1\)"),
        (
            lambda p, x, y: per_example_grads(loss, in_dims={"z": 0})(p, x=x, y=y),
            InputError,
            "names z, but the rows are x, y",
        ),
        (lambda p, x, y: per_example_grads(loss)({}, x, y), InputError, "params is empty"),
        (lambda p, x, y: per_example_grads(loss)([1], x, y), OptionTypeError, "mapping of names to tensors, got list"),
        (
            lambda p, x, y: per_example_grads(loss)({"w": 1}, x, y),
            OptionTypeError,
            r"params\['w'\] is no tensor, got int",
        ),
        (
            lambda p, x, y: per_example_grads(loss)({"w": torch.ones(1, dtype=torch.int64)}, x, y),
            InputError,
            "torch.int64",
        ),
        (
            lambda p, x, y: per_example_grads(lambda p, x: x @ p["w"])(p, x),
            InputError,
            r"scalar tensor, got .*\(3, 4\)",
        ),
        (lambda p, x, y: per_example_grads(lambda p, x: 1.0)(p, x), InputError, "scalar tensor, got float 1.0"),
        (
            lambda p, x, y: per_example_grads(loss, has_aux=True)(p, x, y),
            InputError,
            r"returns \(loss, aux\), got a tensor",
        ),
        (lambda p, x, y: per_example_grads(loss, microbatch_size=0), InputError, "at least 1, got 0"),
        (
            lambda p, x, y: per_example_grads(loss, microbatch_size=2.0),
            OptionTypeError,
            r"int or None, got 2.0 \(float\)",
        ),
        (lambda p, x, y: per_example_grads(loss, engine="fast"), InputError, "auto, vmap, batched; got 'fast'"),
        (lambda p, x, y: per_example_grads(loss, randomness="no"), InputError, "different, same, error; got 'no'"),
        (lambda p, x, y: per_example_grads(3), OptionTypeError, "patched model, got int 3"),
        (
            lambda p, x, y: per_example_grads(loss, engine="batched")(p, x, y),
            EngineUnavailable,
            "the target is a function",
        ),
        (lambda p, x, y: per_example_grads(loss, engine="batched")(p, x[:0], y[:0]), NotImplementedError, "function"),
    ],
)
def test_wrong_use_is_refused_with_both_values(params, rows, call, error, text):
    with pytest.raises(error, match=text):
        call(params, *rows)


def test_memory_of_many_microbatches_is_the_result_and_one_microbatch(rows):
    params = {"w": torch.randn(64, 64)}
    x = torch.randn(16, 256, 64)

    def wide(p, x):
        return torch.tanh(x @ p["w"]).square().mean()

    grads = 16 * 64 * 64 * 4
    whole, small = (
        peak_live_bytes(lambda s=s: per_example_grads(wide, microbatch_size=s)(params, x)) for s in (None, 2)
    )
    assert small - grads < 0.2 * (whole - grads)
