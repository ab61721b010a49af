"""TRL's preference losses that are functions of log-probs: CPO's and ORPO's, on log-probs by `get_batch_logps`."""

from types import SimpleNamespace
from typing import Any

import torch

from parity.case.inputs import Inputs
from parity.families.logprobs import IGNORE_INDEX
from parity.families.preference import PER_TOKEN
from parity.implementations import plain
from parity.implementations.implementation import EVERY_CONTEXT, Outputs, accepted, implementation, only
from parity.upstream import trl

FIELDS: dict[str, Any] = {"family": "preference", "role": "reference", "library": "trl", "recipe": plain.narrow}
NO_NLL = only("the likelihood is the trainer's", lambda s: s.nll == 0.0)
NO_TEMPERATURE = only("no temperature parameter", lambda s: s.temperature == 1.0)


def _logps(kind: Any, x: Inputs, average: bool) -> list[torch.Tensor]:
    """Log-probs of chosen and rejected; TRL shifts the labels, so both get a position more."""
    z = plain.logits(x)
    z = torch.cat([z, torch.zeros_like(z[:, :1])], 1)
    ids = torch.cat([torch.full_like(x.ids[:, :1], IGNORE_INDEX), x.ids], 1).long()
    return list(kind.get_batch_logps(z, ids, average_log_prob=average).chunk(2))


def _self(x: Inputs, **more: Any) -> Any:
    accelerator = SimpleNamespace(device=x.device)
    s = x.settings
    return SimpleNamespace(beta=s.beta, label_smoothing=s.smoothing, accelerator=accelerator, **more)


@implementation(
    "trl.cpo_loss",
    contexts=EVERY_CONTEXT,
    sources=("trl.experimental.cpo.CPOTrainer.cpo_loss",),
    limits=(only("cpo only", lambda s: s.method == "cpo"), NO_NLL, NO_TEMPERATURE),
    **FIELDS,
)
def cpo_loss(x: Inputs) -> Outputs:
    """`CPOTrainer.cpo_loss`, averaged as the trainer averages it."""
    kind: Any = trl.class_named("CPOTrainer")
    s = x.settings
    chosen, rejected = _logps(kind, x, s.average or s.loss_type in PER_TOKEN["cpo"])
    own = _self(x, alpha=0.0, loss_type=s.loss_type, simpo_gamma=s.gamma)
    losses, *_ = accepted(kind, "cpo_loss")(own, chosen, rejected)
    return {"loss": losses.mean()}


@implementation(
    "trl.odds_ratio_loss",
    contexts=EVERY_CONTEXT,
    sources=("trl.experimental.orpo.ORPOTrainer.odds_ratio_loss",),
    limits=(only("orpo only", lambda s: s.method == "orpo"), NO_NLL, NO_TEMPERATURE),
    **FIELDS,
)
def odds_ratio_loss(x: Inputs) -> Outputs:
    """Minus the mean of `ORPOTrainer.odds_ratio_loss`, which the trainer subtracts from the likelihood's loss."""
    kind: Any = trl.class_named("ORPOTrainer")
    losses, *_ = accepted(kind, "odds_ratio_loss")(_self(x), *_logps(kind, x, average=True))
    return {"loss": -losses.mean()}
