"""The failure that started this project, on real rollouts: a fused path that drops the sampler's importance ratio.

TRL multiplies the policy term of each token by the ratio; its Liger path of 0.23.0 to 0.28.0 did not. Where sampling was
truncated and the trainer scores the whole vocabulary, each ratio is the kept mass, and that of a sequence is their product.
"""

import dataclasses
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from parity.case.case import normal
from parity.errors import UsageError
from parity.recording import Recording
from parity.rollouts import models
from parity.rollouts.arithmetic import Given, definition

HIGH = 3.0
"""TRL's default upper bound."""
ROWS = 16


@dataclasses.dataclass(frozen=True)
class Dropped:
    """Gradient norms over all parameters with the ratio and without, in a mode of TRL."""

    mode: str
    ratios: tuple[float, float]
    with_ratio: float
    without: float
    losses: tuple[float, float]

    def line(self) -> str:
        times = f"{self.without / self.with_ratio:.1f}x" if self.with_ratio else "all ratios are 0"
        return (
            f"{self.mode}: ratios {self.ratios[0]:.2g} to {self.ratios[1]:.2g}; gradient norm {self.with_ratio:.3g}, "
            f"{self.without:.3g} without the ratio ({times}); loss {self.losses[0]:.3g} and {self.losses[1]:.3g}"
        )


def dropped(recording: Recording, rows: int = ROWS) -> Iterator[Dropped]:
    """One after the other the modes that truncate a ratio, on the recording's longest completions.

    Raises:
        UsageError: for a recording without the trainer's log-probs.
    """
    if recording.trainer_logps is None:
        raise UsageError(f"{recording.name}: recorded with --no-score, without the trainer's log-probs")
    longest = recording.completion_lengths.argsort(descending=True, stable=True)[:rows]
    recording = dataclasses.replace(recording, **{name: value[longest] for name, value in recording.tensors().items()})
    folder, mask = models.folder_of(str(recording.facts["model"])), recording.mask
    assert recording.trainer_logps is not None
    given = Given(recording.name, recording.trainer_logps, recording.sampler_logps, mask.int())
    advantages = normal(41, "advantages", (rows,)).float()
    without, loss = _norm(folder, recording, advantages, None)
    for mode in ("token_truncate", "sequence_truncate"):
        ratio = definition(given, mode, None, HIGH).float()
        norm, norm_without = _norm(folder, recording, advantages, ratio)
        seen = ratio[mask] if ratio.shape == mask.shape else ratio
        yield Dropped(mode, (float(seen.min()), float(seen.max())), norm, without, (norm_without, loss))


def _norm(folder: Any, recording: Recording, advantages: Tensor, ratio: Tensor | None) -> tuple[float, float]:
    from parity.fixes import FusedLinearGRPOLoss

    model, chosen = models.loaded(folder, torch.float32), recording.rows()[: len(advantages)]
    width = recording.completion_ids.shape[1]
    long = max(len(p) for p, _ in chosen)
    ids = torch.zeros(len(chosen), long + width, dtype=torch.long)
    seen = torch.zeros_like(ids)
    for i, (prompt, completion) in enumerate(chosen):
        start, end = long - len(prompt), long + len(completion)
        ids[i, start:end], seen[i, start:end] = torch.tensor(prompt + completion), 1
    positions = (seen.cumsum(-1) - 1).clamp(min=0)
    hidden = model.get_decoder()(input_ids=ids, attention_mask=seen, position_ids=positions).last_hidden_state
    function = FusedLinearGRPOLoss(
        beta=0.0,
        use_ref_model=False,
        loss_type="grpo",
        temperature=float(recording.facts["temperature"]),
        softcap=getattr(model.config.get_text_config(), "final_logit_softcapping", None),
    )
    loss, _ = function(
        hidden[:, long - 1 : -1],
        model.get_output_embeddings().weight,
        ids[:, long:],
        seen[:, long:],
        advantages,
        vllm_is_ratio=ratio,
    )
    loss.backward()
    squares = [float(p.grad.double().square().sum()) for p in model.parameters() if p.grad is not None]
    return sum(squares) ** 0.5, float(loss.detach())
