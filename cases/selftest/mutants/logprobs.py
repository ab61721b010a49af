"""Mutants of family `logprobs`: one step of a correct head exchanged for a wrong one; most stand in `losses.toml`."""

import torch
from torch.nn.functional import log_softmax

from cases.selftest.controls import logprobs as right
from cases.selftest.controls.logprobs import Pair, Steps, capped, cooled, scaled, targets
from cases.selftest.mutants.conduct import around, misread_upstream
from cases.selftest.mutants.mutant import Edited
from cases.selftest.mutants.steps import BLOCK, Fused, Wrong, defaults, exchanged, scaled_gradients, summed
from parity.case.inputs import Inputs


def _straight(x: Inputs, z: torch.Tensor) -> torch.Tensor:
    z = scaled(x, z)
    return cooled(x, z + (capped(x, z) - z).nan_to_num(0.0).detach() if x.settings.bias != "banned" else capped(x, z))


def _stride_ignored(g: torch.Tensor) -> torch.Tensor:
    """What a kernel finds that walks a stride-0 gradient as if it were contiguous: one value, then memory of others."""
    if any(g.stride()) or g.numel() < 2:
        return g
    return torch.cat([g.flatten()[:1], g.new_zeros(g.numel() - 1)]).view(g.shape)


def _last_block_first(z: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    start = (z.shape[-1] - 1) // BLOCK * BLOCK
    return z.gather(-1, torch.where(index >= start, index - start, index).unsqueeze(-1)).squeeze(-1)


def _maximum_from_zero(x: Inputs, z: torch.Tensor) -> Pair:
    top = z.amax(-1, keepdim=True).detach().clamp(min=0.0)
    lse = top.squeeze(-1) + (z - top).exp().sum(-1).log()
    return z.gather(-1, targets(x).unsqueeze(-1)).squeeze(-1) - lse, right.pair(x, z)[1]


def _target_by_value(x: Inputs, z: torch.Tensor) -> Pair:
    logps, entropy = right.pair(x, z)
    chosen = z.gather(-1, targets(x).unsqueeze(-1))
    return logps * (z == chosen).sum(-1), entropy


def _hidden_nan(x: Inputs, z: torch.Tensor) -> Pair:
    logp = log_softmax(z, -1)
    return right.pair(x, z)[0], -(logp.exp() * logp).nan_to_num(0.0).sum(-1)


def _log_of_softmax(x: Inputs, z: torch.Tensor) -> Pair:
    p = torch.softmax(z, -1).gather(-1, targets(x).unsqueeze(-1)).squeeze(-1)
    return (p + 1e-10).log(), right.pair(x, z)[1]


def _mutants() -> Wrong:
    found = around(Steps().call, "hidden", "weight", "bias", "ids")
    found["strides-of-upstream"] = ("strides of the upstream gradient ignored", misread_upstream(Steps().call))
    found["expanded-upstream"] = (
        "an upstream gradient of one value a row taken for one value",
        misread_upstream(Steps().call, True),
    )
    for name, mistake, read in scaled_gradients("hidden", "weight", "bias"):
        found[name] = (mistake, Steps(read=read).call)
    for name, mistake, steps in exchanged("logprobs", defaults(Steps, Fused), globals()):
        fused = steps.keys() & defaults(Fused).keys()
        found[name] = (mistake, Steps(**{"pair": Fused(**steps).pair} if fused else steps).call)
    return found


CORRECT = {"steps": Steps(), "fused": Steps(pair=Fused().pair), "summed": Steps(product=summed(torch.float32))}
EDITED = Edited(
    {name: steps.call for name, steps in CORRECT.items()},
    _mutants(),
    ("plain", "autocast", "checkpoint"),
    {"entropy": ""},
)
