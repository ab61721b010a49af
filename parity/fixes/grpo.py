"""Fused linear policy loss: hidden states and LM head to the loss, without the (B * T, V) logits.

The log-probs come from `selective_log_probs`; the rest is float64 arithmetic on (B, T), so memory is that of one tile
of logits and of the gradients asked for.
"""

import math

import torch
from torch import Tensor

from parity.fixes import policy
from parity.fixes.checks import check_positive, check_settings, check_values, columns, like
from parity.fixes.logprobs import selective_log_probs

IGNORED = -100


class PolicyMetrics(dict[str, Tensor]):
    """Metrics by TRL's names. An integer indexes Liger's pair instead: [0] the KL (if beta != 0), [-1] the clipping."""

    def __missing__(self, key: object) -> Tensor:
        if not isinstance(key, int):
            raise KeyError(key)
        clipped = self.get("clip_ratio/region_mean", self.get("cispo_clip_ratio"))
        pair = [self["kl"]] if "kl" in self else []
        return [*pair, torch.zeros_like(next(iter(self.values()))) if clipped is None else clipped][key]


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
    type. `chunk_size` is the number of sequences whose logits are formed at a time (None: what suits the device) and
    `compiled` is accepted and not needed. `use_ref_model=False` with beta != 0 is refused: there would be no KL.

    Metrics, detached float32 scalars over all ranks, by TRL's names: `kl`, `entropy`, `clip_ratio/low_mean`,
    `high_mean`, `region_mean`, `low_min`, `high_max`, `cispo_clip_ratio`, `vespo/phi_seq_mean`, `policy_loss`. Means
    run over loss tokens, or over sequences where there is one value per sequence. Clip fractions are of w itself,
    before delta. `low_min` and `high_max` are NaN when no sequence has a token, as in TRL.

    Rounding: log-probs and entropies as in `selective_log_probs` ("chunked"), rounded once to float32; loss and
    metrics in float64, rounded once to float32; gradients in the dtype of their inputs, rounded once.

    Raises ValueError, naming argument and value, for settings out of range, shapes that do not fit, ids outside the
    vocabulary, and values that are not finite at unmasked positions (negative ones too in the sampler's ratio; NaN is
    allowed in `sampling_per_token_logps`). What stands at masked positions never matters. An all-masked batch has
    loss 0 and zero gradients. NaN in hidden states or head is not looked for: it comes out as NaN.
    """

    def __init__(
        self,
        beta: float = 0.04,
        compiled: bool = True,
        use_ref_model: bool = True,
        chunk_size: int | None = None,
        epsilon_low: float = 0.2,
        epsilon_high: float = 0.2,
        loss_type: str = "dapo",
        max_completion_length: int | None = None,
        importance_sampling_level: str = "token",
        sapo_temperature_pos: float = 1.0,
        sapo_temperature_neg: float = 1.05,
        temperature: float = 1.0,
        delta: float | None = None,
        use_bias_correction_kl: bool = False,
        vespo_k_pos: float = 2.0,
        vespo_lambda_pos: float = 3.0,
        vespo_k_neg: float = 3.0,
        vespo_lambda_neg: float = 2.0,
        *,
        softcap: float | None = None,
        logit_scale: float = 1.0,
        off_policy_mask_threshold: float | None = None,
        top_entropy_quantile: float = 1.0,
        entropy_coef: float = 0.0,
        current_gradient_accumulation_steps: float = 1,
        steps_per_generation: float | None = None,
    ) -> None:
        super().__init__()
        self.beta = beta
        self.compiled = compiled
        self.use_ref_model = use_ref_model
        self.chunk_size = chunk_size
        self.epsilon_low = epsilon_low
        self.epsilon_high = epsilon_high
        self.loss_type = loss_type
        self.max_completion_length = max_completion_length
        self.importance_sampling_level = importance_sampling_level
        self.sapo_temperature_pos = sapo_temperature_pos
        self.sapo_temperature_neg = sapo_temperature_neg
        self.temperature = temperature
        self.delta = delta
        self.use_bias_correction_kl = use_bias_correction_kl
        self.vespo_k_pos = vespo_k_pos
        self.vespo_lambda_pos = vespo_lambda_pos
        self.vespo_k_neg = vespo_k_neg
        self.vespo_lambda_neg = vespo_lambda_neg
        self.softcap = softcap
        self.logit_scale = logit_scale
        self.off_policy_mask_threshold = off_policy_mask_threshold
        self.top_entropy_quantile = top_entropy_quantile
        self.entropy_coef = entropy_coef
        self.current_gradient_accumulation_steps = current_gradient_accumulation_steps
        self.steps_per_generation = steps_per_generation
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
        called = {"current_gradient_accumulation_steps": current_gradient_accumulation_steps}
        check_positive(called | {"steps_per_generation": steps_per_generation})
        mask = attention_mask != 0
        if mask.dim() != 2 or selected_token_ids.shape != mask.shape:
            raise ValueError(
                f"selected_token_ids of shape {tuple(selected_token_ids.shape)} and attention_mask of shape "
                f"{tuple(mask.shape)}: expected (B, T) both"
            )
        needs_ref = self.beta != 0.0
        if needs_ref and ref_per_token_logps is None and (ref_input is None or ref_weight is None):
            raise ValueError(f"beta={self.beta}: needs ref_per_token_logps, or ref_input and ref_weight")
        advantages, ratio = columns(advantages, mask, "advantages"), columns(vllm_is_ratio, mask, "vllm_is_ratio")
        given = {"old_per_token_logps": old_per_token_logps, "sampling_per_token_logps": sampling_per_token_logps}
        given["ref_per_token_logps"] = ref_per_token_logps if needs_ref else None
        for name, tensor in given.items():
            if tensor is not None and tensor.shape != mask.shape:
                raise ValueError(f"{name} of shape {tuple(tensor.shape)}: expected {tuple(mask.shape)}")
        check_values(attention_mask, mask, advantages, ratio, given, num_items_in_batch)

        ids = torch.where(mask, selected_token_ids, IGNORED)
        logps, entropies = self._log_probs(_input, lin_weight, ids, bias)
        if needs_ref and ref_per_token_logps is None:
            assert ref_input is not None
            assert ref_weight is not None
            with torch.no_grad():
                ref_per_token_logps, _ = self._log_probs(ref_input, ref_weight, ids, ref_bias)
        result = logps.dtype
        wide = torch.float32 if mask.device.type == "mps" else torch.float64
        logps, entropies = logps.to(wide), entropies.to(wide)
        if self.entropy_coef == 0.0:
            entropies = entropies.detach()
        own = logps.detach()

        def filled(x: Tensor | None) -> Tensor:
            return own if x is None else torch.where(mask, x.detach().to(wide), own)

        old, ref = filled(old_per_token_logps), filled(ref_per_token_logps)
        sampling = old if sampling_per_token_logps is None else filled(sampling_per_token_logps)
        live = mask.any(1, keepdim=True)
        advantages = torch.where(like(advantages, mask, live), advantages.detach().to(wide), 0.0)
        if ratio is not None:
            ratio = torch.where(like(ratio, mask, live), ratio.detach().to(wide), 1.0)

        log_ratio = logps - old
        w = torch.exp(policy.log_weights(log_ratio, mask, self.importance_sampling_level))
        loss, phi = self._surrogate(logps, log_ratio, w, advantages, ratio, mask)
        if self.off_policy_mask_threshold is not None:
            loss = loss * policy.keep_on_policy(logps, sampling, mask, advantages, self.off_policy_mask_threshold)
        kept = mask
        if self.top_entropy_quantile < 1.0:
            kept = policy.keep_high_entropy(entropies, mask, self.top_entropy_quantile)
            loss = loss * kept
        if ratio is not None and self.loss_type != "vespo":
            loss = loss * ratio
        kl = None
        if needs_ref:
            kl = policy.k3(ref, logps) * (w if self.use_bias_correction_kl else 1.0)
            loss = loss + self.beta * kl

        accumulation = 1.0
        if self.training:
            accumulation = current_gradient_accumulation_steps or self.current_gradient_accumulation_steps
        per_generation = (steps_per_generation or self.steps_per_generation or accumulation) if self.training else 1.0
        policy_loss = self._aggregate(loss, mask, num_items_in_batch, accumulation, per_generation)
        total = policy_loss if self.loss_type in policy.WINDOW_NORMALISED else policy_loss / accumulation
        if self.entropy_coef != 0.0:
            mean_entropy = (entropies * kept).sum() / kept.sum().clamp(min=1)
            total = total - self.entropy_coef * mean_entropy / accumulation
        metrics = self._metrics(w, advantages, kl, entropies, phi, policy_loss, mask)
        return total.to(result), metrics

    def _log_probs(self, hidden: Tensor, weight: Tensor, ids: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
        if hidden.dim() == 2:
            hidden = hidden.unflatten(0, ids.shape) if hidden.shape[0] == ids.numel() else hidden
        result = selective_log_probs(
            hidden,
            weight,
            ids,
            bias=bias,
            temperature=self.temperature,
            softcap=self.softcap,
            logit_scale=self.logit_scale,
            entropy=True,
            backend="chunked",
            token_chunk_size=None if self.chunk_size is None else max(self.chunk_size * ids.shape[1], 1),
            ignore_index=IGNORED,
        )
        assert isinstance(result, tuple)
        return result

    def _surrogate(
        self, logps: Tensor, log_ratio: Tensor, w: Tensor, advantages: Tensor, ratio: Tensor | None, mask: Tensor
    ) -> tuple[Tensor, Tensor | None]:
        if self.loss_type == "cispo":
            return policy.cispo_surrogate(w, advantages, logps, self.epsilon_high), None
        if self.loss_type == "sapo":
            tau_pos, tau_neg = self.sapo_temperature_pos, self.sapo_temperature_neg
            return policy.sapo_surrogate(w, advantages, tau_pos, tau_neg), None
        if self.loss_type == "vespo":
            shapes = (self.vespo_k_pos, self.vespo_k_neg)
            rates = (self.vespo_lambda_pos, self.vespo_lambda_neg)
            phi = policy.vespo_weights(log_ratio, mask, advantages, ratio, shapes, rates)
            return -phi * advantages * logps, phi
        return policy.clipped_surrogate(w, advantages, self.epsilon_low, self.epsilon_high, self.delta), None

    def _aggregate(
        self,
        loss: Tensor,
        mask: Tensor,
        num_items: Tensor | float | None,
        accumulation: float,
        per_generation: float,
    ) -> Tensor:
        """The loss type's mean of the per-token loss, (B, T) or (B, 1)."""
        summed = (loss * mask).sum(1)
        lengths = mask.sum(1)
        if self.loss_type in ("grpo", "sapo"):
            return (summed / lengths.clamp(min=1)).sum() / max(mask.shape[0], 1)
        if self.loss_type == "bnpo":
            return summed.sum() / lengths.sum().clamp(min=1)
        if self.loss_type == "dr_grpo":
            assert self.max_completion_length is not None
            return summed.sum() / max(mask.shape[0] * self.max_completion_length, 1)
        if self.loss_type == "luspo":
            return summed.sum() / max(mask.shape[0], 1)
        if num_items is None:
            tokens = policy.over_ranks(lengths.sum()).to(loss.dtype)
            return summed.sum() / (tokens.clamp(min=1) / policy.world_size() * accumulation)
        tokens = torch.as_tensor(num_items, device=loss.device).detach().to(loss.dtype)
        return summed.sum() / (tokens.clamp(min=1) / policy.world_size() * (accumulation / per_generation))

    @torch.no_grad()
    def _metrics(
        self,
        w: Tensor,
        advantages: Tensor,
        kl: Tensor | None,
        entropies: Tensor,
        phi: Tensor | None,
        policy_loss: Tensor,
        mask: Tensor,
    ) -> PolicyMetrics:
        values: dict[str, Tensor] = {} if kl is None else {"kl": kl}
        values["entropy"] = entropies
        rows: dict[str, Tensor] = {}
        if self.loss_type in policy.CLIPPED:
            low = (w < 1 - self.epsilon_low) & (advantages < 0)
            high = (w > 1 + self.epsilon_high) & (advantages > 0)
            values |= {
                "clip_ratio/low_mean": low,
                "clip_ratio/high_mean": high,
                "clip_ratio/region_mean": low | high,
            }
            rows = {"clip_ratio/low_min": low, "clip_ratio/high_max": high}
        elif self.loss_type == "cispo":
            values["cispo_clip_ratio"] = (w > self.epsilon_high) & (advantages > 0)
        elif phi is not None:
            values["vespo/phi_seq_mean"] = phi

        def per_sequence(x: Tensor) -> bool:
            if x is kl or x is entropies or x.shape[1] > 1:  # with T = 1 the shape alone does not tell
                return False
            return self.importance_sampling_level == "sequence" or x is phi

        sums, counts = [], []
        for x in values.values():
            weights = torch.ones_like(x, dtype=torch.bool) if per_sequence(x) else mask
            sums.append((x * weights).sum().to(w.dtype))
            counts.append(weights.sum().to(w.dtype))
        if self.entropy_coef != 0.0:
            values["policy_loss"] = policy_loss
            sums.append(policy_loss.detach())
            counts.append(torch.ones_like(policy_loss))
        totals = policy.over_ranks(torch.stack([torch.stack(sums), torch.stack(counts)]))
        means = (totals[0] / totals[1].clamp(min=1)).float()
        metrics = PolicyMetrics(zip(values, means.unbind(), strict=True))
        for name, x in rows.items():
            share = x[:, 0].to(w.dtype) if per_sequence(x) else (x * mask).sum(1) / mask.sum(1).to(w.dtype)
            sign = 1.0 if name.endswith("max") else -1.0
            scored = torch.cat([(sign * share)[~share.isnan()], share.new_full((1,), -math.inf)])
            best = policy.over_ranks(scored.amax(), "MAX")
            metrics[name] = torch.where(best == -math.inf, math.nan, sign * best).float()
        return metrics
