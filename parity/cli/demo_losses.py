"""Two policy losses for `parity demo`: one is right, one drops the importance ratio."""

import torch


def log_probs(hidden: torch.Tensor, weight: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Log-probs of the tokens, (B, T); hidden (B, T, H), weight (V, H), ids (B, T)."""
    logps = torch.log_softmax(hidden.float() @ weight.float().T, -1)
    return logps.gather(-1, ids.long().unsqueeze(-1)).squeeze(-1)


def clipped(ratio: torch.Tensor, mask: torch.Tensor, advantages: torch.Tensor) -> torch.Tensor:
    """PPO's clipped loss, averaged over the tokens of each sequence, then over sequences (GRPO)."""
    gain = advantages.float()
    gain = gain if gain.dim() == 2 else gain.unsqueeze(-1)  # of a token, or of a sequence
    per_token = -torch.min(ratio * gain, ratio.clamp(0.8, 1.2) * gain)
    return ((per_token * mask).sum(-1) / mask.sum(-1).clamp(min=1)).mean()


def right(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    ids: torch.Tensor,
    mask: torch.Tensor,
    advantages: torch.Tensor,
    old_per_token_logps: torch.Tensor | None = None,
) -> torch.Tensor:
    """The importance ratio is π/π_old of each token."""
    logps = log_probs(hidden, weight, ids)
    old = logps.detach() if old_per_token_logps is None else old_per_token_logps.float()
    return clipped((logps - old).exp(), mask.float(), advantages)


def ratio_dropped(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    ids: torch.Tensor,
    mask: torch.Tensor,
    advantages: torch.Tensor,
    old_per_token_logps: torch.Tensor | None = None,
) -> torch.Tensor:
    """The old log-probs are never read: the ratio is 1 everywhere."""
    logps = log_probs(hidden, weight, ids)
    return clipped((logps - logps.detach()).exp(), mask.float(), advantages)


for loss in (right, ratio_dropped):
    loss.contexts = ("plain",)  # type: ignore[attr-defined]  # without torch.compile, autocast and checkpointing: it is quick
