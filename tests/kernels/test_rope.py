"""RoPE: pairings, slices, table widths, layouts, every transform, and the helpers of the families that use it."""

import pytest
import torch
from torch.func import grad, vmap

from opake_kernels import rope, rope_launch
from opake_kernels.rope import opake_rope, opake_rope_qk, rope_qk_reference, rope_reference

FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16
# D, columns of the tables, rotary_dim: whole head, half-width, slices of either kind, a width that is no power of two
WIDTHS = [(8, 8, None), (8, 4, None), (12, 6, 6), (12, 8, None), (12, 3, 6), (20, 20, None), (2, 1, None)]


def _bound(**options):
    return (lambda *a: opake_rope_qk(*a, **options)), (lambda *a: rope_qk_reference(*a, **options))


def _args(device, *, B=2, N=3, K=1, T=5, D=8, R=8, rows="all", dtype=FP32, by_token=False):
    """q, k and tables whose halves differ, so that a column read in the wrong place shows."""
    shape = {"none": (T, R), "one": (1, T, R), "all": (B, T, R)}[rows]
    q, k = (torch.randn(B, T, n, D, device=device).transpose(1, 2) for n in (N, K))
    if not by_token:
        q, k = q.contiguous(), k.contiguous()
    return [t.to(dtype) for t in (q, k, torch.randn(shape, device=device), torch.randn(shape, device=device))]


@pytest.mark.parametrize(("D", "R", "rotary_dim"), WIDTHS)
@pytest.mark.parametrize("trailing", [False, True])
@pytest.mark.parametrize("interleaved", [False, True])
def test_widths(interleaved, trailing, D, R, rotary_dim, device, check_op):
    options = {"interleaved": interleaved, "trailing": trailing, "rotary_dim": rotary_dim}
    check_op(*_bound(**options), _args(device, D=D, R=R), (0, 1))


@pytest.mark.parametrize("dtype", [FP32, BF16, FP16])
@pytest.mark.parametrize("interleaved", [False, True])
def test_dtypes(interleaved, dtype, device, check_op):
    check_op(*_bound(interleaved=interleaved), _args(device, D=16, R=16, dtype=dtype), (0, 1))


@pytest.mark.parametrize(("dtype", "tables"), [(BF16, FP32), (FP32, BF16)])
def test_tables_of_another_dtype(dtype, tables, device, check_op):
    q, k, cos, sin = _args(device)
    args = [q.to(dtype), k.to(dtype), cos.to(tables), sin.to(tables)]
    assert check_op(*_bound(), args, (0, 1))[0].dtype == dtype


@pytest.mark.parametrize("rows", ["none", "one", "all"])
@pytest.mark.parametrize("by_token", [False, True])
def test_rows_of_the_tables(by_token, rows, device, check_op):
    check_op(*_bound(), _args(device, rows=rows, by_token=by_token), (0, 1))


@pytest.mark.parametrize(
    ("B", "N", "K", "T"),
    [(1, 1, 1, 1), (2, 2, 1, 1), (1, 9, 7, 3), (1, 70, 1, 1), (3, 4, 4, 17), (0, 2, 1, 3), (2, 2, 1, 0), (2, 0, 1, 3)],
)
@pytest.mark.parametrize("by_token", [False, True])
def test_shapes(by_token, B, N, K, T, device, check_op):
    check_op(*_bound(), _args(device, B=B, N=N, K=K, T=T, by_token=by_token), (0, 1))


def test_one_tensor(device, check_op):
    q, _, cos, sin = _args(device)
    check_op(opake_rope, rope_reference, [q, cos, sin], (0,))
    slim = {"interleaved": True, "trailing": True, "rotary_dim": 4}
    check_op(
        lambda *a: opake_rope(*a, **slim), lambda *a: rope_reference(*a, **slim), [q, cos[..., :2], sin[..., :2]], (0,)
    )


@pytest.mark.parametrize("diff", [(0,), (1,)])
def test_one_gradient(diff, device, check_op):
    ours, twin = _bound()
    check_op(lambda *a: ours(*a)[diff[0]], lambda *a: twin(*a)[diff[0]], _args(device), diff)


@pytest.mark.parametrize("used", [0, 1])
def test_one_result_used(used, device):
    q, k, cos, sin = _args(device)
    leaves = (q.requires_grad_(), k.requires_grad_())
    grads = torch.autograd.grad(opake_rope_qk(q, k, cos, sin)[used].square().sum(), leaves)
    wants = torch.autograd.grad(rope_reference(leaves[used], cos, sin).square().sum(), leaves[used])
    torch.testing.assert_close(grads[used], wants[0])
    assert not grads[1 - used].any()


def _fused_projection(device):
    """q and k as models cut them from one projection (B, T, (N + 2K) D)."""
    both = torch.randn(2, 5, (3 + 2) * 8, device=device)
    return (both[..., s].view(2, 5, -1, 8).transpose(1, 2) for s in (slice(0, 24), slice(24, 32)))


def test_slices_of_a_projection_are_read_in_place(device, monkeypatch, check_op):
    q, k = _fused_projection(device)
    _, _, cos, sin = _args(device)
    check_op(*_bound(), [q, k, cos, sin], (0, 1))
    seen = []
    real = rope_launch.launch
    monkeypatch.setattr(
        rope_launch, "launch", lambda kn, grid, on, *a, **m: (seen.append(a), real(kn, grid, on, *a, **m))
    )
    q_out, k_out = opake_rope_qk(q, k, cos, sin)
    assert [t.data_ptr() for t in seen[0][:2]] == [q.data_ptr(), k.data_ptr()]
    # what follows gets (B, T, N, D) without a copy
    assert q_out.transpose(1, 2).is_contiguous()
    assert k_out.transpose(1, 2).is_contiguous()


@pytest.mark.parametrize("by_token", [False, True])
def test_layout_is_kept_both_ways(by_token, device):
    q, k, cos, sin = _args(device, B=2, N=3, K=2, T=5, by_token=by_token)
    q.requires_grad_()
    out = opake_rope_qk(q, k, cos, sin)
    # the incoming gradient lies the other way round
    dout = torch.randn(2, 5, 3, 8, device=device).transpose(1, 2)
    dout = dout.contiguous() if by_token else dout
    (dq,) = torch.autograd.grad(out[0], q, dout)
    assert out[0].stride() == dq.stride() == q.stride()
    assert out[1].stride() == k.stride()


def test_strides(device, check_op):
    q, k, cos, sin = _args(device, T=6, D=8)
    for args in [
        [q[..., ::2], k[..., ::2], cos[..., ::2], sin[..., ::2]],
        [q[:, :, ::2], k[:, :, ::2], cos[:, ::2], sin[:, ::2]],
        [q[:1].expand(2, 3, 6, 8), k[:, :, :1].expand(2, 1, 6, 8), cos[:1].expand(2, 6, 8), sin[:, :1].expand(2, 6, 8)],
        [
            q.permute(3, 1, 2, 0).contiguous().permute(3, 1, 2, 0),
            k,
            cos.transpose(1, 2).contiguous().transpose(1, 2),
            sin,
        ],
    ]:
        check_op(*_bound(), args, (0, 1))


def test_never_in_place(device):
    q, k, cos, sin = _args(device)
    kept = q.clone(), k.clone()
    out = opake_rope_qk(q, k, cos, sin)
    assert all(torch.equal(a, b) for a, b in zip((q, k), kept, strict=True))
    assert {t.untyped_storage().data_ptr() for t in out}.isdisjoint(t.untyped_storage().data_ptr() for t in (q, k))


def test_backward_turns_back(device):
    q, k, _, _ = _args(device, D=8)
    angle = torch.randn(5, 4, device=device)
    cos, sin = angle.cos(), angle.sin()
    q.requires_grad_()
    out, _ = opake_rope_qk(q, k, cos, sin)
    (back,) = torch.autograd.grad(out, q, out.detach())
    torch.testing.assert_close(back, q.detach())


def _of_angles(f):
    """`f` with both tables made of one argument: half as many mapping patterns to try."""
    return lambda x, angle: f(x, angle.cos(), angle.sin())


def test_nested_vmap_of_queries_and_keys(device):
    # keys mapped by the inner vmap alone, tables by the outer one
    q, k = torch.randn(2, 3, 1, 2, 2, 4, device=device), torch.randn(3, 1, 1, 2, 4, device=device)
    cos, sin = torch.randn(2, 2, 2, 4, device=device).unbind(1)
    pulls = [
        vmap(vmap(grad(lambda *a, f=f: sum(t.sin().sum() for t in f(*a)), (0, 1)), (0, 0, None, None)), (0, None, 0, 0))
        for f in (opake_rope_qk, rope_qk_reference)
    ]
    torch.testing.assert_close(*(pull(q, k, cos, sin) for pull in pulls))


def test_transforms_over_rows_of_their_own_tables(device, check_transforms):
    # two rows inside each example, a table for each row
    q, _, angle, _ = _args(device, B=2, N=1, T=2, D=2, R=2, by_token=True)
    check_transforms(_of_angles(opake_rope), _of_angles(rope_reference), [q, angle], (0,))


@pytest.mark.parametrize("dims", [(0, None, 0, 0), (0, 0, None, 1), (None, -1, 1, None), (1, 2, None, None)])
def test_mixed_in_dims(dims, device):
    # one table mapped and the other not, keys shared by all examples, dimensions that do not lead
    shapes = [(1, 2, 3, 4), (1, 1, 3, 4), (3, 4), (3, 4)]
    args = [
        torch.randn(shape, device=device)
        if dim is None
        else torch.stack([torch.randn(shape, device=device) for _ in range(3)], dim)
        for shape, dim in zip(shapes, dims, strict=True)
    ]
    pulls = [
        vmap(grad(lambda *a, f=f: sum(t.sin().sum() for t in f(*a)), (0, 1)), dims)
        for f in (opake_rope_qk, rope_qk_reference)
    ]
    torch.testing.assert_close(*(pull(*args) for pull in pulls))


def test_mapped_view_is_read_in_place(device, monkeypatch):
    seen = []
    real = rope_launch.launch
    monkeypatch.setattr(
        rope_launch, "launch", lambda k, grid, on, *a, **m: (seen.append(a), real(k, grid, on, *a, **m))
    )
    q = torch.randn(3, 5, 2, 8, device=device)
    cos, sin = torch.randn(2, 5, 8, device=device)
    out = vmap(lambda x: opake_rope(x.transpose(0, 1)[None], cos, sin)[0].transpose(0, 1))(q)
    assert seen[0][0].data_ptr() == q.data_ptr()
    assert out.is_contiguous()


def test_zero_examples(device):
    q, cos = torch.randn(0, 1, 2, 3, 4, device=device), torch.randn(3, 4, device=device)
    grads = vmap(grad(lambda x: opake_rope(x, cos, cos).sum()))(q)
    assert grads.shape == q.shape


def test_refusals(device, check_refusals):
    # squared, since the second derivative of a rotation is nothing at all
    check_refusals(lambda *a: tuple(t.square() for t in opake_rope_qk(*a)), _args(device), (0, 1))


def test_tables_get_no_gradient(device):
    q, k, cos, sin = _args(device)
    with pytest.raises(ValueError, match=r"opake_rope_qk: cos and sin get no gradient.*detach it"):
        opake_rope_qk(q, k, cos, sin.requires_grad_())
    with torch.no_grad():
        opake_rope_qk(q, k, cos, sin)
    sin = sin.detach()
    with pytest.raises((ValueError, RuntimeError), match="cos and sin get no gradient"):
        grad(lambda c: opake_rope_qk(q, k, c, sin)[0].sum())(cos)
    with pytest.raises((ValueError, RuntimeError), match="cos and sin get no gradient"):
        vmap(grad(lambda c: opake_rope(q, c, sin).sum()))(torch.stack((cos, cos)))
    with pytest.raises((ValueError, RuntimeError), match="cos and sin get no gradient"):
        vmap(lambda c: opake_rope(q, c, sin).sum())(torch.stack((cos, cos)).requires_grad_())


def test_bad_arguments(device):
    q, k, cos, sin = _args(device)
    for bad, expected in [
        (cos[:, :4], r"\(2, 4, 8\), expected \(5, R\), \(1, 5, R\) or \(2, 5, R\)"),
        (cos[0, 0], r"\(8,\), expected"),
        (cos[None], r"\(1, 2, 5, 8\), expected"),
        (cos[:1].expand(3, 5, 8), r"\(3, 5, 8\), expected"),
    ]:
        with pytest.raises(ValueError, match=rf"opake_rope_qk: cos and sin have shape {expected}.*\(2, 3, 5, 8\)"):
            opake_rope_qk(q, k, bad, bad)
    with pytest.raises(ValueError, match=r"one shape, got \(2, 5, 8\) and \(2, 5, 4\)"):
        opake_rope_qk(q, k, cos, sin[..., :4])
    for options in ({"rotary_dim": 6}, {"rotary_dim": 16}, {"rotary_dim": 0}):
        with pytest.raises(ValueError, match=rf"rotary width of {options['rotary_dim']} .*have 8 columns"):
            opake_rope_qk(q, k, cos, sin, **options)
    with pytest.raises(TypeError, match=r"rotary_dim is 8.0, expected a whole number"):
        opake_rope_qk(q, k, cos, sin, rotary_dim=8.0)
    with pytest.raises(ValueError, match="rotary width of 3 needs to be even"):
        opake_rope_qk(q, k, cos[..., :3], sin[..., :3])
    with pytest.raises(ValueError, match=r"number of heads only, got shapes \(2, 3, 5, 8\) and \(2, 1, 4, 8\)"):
        opake_rope_qk(q, k[:, :, 1:], cos, sin)
    with pytest.raises(ValueError, match=r"q must be \(B, N, T, D\), got shape \(3, 5, 8\)"):
        opake_rope_qk(q[0], k[0], cos, sin)
    with pytest.raises(TypeError, match=r"one dtype, got torch.float32 and torch.bfloat16"):
        opake_rope_qk(q, k.bfloat16(), cos, sin)
    with pytest.raises(TypeError, match=r"cos must be floating point, got torch.int64"):
        opake_rope_qk(q, k, cos.long(), sin)
    with pytest.raises(ValueError, match=r"x and cos must be on one device, got .* and meta"):
        opake_rope(q, cos.to("meta"), sin)


def test_double_precision_takes_the_twin(device, monkeypatch):
    monkeypatch.setattr(rope, "_PAIR_ONE", None)
    monkeypatch.setattr(rope, "_PAIR_QK", None)
    q, k, cos, sin = _args(device, dtype=torch.float64)
    assert torch.equal(opake_rope(q, cos, sin), rope_reference(q, cos, sin))
    assert torch.autograd.gradcheck(
        lambda q, k: opake_rope_qk(q, k, cos, sin), (q.requires_grad_(), k.requires_grad_())
    )


def _frequencies(device, T=5, half=4):
    return torch.outer(torch.arange(T, device=device, dtype=FP32), 0.5 ** torch.arange(half, device=device))[None]


# family, tables made of the frequencies, head size, options of ours, cut of the tables that ours takes
FAMILIES = {
    "llama": (lambda f: torch.cat((f, f), -1), 8, {}, None),
    "olmo2": (lambda f: torch.cat((f, f), -1), 8, {}, None),
    "phi3": (lambda f: torch.cat((f, f), -1), 16, {"rotary_dim": 8}, None),
    "gpt_oss": (lambda f: f, 8, {}, None),
    "cohere": (lambda f: f.repeat_interleave(2, -1), 8, {"interleaved": True}, None),
    "glm4": (lambda f: torch.cat((f, f), -1), 16, {"interleaved": True, "rotary_dim": 8}, 4),
    "deepseek_v4": (lambda f: f, 16, {"interleaved": True, "trailing": True, "rotary_dim": 8}, None),
}


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("dtype", [FP32, BF16])
def test_as_the_family_does_it(dtype, family, device, assert_errors):
    module = f"transformers.models.{family}.modeling_{family}"
    stock = pytest.importorskip(module, reason=f"this Transformers has no {family}").apply_rotary_pos_emb
    make, D, options, cut = FAMILIES[family]
    q, k, _, _ = _args(device, D=D, dtype=dtype)
    freqs = make(_frequencies(device))
    cos, sin = freqs.cos().to(dtype), freqs.sin().to(dtype)
    ours = opake_rope_qk(q, k, cos[..., :cut], sin[..., :cut], **options)

    def theirs(*args):
        if family == "deepseek_v4":
            return [stock(x, *args[2:]) for x in args[:2]]
        return stock(*args)

    exact = rope_qk_reference(*(t.double() for t in (q, k, cos[..., :cut], sin[..., :cut])), **options)
    assert_errors(ours, theirs(q, k, cos, sin), exact, factor=1.0)


@pytest.mark.gpu
@pytest.mark.parametrize("by_token", [False, True])
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize(
    ("N", "K", "T", "D", "R"),
    [(32, 8, 2048, 128, 128), (14, 2, 1000, 64, 32), (73, 5, 423, 92, 92), (2048, 1, 1, 64, 64)],
)
@pytest.mark.parametrize("dtype", [BF16, FP32])
def test_sizes_on_a_gpu(dtype, N, K, T, D, R, interleaved, by_token, check_op):
    args = _args("cuda", N=N, K=K, T=T, D=D, R=R, dtype=dtype, by_token=by_token)
    check_op(*_bound(interleaved=interleaved), args, (0, 1))


@pytest.mark.gpu
@pytest.mark.parametrize("by_token", [False, True])
def test_more_than_two_billion_elements_on_a_gpu(by_token):
    N, D = 32, 128
    T = 2**31 // (N * D) + 77
    q, k, cos, sin = _args("cuda", B=1, N=N, K=1, T=T, D=D, R=D, dtype=BF16, by_token=by_token)
    q.requires_grad_()
    out, _ = opake_rope_qk(q, k, cos, sin)
    dout = torch.randn_like(out)
    (dq,) = torch.autograd.grad(out, q, dout)
    for cut in (slice(0, 2048), slice(T // 2, T // 2 + 2048), slice(T - 2048, T)):
        xs = q[:, :, cut].detach().double().requires_grad_()
        want = rope_reference(xs, cos[:, cut].double(), sin[:, cut].double())
        (dxs,) = torch.autograd.grad(want, xs, dout[:, :, cut].double())
        torch.testing.assert_close(out[:, :, cut].double(), want, rtol=2**-7, atol=2**-9)
        torch.testing.assert_close(dq[:, :, cut].double(), dxs, rtol=2**-7, atol=2**-9)


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_another_device_than_the_current_one(check_op):
    check_op(*_bound(), _args("cuda:1"), (0, 1))
