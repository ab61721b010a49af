"""Fused linear policy loss: hidden states and LM head to the loss, without the (B * T, V) logits.

The log-probs come from `selective_log_probs`; the rest is float64 arithmetic on (B, T), so memory is that of one tile
of logits and of the gradients asked for.
"""

import dataclasses

import torch
from torch import Tensor

from parity.fixes import policy
from parity.fixes.checks import check_positive, check_settings, check_shapes, check_tensors, check_values, columns, like
from parity.fixes.chunked import precision
from parity.fixes.logprobs import selective_log_probs
from parity.fixes.metrics import PolicyMetrics, measure

IGNORED = -100


@dataclasses.dataclass(eq=False, repr=False)
class FusedLinearGRPOLoss(torch.nn.Module):
    """Policy loss of the GRPO family straight from hidden states and head; returns `(loss, metrics)`.

    Drop-in for `liger_kernel.chunked_loss.LigerFusedLinearGRPOLoss` (0.8.5; same constructor names, same call) with
    the semantics of TRL 1.16.0's plain `GRPOTrainer._compute_loss`. With lp the log-probs of `selective_log_probs`
    (softcap, logit scale, bias and temperature included), w = exp(lp - lp_old) per token or per sequence, and l one of
    the surrogates in `parity.fixes.policy`:

        l = l * off_policy_mask * entropy_mask * sampler_ratio        (vespo takes the ratio into its weight)
        l = l + beta * k3(lp_ref, lp) * (w if use_bias_correction_kl, with its gradient)
        grpo, sapo:  mean_i( sum_t m l / max(|o_i|, 1) ) / accumulation
        bnpo:        sum m l / max(sum m, 1) / accumulation
        dr_grpo:     sum m l / (B * max_completion_length) / accumulation
        luspo:       mean_i( sum_t m l ) / accumulation
        dapo, cispo, vespo:  sum m l / N,
                     N = max(num_items_in_batch, 1) / processes * accumulation / steps_per_generation
        loss = loss - entropy_coef * mean entropy over the kept tokens / accumulation

    Settings beyond Liger's: `softcap`, `logit_scale`, `off_policy_mask_threshold`, `top_entropy_quantile`,
    `entropy_coef`, `current_gradient_accumulation_steps` (1: the caller divides, as TRL's Liger path does) and
    `steps_per_generation` (None: equal to the accumulation steps, TRL's default). All may be changed between calls.
    In `eval()` mode nothing is divided by the accumulation, as in TRL. Sequence-level weights work with every loss
    type. `memory_budget` is that of `selective_log_probs`.
    `chunk_size` is the number of sequences whose logits are formed at a time (None: what suits the device) and
    `compiled` is accepted and not needed. `use_ref_model=False` with beta != 0 is refused: there would be no KL.

    Metrics, detached float32 scalars over all ranks, by TRL's names: `kl`, `entropy`, `clip_ratio/low_mean`,
    `high_mean`, `region_mean`, `low_min`, `high_max`, `cispo_clip_ratio`, `vespo/phi_seq_mean`, `policy_loss`. Means
    run over loss tokens, or over sequences where there is one value per sequence. Clip fractions are of w itself,
    before delta. `low_min` and `high_max` are NaN when no sequence has a token, as in TRL.

    Under autocast as in `selective_log_probs`; inside torch.compile it is a graph break, which `fullgraph=True` refuses.
    Not differentiable twice (RuntimeError).

    Rounding: logits as in `selective_log_probs` ("chunked"); log-probs, entropies, loss and metrics in float64, loss
    and metrics rounded once to float32; gradients in the dtype of their inputs, rounded once.

    Raises ValueError, naming argument and value, for settings out of range, shapes that do not fit, ids outside the
    vocabulary, and values that are not finite at unmasked positions (negative ones too in the sampler's ratio; NaN is
    allowed in `sampling_per_token_logps`). What stands at masked positions never matters. An all-masked batch has
    loss 0 and zero gradients. NaN in hidden states or head is not looked for: it comes out as NaN.
    """

    beta: float = 0.04
    compiled: bool = True
    use_ref_model: bool = True
    chunk_size: int | None = None
    epsilon_low: float = 0.2
    epsilon_high: float = 0.2
    loss_type: str = "dapo"
    max_completion_length: int | None = None
    importance_sampling_level: str = "token"
    sapo_temperature_pos: float = 1.0
    sapo_temperature_neg: float = 1.05
    temperature: float = 1.0
    delta: float | None = None
    use_bias_correction_kl: bool = False
    vespo_k_pos: float = 2.0
    vespo_lambda_pos: float = 3.0
    vespo_k_neg: float = 3.0
    vespo_lambda_neg: float = 2.0
    _: dataclasses.KW_ONLY
    softcap: float | None = None
    logit_scale: float = 1.0
    off_policy_mask_threshold: float | None = None
    top_entropy_quantile: float = 1.0
    entropy_coef: float = 0.0
    current_gradient_accumulation_steps: float = 1
    steps_per_generation: float | None = None
    memory_budget: int | None = None

    def __post_init__(self) -> None:
        super().__init__()
        check_settings(self)

    def forward(
        self,
        _input: Tensor,
        lin_weight: Tensor,
        selected_token_ids: Tensor,
        attention_mask: Tensor,
        advantages: Tensor,
        bias: Tensor | None = None,
        ref_per_token_logps: Tensor | None = None,
        old_per_token_logps: Tensor | None = None,
        ref_input: Tensor | None = None,
        ref_weight: Tensor | None = None,
        ref_bias: Tensor | None = None,
        vllm_is_ratio: Tensor | None = None,
        num_items_in_batch: Tensor | float | None = None,
        *,
        sampling_per_token_logps: Tensor | None = None,
        current_gradient_accumulation_steps: float | None = None,
        steps_per_generation: float | None = None,
    ) -> tuple[Tensor, PolicyMetrics]:
        """`(loss, metrics)` of one micro-batch.

        _input (B, T, H) or (B * T, H), lin_weight (V, H), bias (V,); selected_token_ids and attention_mask (B, T), the
        latter 0 or 1 in any dtype: the loss mask, that is completion mask times tool mask; advantages (B,), (B, 1) or
        (B, T); old, reference and sampling log-probs (B, T), old defaulting to the policy's own without gradient;
        vllm_is_ratio, the sampler's importance ratio, (B,), (B, 1) or (B, T); num_items_in_batch, the loss tokens of
        the generation batch over all processes, defaulting to this micro-batch's times the accumulation steps.
        Reference log-probs are computed from ref_input, ref_weight and ref_bias where they are not given.
        """
        check_settings(self)
        accumulation, per_generation = current_gradient_accumulation_steps, steps_per_generation
        check_positive("current_gradient_accumulation_steps", accumulation, optional=True)
        check_positive("steps_per_generation", per_generation, optional=True)
        required = {"_input": _input, "lin_weight": lin_weight, "selected_token_ids": selected_token_ids}
        required |= {"attention_mask": attention_mask, "advantages": advantages}
        given = {"old_per_token_logps": old_per_token_logps, "sampling_per_token_logps": sampling_per_token_logps}
        given["ref_per_token_logps"] = ref_per_token_logps
        optional = {"bias": bias, "vllm_is_ratio": vllm_is_ratio, "ref_input": ref_input, "ref_weight": ref_weight}
        check_tensors(required, optional | {"ref_bias": ref_bias} | given)
        mask = attention_mask != 0
        if mask.dim() != 2 or selected_token_ids.shape != mask.shape:
            raise ValueError(
                f"selected_token_ids of shape {tuple(selected_token_ids.shape)} and attention_mask of shape "
                f"{tuple(mask.shape)}: expected (B, T) both"
            )
        _input = _by_position(_input, mask)
        names = ("_input", "lin_weight", "bias", "selected_token_ids")
        check_shapes(_input, lin_weight, bias, selected_token_ids, names)
        needs_ref = self.beta != 0.0
        if needs_ref and ref_per_token_logps is None and (ref_input is None or ref_weight is None):
            raise ValueError(f"beta={self.beta}: needs ref_per_token_logps, or ref_input and ref_weight")
        advantages, ratio = columns(advantages, mask, "advantages"), columns(vllm_is_ratio, mask, "vllm_is_ratio")
        if not needs_ref:
            given["ref_per_token_logps"] = None
        for name, tensor in given.items():
            if tensor is not None and tensor.shape != mask.shape:
                raise ValueError(f"{name} of shape {tuple(tensor.shape)}: expected {tuple(mask.shape)}")
        vocab = lin_weight.shape[0]
        ids = selected_token_ids.long()  # narrow ones would wrap, at -100 and at the vocabulary's size
        check_values(ids, vocab, attention_mask, mask, advantages, ratio, given, num_items_in_batch)

        ids = torch.where(mask, ids, IGNORED)
        logps, entropies = self._log_probs(_input, lin_weight, ids, bias)
        if needs_ref and ref_per_token_logps is None:
            assert ref_input is not None
            assert ref_weight is not None
            ref_input = _by_position(ref_input, mask)
            check_shapes(ref_input, ref_weight, ref_bias, ids, ("ref_input", "ref_weight", "ref_bias", names[-1]))
            with torch.no_grad():
                ref_per_token_logps, _ = self._log_probs(ref_input, ref_weight, ids, ref_bias)
        wide = logps.dtype
        if self.entropy_coef == 0.0:
            entropies = entropies.detach()
        detached = logps.detach()

        def filled(x: Tensor | None) -> Tensor:
            return detached if x is None else torch.where(mask, x.detach().to(wide), detached)

        old, ref = filled(old_per_token_logps), filled(ref_per_token_logps)
        sampling = old if sampling_per_token_logps is None else filled(sampling_per_token_logps)
        live = mask.any(1, keepdim=True)
        advantages = torch.where(like(advantages, mask, live), advantages.detach().to(wide), 0.0)
        if ratio is not None:
            ratio = torch.where(like(ratio, mask, live), ratio.detach().to(wide), 1.0)

        log_ratio = logps - old
        w = policy.bounded_exp(policy.log_weights(log_ratio, mask, self.importance_sampling_level))
        loss, phi = self._surrogate(logps, log_ratio, w, advantages, ratio, mask)
        if self.off_policy_mask_threshold is not None:
            on_policy = policy.keep_on_policy(logps, sampling, mask, advantages, self.off_policy_mask_threshold)
            loss = torch.where(on_policy, loss, 0.0)
        kept = mask
        if self.top_entropy_quantile < 1.0:
            kept = policy.keep_high_entropy(entropies, mask, self.top_entropy_quantile)
            loss = torch.where(kept, loss, 0.0)
        if ratio is not None and self.loss_type != "vespo":
            loss = loss * ratio
        kl = None
        if needs_ref:
            kl = policy.k3(ref, logps) * (w if self.use_bias_correction_kl else 1.0)
            loss = loss + self.beta * kl

        if self.training:
            accumulation = accumulation or self.current_gradient_accumulation_steps
            per_generation = per_generation or self.steps_per_generation or accumulation
        else:
            accumulation = per_generation = 1.0
        policy_loss = policy.aggregate(self, loss, mask, num_items_in_batch, accumulation, per_generation)
        total = policy_loss if self.loss_type in policy.WINDOW_NORMALISED else policy_loss / accumulation
        bonus = self.entropy_coef != 0.0
        if bonus:
            mean_entropy = (entropies * kept).sum() / kept.sum().clamp(min=1)
            total = total - self.entropy_coef * mean_entropy / accumulation
        metrics = measure(self, w, advantages, kl, entropies, phi, policy_loss if bonus else None, mask)
        return total.to(precision(_input, lin_weight, bias)[1]), metrics

    def _log_probs(self, hidden: Tensor, weight: Tensor, ids: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
        found = selective_log_probs(
            hidden,
            weight,
            ids,
            bias=bias,
            temperature=self.temperature,
            softcap=self.softcap,
            logit_scale=self.logit_scale,
            entropy=True,
            token_chunk_size=None if self.chunk_size is None else max(self.chunk_size * ids.shape[1], 1),
            ignore_index=IGNORED,
            wide=True,
            memory_budget=self.memory_budget,
        )
        assert isinstance(found, tuple)
        return found

    def _surrogate(
        self, logps: Tensor, log_ratio: Tensor, w: Tensor, advantages: Tensor, ratio: Tensor | None, mask: Tensor
    ) -> tuple[Tensor, Tensor | None]:
        if self.loss_type == "cispo":
            return policy.cispo_surrogate(w, advantages, logps, self.epsilon_high), None
        if self.loss_type == "sapo":
            tau_pos, tau_neg = self.sapo_temperature_pos, self.sapo_temperature_neg
            return policy.sapo_surrogate(w, advantages, tau_pos, tau_neg), None
        if self.loss_type == "vespo":
            phi = policy.vespo_weights(self, log_ratio, mask, advantages, ratio)
            return -phi * advantages * logps, phi
        return policy.clipped_surrogate(w, advantages, self.epsilon_low, self.epsilon_high, self.delta), None


def _by_position(hidden: Tensor, mask: Tensor) -> Tensor:
    """(B, T, H), also where the rows of hidden states come as (B * T, H)."""
    flat = hidden.dim() == 2 and hidden.shape[0] == mask.numel()
    return hidden.unflatten(0, mask.shape) if flat else hidden
