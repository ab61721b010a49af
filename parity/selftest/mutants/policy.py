"""Mutants of family `policy`: one step of a correct loss exchanged for a wrong one."""

from collections.abc import Callable

import torch
from torch.nn.functional import linear

from parity.case.inputs import Inputs
from parity.selftest.controls import policy as right
from parity.selftest.controls.logprobs import Steps, capped, cooled, scaled
from parity.selftest.controls.policy import Step, Work, loss_of
from parity.selftest.mutants import Edited, policy_terms, policy_weights
from parity.selftest.mutants.conduct import MISCONDUCT, misread
from parity.selftest.mutants.steps import Mutants, recorder, through, with_gradient

READ = (
    "ids mask advantages old_logps ref_logps sampling_logps importance_sampling_ratio previous_ids lora_a lora_b"
).split()
MUTANTS: Mutants = {
    name: (mistake, wrong(loss_of())) for name, (mistake, wrong) in (MISCONDUCT | misread(*READ)).items()
}
MUTANTS |= policy_weights.MUTANTS | policy_terms.MUTANTS
"""Name -> the mistake in one line, and the adapter that makes it."""

CORRECT = {"steps": loss_of(metrics=right.METRICS)}
"""What the mutants are edits of: a control."""

_wrong = recorder(MUTANTS)


def _factor(size: float) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda g: g * (1 + size)


def _louder(size: float) -> Step:
    def step(c: Work) -> torch.Tensor:
        return right.loss(c) + size * right.loss(c).detach()

    return step


def _louder_logps(size: float) -> Steps:
    return Steps(logps=lambda x, v: v * (1 + size))


for _label, _size in (("1e-2", 1e-2), ("1e-3", 1e-3)):
    _times = _factor(_size)
    _wrong(f"loss-scaled-{_label}", f"loss × (1 + {_label}), gradients right", loss=_louder(_size))
    _wrong(f"logps-scaled-{_label}", f"log-probs × (1 + {_label})", _louder_logps(_size))
    for _names in ("hidden", "weight", "bias", "lora_a lora_b"):
        _wrong(
            f"grad-{_names.replace(' ', '-')}-scaled-{_label}",
            f"gradient of {_names} × (1 + {_label})",
            Steps(read=with_gradient(_times, *_names.split())),
        )


def _straight(x: Inputs, z: torch.Tensor) -> torch.Tensor:
    z = scaled(x, z)
    return cooled(x, z + (capped(x, z) - z).detach() if x.settings.bias != "banned" else capped(x, z))


def _without_embedding_gradient(x: Inputs) -> torch.Tensor:
    if x.settings.head != "tied":
        return x.hidden.float()
    return (x.hidden + x.weight.detach()[x.previous_ids]).float()


def _without_adapter(x: Inputs, hidden: torch.Tensor) -> torch.Tensor:
    return linear(hidden, x.weight.float(), None if x.bias is None else x.bias.float()).float()


_wrong("temperature-forgotten", "temperature forgotten", Steps(finish=lambda x, z: capped(x, scaled(x, z))))
_wrong(
    "temperature-before-softcap",
    "temperature applied before the softcap",
    Steps(finish=lambda x, z: capped(x, cooled(x, scaled(x, z)))),
)
_wrong("softcap-forgotten", "softcap forgotten", Steps(finish=lambda x, z: cooled(x, scaled(x, z))))
_wrong("softcap-gradient-forgotten", "gradient of the softcap forgotten", Steps(finish=_straight))
_wrong("scale-forgotten", "logit scale forgotten", Steps(finish=lambda x, z: cooled(x, capped(x, z))))
_wrong("bias-forgotten", "bias forgotten", Steps(read=lambda x: x.replace(bias=None)))
_wrong("adapter-ignored", "LoRA adapter on the head ignored", Steps(product=_without_adapter))
_wrong(
    "adapter-gradient-missing",
    "silent None gradient of the LoRA adapter",
    Steps(read=with_gradient(lambda g: None, "lora_a", "lora_b")),
)
_wrong("tied-gradient-dropped", "second gradient of a tied head dropped", Steps(states=_without_embedding_gradient))
_wrong("tied-embedding-ignored", "embedding of the tied head ignored", Steps(states=lambda x: x.hidden.float()))
_wrong(
    "weight-gradient-missing", "silent None gradient of the head", Steps(read=with_gradient(lambda g: None, "weight"))
)
_wrong(
    "upstream-ignored",
    "upstream gradient ignored: backward assumes 1",
    loss=lambda c: through(right.loss(c), torch.ones_like),
)
_wrong(
    "upstream-scale-lost",
    "scale of the upstream gradient lost: its sign kept",
    loss=lambda c: through(right.loss(c), torch.sign),
)
_wrong(
    "upstream-in-bf16",
    "upstream gradient rounded to bfloat16",
    loss=lambda c: through(right.loss(c), lambda g: g.bfloat16().to(g)),
)
_wrong(
    "upstream-in-fp16",
    "upstream gradient rounded to float16",
    loss=lambda c: through(right.loss(c), lambda g: g.clamp(-65504, 65504).half().to(g)),
)
_wrong(
    "advantages-in-bf16",
    "advantages rounded to bfloat16",
    advantages=lambda c: right.advantages(c).bfloat16().float(),
)
_wrong(
    "states-in-bf16", "hidden states rounded to bfloat16", Steps(states=lambda x: Steps().states(x).bfloat16().float())
)

EDITED = Edited(
    CORRECT,
    MUTANTS,
    ("plain", "autocast"),
    {"kl": "kl-metric", "entropy": "entropy-metric", "clip_ratio": "clip-metric"},
)
