"""clipped_grad: sums, norms, losses and counts against a loop; bad rows, padding rows, no rows."""

import math

import pytest
import torch

from opake.errors import EngineUnavailable, InputError, OptionTypeError
from opake.functional import ClippedGrad, clipped_grad, clipping
from opake.testing.live import peak_live_bytes
from opake.testing.oracle import loop_gradients
from opake.testing.trace import first_difference, operator_trace

B, T, H = 7, 3, 4
C = 2.5


def loss(params, x, y):
    return ((torch.tanh(x @ params["w"] + params["b"]) * params["s"] - y) ** 2).mean()


@pytest.fixture
def params():
    g = torch.Generator().manual_seed(0)
    return {"w": torch.randn(H, H, generator=g), "b": torch.randn(H, generator=g), "s": torch.tensor(2.0)}


@pytest.fixture
def rows():
    g = torch.Generator().manual_seed(1)
    return torch.randn(B, T, H, generator=g), torch.randn(B, T, H, generator=g)


def reference(params, rows, clip_norm, keep=None):
    """Clipped sum in float64, norms, losses."""
    double = {name: p.double() for name, p in params.items()}
    rows = [row.double() for row in rows]
    grads = loop_gradients(loss, double, *rows)
    norms = sum(g.reshape(len(g), -1).square().sum(1) for g in grads.values()).sqrt()
    scale = (clip_norm / norms).clamp(max=1)
    keep = torch.ones(len(norms), dtype=torch.bool) if keep is None else keep
    total = {n: torch.einsum("b,b...->...", scale[keep], g[keep]) for n, g in grads.items()}
    losses = torch.stack([loss(double, *row) for row in zip(*rows, strict=True)])
    return total, norms, losses


def assert_sums(got, want, rtol=1e-5):
    for name in want:
        torch.testing.assert_close(got[name].double(), want[name], rtol=rtol, atol=rtol)


@pytest.mark.parametrize("size", [None, 1, 2, 3, 7, 20])
def test_equals_the_loop_in_any_microbatch_size(params, rows, size):
    out = clipped_grad(loss, clip_norm=C, microbatch_size=size)(params, *rows)
    want, norms, losses = reference(params, rows, C)
    assert isinstance(out, ClippedGrad)
    assert_sums(out.grads, want)
    assert {n: (g.shape, g.dtype) for n, g in out.grads.items()} == {n: (p.shape, p.dtype) for n, p in params.items()}
    torch.testing.assert_close(out.norms.double(), norms, rtol=1e-5, atol=0)
    torch.testing.assert_close(out.losses.double(), losses, rtol=1e-5, atol=0)
    assert int(out.clipped) == int((norms > C).sum()) == 4
    assert int(out.nonfinite) == 0
    assert out.engine == "vmap"
    assert "function" in out.reason
    assert "no capture: CUDA graphs need parameters on a CUDA device" in out.reason


def test_counts_and_norms_stay_on_the_device_as_tensors(params, rows):
    out = clipped_grad(loss, clip_norm=C)(params, *rows)
    assert out.norms.shape == out.losses.shape == (B,)
    assert out.norms.dtype == out.losses.dtype == torch.float32
    assert out.clipped.shape == out.nonfinite.shape == ()
    assert out.clipped.dtype == out.nonfinite.dtype == torch.int64
    assert not any(t.requires_grad for t in [*out.grads.values(), *out[1:5]])


def test_parameters_and_captured_tensors_that_require_grad_leave_no_graph(params, rows):
    params = {name: torch.nn.Parameter(p) for name, p in params.items()}
    captured = torch.ones(H, requires_grad=True)
    f = clipped_grad(lambda p, x, y: (loss(p, x * captured, y), x * captured), clip_norm=C, has_aux=True)
    out, aux = f(params, *rows)
    assert not any(t.requires_grad for t in [*out.grads.values(), *out[1:5], aux])


def test_nothing_is_read_on_the_host(params, rows):
    traces = [
        operator_trace(
            lambda scale=scale: clipped_grad(loss, clip_norm=C, microbatch_size=3)(params, rows[0] * scale, rows[1])
        )
        for scale in (1.0, 1e-6, math.nan)
    ]
    assert first_difference(traces[0], traces[1]) is None
    assert first_difference(traces[0], traces[2]) is None
    assert not any("_local_scalar_dense" in step or "nonzero" in step for step in traces[0])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_sums_are_in_the_parameters_dtype(params, rows, dtype):
    low = {name: p.to(dtype) for name, p in params.items()}
    cast = [row.to(dtype) for row in rows]
    out = clipped_grad(loss, clip_norm=C, microbatch_size=2)(low, *cast)
    assert {g.dtype for g in out.grads.values()} == {dtype}
    assert_sums(out.grads, reference(low, cast, C)[0], rtol=1e-5 if dtype == torch.float64 else 0.06)
    assert out.losses.dtype == torch.float32


def test_accumulation_is_float32_for_narrow_parameters():
    # each row adds 1/256 of an ulp of the running sum: bfloat16 sums would stand still at the first row
    params = {"p": torch.zeros(1, dtype=torch.bfloat16)}
    x = torch.cat([torch.ones(1, 1), torch.full((256, 1), 2.0**-9)]).to(torch.bfloat16)
    out = clipped_grad(lambda p, x: (p["p"] * x).sum(), clip_norm=10.0, microbatch_size=1)(params, x)
    assert float(out.grads["p"]) == 1.5


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("size", [None, 2])
def test_rows_that_are_not_finite_become_zero_and_are_counted(params, rows, bad, size):
    x, y = (row.clone() for row in rows)
    y[2, 0, 0] = bad
    y[5] = bad
    keep = torch.ones(B, dtype=torch.bool)
    keep[[2, 5]] = False
    out = clipped_grad(loss, clip_norm=C, microbatch_size=size)(params, x, y)
    want, norms, _ = reference(params, rows, C, keep)
    assert_sums(out.grads, want)
    assert all(g.isfinite().all() for g in out.grads.values())
    assert int(out.nonfinite) == 2
    assert int(out.clipped) == int((norms[keep] > C).sum())
    assert out.norms.isfinite().tolist() == keep.tolist()


def test_one_bad_entry_of_one_parameter_drops_the_row():
    params = {"a": torch.ones(3), "b": torch.ones(2)}
    x = torch.ones(2, 3)
    x[0, 1] = math.inf

    out = clipped_grad(lambda p, x: (p["a"] * x).sum() + p["b"].sum(), clip_norm=10.0)(params, x)
    assert torch.equal(out.grads["a"], torch.ones(3))
    assert torch.equal(out.grads["b"], torch.ones(2))


def test_a_loss_that_is_not_finite_with_a_finite_gradient_counts():
    out = clipped_grad(lambda p, x: (p["a"] * 2).sum() + x.sum(), clip_norm=10.0)(
        {"a": torch.ones(1)}, torch.tensor([[math.nan], [1.0]])
    )
    assert float(out.grads["a"]) == 4
    assert int(out.nonfinite) == 0
    assert out.losses.isnan().tolist() == [True, False]


@pytest.mark.parametrize("dtype", [torch.float32, torch.int64, torch.bool])
@pytest.mark.parametrize("size", [None, 3])
def test_padding_rows_add_nothing_and_are_not_counted(params, rows, dtype, size):
    keep = torch.tensor([1, 1, 0, 1, 0, 1, 0], dtype=torch.bool)
    x, y = rows
    y = y.clone()
    y[4] = math.nan
    out = clipped_grad(loss, clip_norm=C, microbatch_size=size)(params, x, y, row_weight=keep.to(dtype))
    want, norms, losses = reference(params, rows, C, keep)
    assert_sums(out.grads, want)
    assert int(out.nonfinite) == 0
    assert int(out.clipped) == int((norms[keep] > C).sum())
    torch.testing.assert_close(out.norms.double(), norms * keep, rtol=1e-5, atol=0)
    torch.testing.assert_close(out.losses.double(), losses * keep, rtol=1e-5, atol=0)


def test_all_padding_is_zero(params, rows):
    out = clipped_grad(loss, clip_norm=C)(params, *rows, row_weight=torch.zeros(B))
    assert all(g.eq(0).all() for g in out.grads.values())
    assert int(out.clipped) == 0
    assert out.norms.eq(0).all()


@pytest.mark.parametrize("size", [None, 2])
@pytest.mark.parametrize("weighted", [False, True])
def test_zero_rows_do_not_call_the_function(params, rows, size, weighted):
    def never(params, x, y):
        raise AssertionError("called")

    empty = [row[:0] for row in rows]
    params["w"] = params["w"].to(torch.bfloat16)
    weight = torch.zeros(0) if weighted else None
    out, aux = clipped_grad(never, clip_norm=C, has_aux=True, microbatch_size=size)(params, *empty, row_weight=weight)
    assert aux is None
    assert {n: (g.shape, g.dtype) for n, g in out.grads.items()} == {n: (p.shape, p.dtype) for n, p in params.items()}
    assert all(g.eq(0).all() for g in out.grads.values())
    assert out.norms.shape == out.losses.shape == (0,)
    assert int(out.clipped) == int(out.nonfinite) == 0
    assert out.engine == "vmap"


@pytest.mark.parametrize("size", [None, 2])
def test_has_aux_and_rows_by_name(params, rows, size):
    x, y = rows
    f = clipped_grad(
        lambda p, x, *, y: (loss(p, x, y), {"first": x[0]}),
        clip_norm=C,
        has_aux=True,
        in_dims={"y": 1},
        microbatch_size=size,
    )
    out, aux = f(params, x, y=y.movedim(0, 1))
    assert_sums(out.grads, reference(params, rows, C)[0])
    assert torch.equal(aux["first"], x[:, 0])


def test_no_clipping(params, rows):
    out = clipped_grad(loss, clip_norm=math.inf)(params, *rows)
    want = {n: g.sum(0).double() for n, g in loop_gradients(loss, params, *rows).items()}
    assert_sums(out.grads, want)
    assert int(out.clipped) == 0


def test_one_row(params, rows):
    one = [row[2:3] for row in rows]
    out = clipped_grad(loss, clip_norm=C)(params, *one)
    assert_sums(out.grads, reference(params, one, C)[0])
    total = math.sqrt(sum(float(g.double().square().sum()) for g in out.grads.values()))
    assert C * (1 - 1e-6) < total <= C


def test_the_inputs_are_not_written(params, rows):
    before = [t.clone() for t in (*params.values(), *rows)]
    clipped_grad(loss, clip_norm=C, microbatch_size=2)(params, *rows)
    assert all(map(torch.equal, before, (*params.values(), *rows)))


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"clip_norm": 0.0}, InputError, "positive, got 0.0"),
        ({"clip_norm": -1}, InputError, "positive, got -1"),
        ({"clip_norm": math.nan}, InputError, "positive, got nan"),
        ({"clip_norm": "1"}, OptionTypeError, r"a number, got '1' \(str\)"),
        ({"clip_norm": True}, OptionTypeError, "a number, got True"),
        ({"clip_norm": C, "capture": "yes"}, InputError, "'auto', True or False; got 'yes'"),
        ({"clip_norm": C, "microbatch_size": -2}, InputError, "at least 1, got -2"),
        ({"clip_norm": C, "engine": "x"}, InputError, "got 'x'"),
    ],
)
def test_wrong_options_are_refused_at_once(options, error, text):
    with pytest.raises(error, match=text):
        clipped_grad(loss, **options)


def test_wrong_weights_are_refused(params, rows):
    f = clipped_grad(loss, clip_norm=C)
    with pytest.raises(InputError, match=r"row_weight has shape \(3,\), the rows are 7; it needs \(7,\)"):
        f(params, *rows, row_weight=torch.ones(3))
    with pytest.raises(OptionTypeError, match="tensor of 7 weights, got list"):
        f(params, *rows, row_weight=[1] * 7)


def test_batched_is_refused_for_a_function(params, rows):
    with pytest.raises(EngineUnavailable, match="engine='batched' cannot serve loss: the target is a function"):
        clipped_grad(loss, clip_norm=C, engine="batched")(params, *rows)


def test_capture_needs_cuda(params, rows):
    with pytest.raises(EngineUnavailable, match=r"capture=True cannot serve .*CUDA device"):
        clipped_grad(loss, clip_norm=C, capture=True)(params, *rows)


def test_capture_false_is_said(params, rows):
    assert "capture=False was asked for" in clipped_grad(loss, clip_norm=C, capture=False)(params, *rows).reason


def test_memory_is_one_microbatch_and_one_sum(monkeypatch):
    monkeypatch.setattr(clipping, "_SLICE", 1024)
    params = {"w": torch.randn(128, 128)}
    x = torch.randn(16, 4, 128)
    unit = 128 * 128 * 4

    def square(p, x):
        return (x @ p["w"]).square().mean()

    def peak(size):
        return peak_live_bytes(lambda: clipped_grad(square, clip_norm=1.0, microbatch_size=size)(params, x)) / unit

    # (b, P) gradients and one float32 sum
    assert 2 < peak(1) < 2.3
    assert 3 < peak(2) < 3.4
    assert 16 < peak(None) < 17.5
