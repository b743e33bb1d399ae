"""Query, key and value projections of one input with their LoRA adapters in one call: the input is read once.

Any of the three may be without an adapter, and ranks and scalings may differ. Leaves out what comes after: q/k norms,
rotary embedding and attention.
Source: Hu et al., "LoRA: Low-Rank Adaptation of Large Language Models" (2021).
"""

from __future__ import annotations

import torch

from .arguments import check_precision, check_projections, leading_axis, takes_twin, with_axis
from .lora_w import lora_w_reference, projection_pair

__all__ = ["lora_qkv_reference", "opake_lora_qkv"]

Weight = torch.Tensor | None
Three = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def lora_qkv_reference(
    X: torch.Tensor,
    Wq: torch.Tensor,
    Aq: Weight,
    Bq: Weight,
    Sq: float,
    Wk: torch.Tensor,
    Ak: Weight,
    Bk: Weight,
    Sk: float,
    Wv: torch.Tensor,
    Av: Weight,
    Bv: Weight,
    Sv: float,
    bq: Weight = None,
    bk: Weight = None,
    bv: Weight = None,
    *,
    lora_precision: str = "compute",
) -> Three:
    """The plain twin of `opake_lora_qkv`."""
    q = lora_w_reference(X, Wq, Aq, Bq, Sq, bq, lora_precision=lora_precision)
    k = lora_w_reference(X, Wk, Ak, Bk, Sk, bk, lora_precision=lora_precision)
    v = lora_w_reference(X, Wv, Av, Bv, Sv, bv, lora_precision=lora_precision)
    return q, k, v


_lora_qkv = projection_pair("opake_lora_qkv", 3)


def opake_lora_qkv(
    X: torch.Tensor,
    Wq: torch.Tensor,
    Aq: Weight,
    Bq: Weight,
    Sq: float,
    Wk: torch.Tensor,
    Ak: Weight,
    Bk: Weight,
    Sk: float,
    Wv: torch.Tensor,
    Av: Weight,
    Bv: Weight,
    Sv: float,
    bq: Weight = None,
    bk: Weight = None,
    bv: Weight = None,
    *,
    lora_precision: str = "compute",
) -> Three:
    """(q, k, v), each X W^T + (X A) B * S + b.

    X: (..., hidden); W: (out, hidden); A: (hidden, rank); B: (rank, out); b: (out,) or None; out and rank may differ.
    A projection whose A and B are None is a base projection. Dtypes, the leading example axis of adapters,
    `lora_precision` and errors are as in `opake_lora_w`. Returns three tensors (..., out) in the dtype of X.
    """
    op = "opake_lora_qkv"
    given = [("q", Wq, Aq, Bq, bq), ("k", Wk, Ak, Bk, bk), ("v", Wv, Av, Bv, bv)]
    check_precision(op, lora_precision)
    X = check_projections(op, X, given)
    if takes_twin(given, lora_precision):
        return lora_qkv_reference(
            X, Wq, Aq, Bq, Sq, Wk, Ak, Bk, Sk, Wv, Av, Bv, Sv, bq, bk, bv, lora_precision=lora_precision
        )
    groups = leading_axis(given)
    weights = [tensor for each in given for tensor in with_axis(groups, each)]
    return _lora_qkv(X, *weights, groups, (float(Sq), float(Sk), float(Sv)))[:3]
