"""KL at step 1: the policy is the reference, so KL, log-ratios and what follows from them are machine zero.

Policy, reference and the policy that generated are three evaluations of one model: equal in float64, apart by rounding in a
replica. What a trainer makes of them is written as the trainer computes it, because rounding follows the algebra:
exp(d) - d - 1 is off by u near d = 0, expm1(d) - d by next to nothing.
"""

import dataclasses
import math
from collections.abc import Iterator, Mapping
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from parity.case.inputs import Setting
from parity.errors import Unsupported
from parity.families.policy_losses import divergence
from parity.judge.oracle import Oracle
from parity.trainers.check import EVERY_PATH, CheckCall, CheckCase, Quantity, check, entry, holds, pairwise
from parity.trainers.definitions.baselines import mean
from parity.trainers.definitions.scored import completion_logps
from parity.trainers.definitions.training_step import measured
from parity.trainers.rig import checkpointing, drive, models, recorder
from parity.trainers.specs import SPECS
from parity.upstream import trl

SETTINGS = {
    "model": Setting("llama", "tiny model", tuple(models.ARCHITECTURES)),
    "beta": Setting(0.04, "weight of the KL term, never 0 here", (0.04, 1.0)),
    "adapter": Setting("none", "full fine-tuning with a separate reference, or LoRA", ("none", "lora")),
    "checkpointing": Setting(
        drive.OFF, "gradient checkpointing", (drive.OFF, drive.REENTRANT, drive.NON_REENTRANT, drive.CUSTOM)
    ),
    "temperature": Setting(1.0, "of sampling and of the log-probs", (1.0, 0.7)),
}
TRAINERS = ("grpo-trainer", "rloo-trainer", "online-dpo-trainer", "dpo-trainer")
A_FEW: tuple[tuple[str, Mapping[str, Any]], ...] = (
    ("grpo-trainer", {"model": "gemma4"}),
    ("grpo-trainer", {"model": "gpt2"}),
    ("grpo-trainer", {"model": "llama", "adapter": "lora", "checkpointing": drive.CUSTOM, "beta": 1.0}),
    ("rloo-trainer", {"model": "cohere", "temperature": 0.7}),
    ("dpo-trainer", {"model": "gemma2", "checkpointing": drive.NON_REENTRANT}),
    ("online-dpo-trainer", {"model": "llama"}),
    *((trainer, {"checkpointing": drive.CUSTOM}) for trainer in TRAINERS),
    ("grpo-trainer", {"temperature": 0.7}),
    # nothing that enters the layers has a gradient
    *((t, {"adapter": "lora", "checkpointing": drive.REENTRANT}) for t in ("grpo-trainer", "online-dpo-trainer")),
    *((trainer, {"model": "gemma2"}) for trainer in ("grpo-trainer", "rloo-trainer")),  # softcap on attention scores
)
Policies = SimpleNamespace
"""Log-probs (B, T) by the `policy`, the `reference` and the `old` policy, which generated; what is `counted`, (B, T) bool."""


def cases(seed: int) -> Iterator[CheckCase]:
    """Every pair of values, per trainer."""
    yield from A_FEW
    for number, trainer in enumerate(TRAINERS):
        has = {n: setting for n, setting in SETTINGS.items() if n != "temperature" or SPECS[trainer].generates}
        yield from ((trainer, case) for case in pairwise(has, seed + number))


@check("step-one", TRAINERS, SETTINGS, cases, quick=A_FEW[:2], pr=A_FEW, paths=EVERY_PATH, moves=True)
def step_one(call: CheckCall) -> Iterator[Quantity]:
    """With the policy equal to the reference the first step shows no KL, no log-ratio and the loss of ratio 1."""
    step = watched(call)
    yield from quantities(call, step, definition(call, step))
    if call.settings.checkpointing == drive.CUSTOM:
        first = next(iter(step.lost), "")
        message = f"{first} lost its own checkpointing function during the step"
        yield holds("checkpointing", not step.lost, message, value=float(len(step.lost)), exact=0.0)
    rewards = [step.log.get(f"rewards/{side}") for side in recorder.SIDES]
    if "rewards/accuracies" in step.log and rewards == [0.0, 0.0]:
        share = float(step.log["rewards/accuracies"])
        yield holds("accuracy", share == 0.0, "pairs of equal rewards count as right", value=share, exact=0.0)
    norm = step.log.get("grad_norm")
    finite = norm is not None and 0.0 < float(norm) < math.inf
    yield holds("grad_norm", finite, f"grad_norm is {norm}", value=None if norm is None else float(norm))


@dataclasses.dataclass
class FirstStep:
    """What one step of a real trainer showed."""

    ids: Tensor  # what the model was given, (B, P + T)
    mask: Tensor
    completion: Tensor  # 1 where a position belongs to a completion, (B, P + T)
    policy: Tensor | None = None  # log-probs (B, T) of the tokens of the last positions, where the trainer has them
    reference: Tensor | None = None
    loss: float = math.nan  # of the one micro-batch
    log: Mapping[str, Any] = dataclasses.field(default_factory=dict)  # the trainer's own log entry
    advantages: Tensor | None = None  # (B,), where the trainer has them
    lost: list[str] = dataclasses.field(default_factory=list)  # layers whose own checkpointing function was replaced


def watched(call: CheckCall) -> FirstStep:
    """Build the trainer, watch what it scores, train one step; Unsupported where it computed no reference log-probs."""
    s = call.settings
    wanted: dict[str, Any] = {"beta": s.beta, "temperature": s.temperature, **drive.checkpointing(s.checkpointing)}
    if "loss" in call.spec.own:
        wanted["loss_type"] = "grpo"
    if call.path == "fused":
        wanted |= trl.liger(drive.config(call.trainer))
    drive.needs(call.trainer, "beta", *(["temperature"] if s.temperature != 1.0 else []))
    model = models.model(s.model)
    peft = trl.lora(models.targets(s.model)) if s.adapter == "lora" else None
    trainer = drive.build(call.trainer, model, wanted, call.device, peft)
    wrapper = None
    if s.checkpointing == drive.CUSTOM:
        wrapper = checkpointing.install(trainer.model)
        if getattr(trainer, "ref_model", None) is not None:
            checkpointing.install(trainer.ref_model, checkpoint=False)
    with drive.fixed(call.path, trainer):
        step = _watch(call, trainer)
    if wrapper is not None:
        step.lost = checkpointing.wrapped(trainer.model, wrapper)
    return step


def _watch(call: CheckCall, trainer: Any) -> FirstStep:
    """One step. GRPO's and RLOO's log-probs as their one method hands them out: policy with gradients, reference without.
    Online DPO's `_forward` returns those of the policy, then the reference; DPO's log-ratios show in its metrics."""
    seen: list[tuple[Any, Tensor, Tensor, bool]] = []  # model, tokens, log-probs, whether with gradients
    online = call.spec.paired and call.spec.generates
    if online and not hasattr(trainer, "_forward"):
        raise Unsupported("no OnlineDPOTrainer._forward in the installed version")

    def scored(args: tuple[Any, ...], out: Any) -> Any:
        seen.append((args[0], args[1], drive.scores(out)[0].detach(), torch.is_grad_enabled()))
        return out

    if call.spec.scored or online:
        drive.changed(trainer, "_forward" if online else drive.scorer(trainer), scored)
    with drive.seeded():
        steps = recorder.train(trainer)
    batch = steps.batches[0]
    step = FirstStep(*recorder.parts(batch)[0], loss=steps.losses[0], log=drive.logged(trainer))
    if online:
        step.policy, step.reference = (logps for _, _, logps, _ in seen[:2])
    elif call.spec.scored:
        parts = [(ids, logps) for _, ids, logps, graded in seen if graded and ids.shape[1] == step.ids.shape[1]]
        if sum(len(ids) for ids, _ in parts) >= len(step.ids):  # a user's trainer may score rows one by one
            step.policy = in_order(step.ids, *map(torch.cat, zip(*parts, strict=True)))
        step.advantages, step.reference = batch["advantages"], batch.get("ref_per_token_logps")
        own = None if trainer.ref_model is None else trainer.model
        other = [(ids, logps) for model, ids, logps, graded in seen if not graded and model is not own]
        if step.reference is None and not other:
            raise Unsupported("the trainer computed no reference log-probs, so there is no KL")
        if step.reference is None:  # RLOO scores the old policy first, the reference last
            step.reference = in_order(step.ids, *other[-1])
    elif "completion_mask" not in batch or "input_ids" not in batch:
        raise Unsupported(f"the installed version hands its loss {', '.join(batch)}, not input_ids and completion_mask")
    return step


def in_order(ids: Tensor, scored: Tensor, logps: Tensor) -> Tensor:
    """The rows of `logps` in the order of the micro-batch: a generation batch is shuffled before it is trained on."""
    return logps[[int((scored == row).all(1).nonzero()[0]) for row in ids]]


def definition(call: CheckCall, step: FirstStep) -> Oracle:
    """What the step should show. Sequences begin with their first token, and end with the padding that they have."""
    s = call.settings
    model = models.model(s.model, torch.float64).eval()
    if s.checkpointing == drive.CUSTOM:
        checkpointing.install(model, checkpoint=False)
    width = step.ids.shape[1] - int(step.completion.any(0).int().argmax())
    rows = [ids[int(mask.argmax()) :].tolist() for ids, mask in zip(step.ids, step.mask, strict=True)]
    window = [(row, len(row) - width) for row in rows]
    counted = step.completion[:, -width:].cpu().bool()
    seen = counted.nonzero(as_tuple=True)
    temperature = s.temperature if call.spec.scored else 1.0

    def define(model: Any) -> Mapping[str, Tensor]:
        policy, reference, old = torch.stack(completion_logps(model, window * 3, temperature)).chunk(3)
        by = Policies(policy=policy, reference=reference, old=old, counted=counted)
        apart = {"logps": policy, "ref_logps": reference, "log_ratio": policy - reference}
        shown = _pairs if call.spec.paired else _grpo if call.spec.baseline == "group" else _rloo
        return {name: x[seen] for name, x in apart.items()} | shown(call, step, by)

    return measured(model, define)


def quantities(call: CheckCall, step: FirstStep, oracle: Oracle) -> Iterator[Quantity]:
    """Log-probs of policy and reference against the model's own logits and each other; the loss, and what is logged."""
    apart = None if step.policy is None or step.reference is None else step.policy - step.reference
    for name, value in {"logps": step.policy, "ref_logps": step.reference, "log_ratio": apart}.items():
        if value is not None:
            seen = step.completion[:, -value.shape[1] :].bool()
            found, exact = value.detach()[seen].cpu(), oracle.exact[name]
            i = int((found.double() - exact).abs().argmax())
            b, t = (int(x[i]) for x in seen.nonzero(as_tuple=True))
            values = f"{float(found[i]):.5g} instead of {float(exact[i]):.5g}"
            message = f"worst at sequence {b}, completion token {t}: {values} by the model's own logits"
            yield entry(name, found, oracle, message)
    for name in [n for n, exact in oracle.exact.items() if exact.dim() == 0]:
        key = "objective/kl" if name == "kl" and call.spec.paired else name
        if name != "loss" and key not in step.log:
            raise Unsupported(f"the trainer logged no {key}: no KL can be judged")
        value, exact = step.loss if name == "loss" else float(step.log[key]), float(oracle.exact[name])
        yield entry(name, value, oracle, f"{name} {value:.5g} at step 1 instead of {exact:.5g}")


def _grpo(call: CheckCall, step: FirstStep, by: Policies) -> dict[str, Tensor]:
    """KL: the mean over completion tokens of k3. Loss: the mean of -A + β·k3."""
    assert step.advantages is not None
    k3 = divergence(by.reference - by.policy, None)
    terms = call.settings.beta * k3 - step.advantages.cpu().double().unsqueeze(1)
    return {"kl": mean(k3, by.counted), "loss": averaged(call, terms, by.counted)}


def averaged(call: CheckCall, terms: Tensor, counted: Tensor) -> Tensor:
    """The mean over sequences of each one's mean over its tokens (grpo); over all tokens (bnpo) in 0.16, which has no types."""
    of_sequences = "loss_type" in trl.fields(drive.config(call.trainer)) or not trl.since("0.16.0")
    return ((terms * counted).sum(1) / counted.sum(1)).mean() if of_sequences else mean(terms, counted)


def _rloo(call: CheckCall, step: FirstStep, by: Policies) -> dict[str, Tensor]:
    """KL: the mean log-ratio of a token. Loss: -mean of A·ratio of the sequence."""
    assert step.advantages is not None
    policy, old = ((x * by.counted).sum(1) for x in (by.policy, by.old))
    loss = -((policy - old).exp() * step.advantages.cpu().double()).mean()
    return {"kl": mean(by.old - by.reference, by.counted), "loss": loss}


def _pairs(call: CheckCall, step: FirstStep, by: Policies) -> dict[str, Tensor]:
    """DPO's loss, whichever of two is chosen. Online DPO's KL sums over padding too."""
    policy, reference = ((x * by.counted).sum(1).chunk(2) for x in (by.policy, by.reference))
    delta = [p - r for p, r in zip(policy, reference, strict=True)]
    out = {"loss": -torch.nn.functional.logsigmoid(call.settings.beta * (delta[0] - delta[1])).mean()}
    if call.spec.generates:
        return out | {"kl": (by.policy - by.reference).sum(1).mean()}
    for i, side in enumerate(("chosen", "rejected")):
        out |= {f"rewards/{side}": call.settings.beta * delta[i].mean(), f"logps/{side}": policy[i].mean()}
    return out
