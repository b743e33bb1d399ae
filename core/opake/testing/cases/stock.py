"""Cases outside transforms: a patched model does for everybody else what the stock model does."""

# ruff: noqa: TID253
from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import pytest
import torch

from opake import hf
from opake.testing.cells import PADDINGS
from opake.testing.oracle import batch_gradients

from .base import LIMITS, Suite, assert_close, assert_same_gradients

if TYPE_CHECKING:
    from opake.testing.workbench import Bench, Rows

PREFIX = 7


class StockCases(Suite):
    @pytest.fixture
    def pair(self, bench: Bench, attention: str) -> Any:
        """The stock and the patched model, in evaluation mode."""
        return bench.stock(attention).eval(), bench.patched(attention).eval()

    @pytest.mark.parametrize("padding", PADDINGS)
    def test_forward_and_backward(self, bench: Bench, attention: str, padding: str) -> None:
        rows = bench.batch(padding)
        for mode in (True, False):
            stock, patched = bench.stock(attention).train(mode), bench.patched(attention).train(mode)
            want, got = stock(**rows), patched(**rows)
            assert_close(got.loss, want.loss)
            assert_close(got.logits, want.logits)
        rounding = functools.partial(bench.rounding, attention, each=False)
        assert_same_gradients(
            batch_gradients(patched, **rows), batch_gradients(stock, **rows), LIMITS["fp32"], rounding
        )

    def test_generate(self, bench: Bench, pair: Any) -> None:
        got, want = (self._generate(model, bench, max_new_tokens=8) for model in reversed(pair))
        assert torch.equal(got.sequences, want.sequences)
        assert_close(got.scores, want.scores)

    def test_beam_search(self, bench: Bench, pair: Any) -> None:
        got, want = (self._generate(model, bench, max_new_tokens=6, num_beams=3) for model in reversed(pair))
        assert torch.equal(got.sequences, want.sequences)
        assert_close(got.sequences_scores, want.sequences_scores)

    def test_chunked_prefill(self, bench: Bench, pair: Any) -> None:
        for padding in ("left", "none"):
            rows = bench.batch(padding)
            rows.pop("labels")
            got, want = (self._chunked(model, rows) for model in reversed(pair))
            assert_close(got, want)
            if padding == "none" and self.causal:
                assert_close(got, pair[0](**rows).logits[:, PREFIX:])

    def test_hidden_states_and_attentions(self, bench: Bench, pair: Any) -> None:
        rows = bench.batch()
        got, want = (model(**rows, output_hidden_states=True, output_attentions=True) for model in reversed(pair))
        assert len(got.hidden_states) == len(want.hidden_states) > 1
        assert_close(got.hidden_states, want.hidden_states)
        assert_close(got.attentions, want.attentions)

    def _generate(self, model: Any, bench: Bench, **options: Any) -> Any:
        rows = bench.batch("left")
        rows.pop("labels")
        fixed = {"do_sample": False, "return_dict_in_generate": True, "output_scores": True, "eos_token_id": None}
        return model.generate(**rows, **fixed, **options)

    def _chunked(self, model: Any, rows: Rows) -> torch.Tensor:
        """Logits of the last tokens, with the first in the cache."""
        first = {name: value if name == "attention_mask" else value[:, :PREFIX] for name, value in rows.items()}
        if "attention_mask" in rows:
            first["attention_mask"] = rows["attention_mask"][:, :PREFIX]
        out = model(**first, use_cache=True)
        keyword = next((name for name in hf.CACHE_KEYWORDS if name in out), None)
        if keyword is None:
            pytest.skip(f"{type(model).__name__} of the installed Transformers hands out no cache")
        rest = {name: value if name == "attention_mask" else value[:, PREFIX:] for name, value in rows.items()}
        return model(**rest, **{keyword: out[keyword]}).logits
