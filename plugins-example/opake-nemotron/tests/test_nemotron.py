"""The family passes the suite that opake's own families pass."""

from transformers.models.nemotron import modeling_nemotron

from opake.patches import apply_model_patches
from opake.testing import FamilySuite

# before 5.13 Transformers has an attention class for each implementation here; SDPA's is right under vmap, but warns
SELECTS = hasattr(modeling_nemotron, "ALL_ATTENTION_FUNCTIONS")
ATTENTIONS = ("sdpa", "eager") if SELECTS else ("eager",)


class TestNemotron(FamilySuite):
    model_type = "nemotron"
    attentions = ATTENTIONS

    def test_half_of_a_head_is_rotated(self, bench):
        model = bench.build(ATTENTIONS[-1])
        assert model.model.rotary_emb.inv_freq.numel() * 2 == model.config.head_dim // 2


class TestNemotronBiases(FamilySuite):
    """Biases everywhere, and an activation without a kernel, which stays with Transformers."""

    model_type = "nemotron"
    attentions = ATTENTIONS
    config = {"attention_bias": True, "mlp_bias": True, "hidden_act": "gelu"}

    def test_another_activation_stays(self, bench):
        (row, *_) = apply_model_patches(bench.build(ATTENTIONS[-1]), activation=True).find(flag="activation")
        assert row.state == "stock"
        assert row.reason == "the activation of NemotronMLP is not relu squared; it stays as it is"
