"""What families with a mixture of experts say of their routers (see mmrl.policy.routing)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mmrl.policy.families.contract import ModelFamily

if TYPE_CHECKING:
    import torch

__all__ = ["SigmoidRouters", "SoftmaxRouters"]

_EXPERTS = ("mlp.experts.gate_up_proj", "mlp.experts.down_proj")


class SoftmaxRouters(ModelFamily):
    """Routers of Qwen's mixtures: probabilities of the chosen experts, divided by their sum (of Qwen3-MoE where it says so)."""

    router = "mlp.gate"
    experts = _EXPERTS

    def mlp(self, text: Any, number: int) -> tuple[int, int, int, int]:
        """See ModelFamily. Qwen3.5 has experts in every layer, one of them for all tokens; other text models of a family none."""
        step = getattr(text, "decoder_sparse_step", 1)
        dense = number in getattr(text, "mlp_only_layers", ()) or (number + 1) % step
        if dense or not getattr(text, "num_experts", 0):
            return text.intermediate_size, 0, 0, 0
        shared = getattr(text, "shared_expert_intermediate_size", 0)
        return shared, text.num_experts_per_tok, text.moe_intermediate_size, text.num_experts

    def gate_weights(
        self, router: Any, logits_TE: torch.Tensor, experts_Tk: torch.Tensor
    ) -> torch.Tensor:
        """See ModelFamily."""
        import torch

        probs_TE = logits_TE.softmax(-1, dtype=torch.float32)
        chosen_Tk = probs_TE.gather(-1, experts_Tk)
        if getattr(router, "norm_topk_prob", True):
            chosen_Tk = chosen_Tk / chosen_Tk.sum(-1, keepdim=True)
        return chosen_Tk.to(logits_TE.dtype)


class SigmoidRouters(ModelFamily):
    """Routers of DeepSeek-V3 and of what is built like it: each expert has a score of its own."""

    router = "mlp.gate"
    experts = _EXPERTS

    def mlp(self, text: Any, number: int) -> tuple[int, int, int, int]:
        """See ModelFamily."""
        if number < text.first_k_dense_replace:
            return text.intermediate_size, 0, 0, 0
        width = text.moe_intermediate_size
        return text.n_shared_experts * width, text.num_experts_per_tok, width, text.n_routed_experts

    def gate_weights(
        self, router: Any, logits_TE: torch.Tensor, experts_Tk: torch.Tensor
    ) -> torch.Tensor:
        """See ModelFamily. What balances the load (e_score_correction_bias) and groups of experts decide the choice alone."""
        chosen_Tk = logits_TE.sigmoid().gather(1, experts_Tk)
        if router.norm_topk_prob:
            chosen_Tk = chosen_Tk / (chosen_Tk.sum(-1, keepdim=True) + 1e-20)
        return chosen_Tk * router.routed_scaling_factor
