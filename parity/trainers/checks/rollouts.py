"""The same rollouts with log-probs from another implementation: where do two runs differ, and why?

GRPO, four steps, seed 3407, log-probs by the trainer's own kernel, by the model's own logits, by cut-cross-entropy. On
stored completions every gradient is judged. Live, where each run generates for itself, the difference of two losses is
split into its causes.
"""

import dataclasses
import functools
import importlib.util
import math
from collections.abc import Callable, Iterator, Mapping
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from parity.case.case import Case
from parity.case.inputs import Inputs, Setting, defaults
from parity.errors import Unsupported
from parity.families import policy
from parity.judge.marks import exact_mark
from parity.trainers.check import CheckCall, CheckResult, check, holds, reported
from parity.trainers.checks.twins import SETTINGS, plain_twin
from parity.trainers.definitions import twin_losses, windows
from parity.trainers.definitions.gradients import gradients
from parity.trainers.definitions.step_rounding import Double
from parity.trainers.definitions.training_step import ExactStep
from parity.trainers.rig import batches, drive, recorder, stored_window, twin_runs
from parity.trainers.rig.stored_window import Sequences

STEPS, ITERATIONS = 4, 2
"""Optimizer steps, and how many are taken on one generation live: at ratio 1 a loss says nothing of log-probs."""
RATE = 0.002
"""Of four steps at temperature 1: small enough that the policy does not run away."""
OVERFLOW = 128 * math.log(2)
"""Nats beyond which exp(log-ratio) is infinite in float32, and a KL or an unclipped ratio with it, by definition."""
SOURCES = {
    "own": "the trainer's own, on the case's path",
    "plain": "log_softmax of the model's own logits",
    "cut-cross-entropy": "linear_cross_entropy(impl='torch_compile') on hidden states and head",
}
SAMPLING: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.001, "top_k": 1},
    "sampled": {"temperature": 1.0},
}
Scores = Callable[[Any, Tensor, Tensor, int, float], Tensor]


def _plain(model: Any, ids: Tensor, mask: Tensor, kept: int, temperature: float) -> Tensor:
    z = model(input_ids=ids, attention_mask=mask, use_cache=False).logits[:, -kept - 1 : -1] / temperature
    return torch.log_softmax(z.float(), -1).gather(-1, ids[:, -kept:, None])[..., 0]


def _cut_cross_entropy(model: Any, ids: Tensor, mask: Tensor, kept: int, temperature: float) -> Tensor:
    from cut_cross_entropy import linear_cross_entropy

    hidden = model.base_model(input_ids=ids, attention_mask=mask, use_cache=False).last_hidden_state
    states, weight = hidden[:, -kept - 1 : -1] / temperature, model.get_output_embeddings().weight
    nll: Tensor = linear_cross_entropy(states, weight, ids[:, -kept:], reduction="none", impl="torch_compile")
    return -nll


SCORES: dict[str, Scores] = {"plain": _plain, "cut-cross-entropy": _cut_cross_entropy}


def install(trainer: Any, source: str) -> None:
    """Log-probs by a source in place of the trainer's own, for policy and reference; everything else is the trainer's.

    Raises:
        Unsupported: where the library or the trainer's method is not there.
    """
    if source == "own":
        return
    if source == "cut-cross-entropy" and importlib.util.find_spec("cut_cross_entropy") is None:
        raise Unsupported("cut-cross-entropy is not installed: pip install cut-cross-entropy")
    score = getattr(trainer, "_get_per_token_logps_and_entropies", None)
    if score is None:
        raise Unsupported("the installed version does not score in _get_per_token_logps_and_entropies")

    def scored(model: Any, ids: Tensor, mask: Tensor, kept: int, *args: Any, **kwargs: Any) -> Any:
        with torch.no_grad():  # entropies and what else the version returns
            out = score(model, ids, mask, kept, *args, **kwargs)
        bare = trainer.accelerator.unwrap_model(model)
        with trainer.accelerator.autocast():
            logps = SCORES[source](bare, ids, mask, kept, trainer.temperature)
        return {**out, "logps": logps} if isinstance(out, dict) else (logps, *out[1:])

    trainer._get_per_token_logps_and_entropies = scored


def stored_cases(profile: str, seed: int) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Nightly: every source with and without a KL term."""
    if profile in ("nightly", "soak"):
        yield from (("grpo-trainer", {"beta": b, "source": source}) for b in (0.0, 0.04) for source in SOURCES)


SOURCE = Setting("own", "; ".join(f"{k}: {v}" for k, v in SOURCES.items()), tuple(SOURCES))


@check("same-rollouts", ("grpo-trainer",), {"beta": SETTINGS["beta"], "source": SOURCE}, stored_cases)
def same_rollouts(call: CheckCall) -> Iterator[CheckResult]:
    """Four steps on the same rollouts, seed 3407, log-probs of each source: every gradient by the definition.

    Each step is judged at the parameters that it was taken at, so that a difference does not grow from step to step.
    """
    s, trainer = _settings(call), call.case.family
    _once(call)
    run = twin_runs.build(trainer, s, call.path, max_steps=STEPS, learning_rate=RATE)
    install(run, call.settings.source)
    steps = twin_runs.train(run, call.path)
    yield holds(
        "steps", len(steps.gradients) == STEPS, f"{len(steps.gradients)} steps instead of {STEPS}", gate="exact"
    )
    for number, parameters in enumerate(steps.parameters):
        step = ExactStep(stored_window.policy_at(s.model, parameters), twin_losses.definition(trainer, s))
        yield gradients(step, steps.gradients[number], f"gradient of step {number + 1}")


def _settings(call: CheckCall) -> SimpleNamespace:
    return plain_twin(**{n: v for n, v in vars(call.settings).items() if n in SETTINGS})


def _once(call: CheckCall) -> None:
    if call.settings.source != "own" and call.path == "fixed":
        raise Unsupported(f"log-probs by {call.settings.source} are the same on every path of the trainer")


@check(
    "live-rollouts",
    ("grpo-trainer",),
    {
        "beta": SETTINGS["beta"],
        "precision": SETTINGS["precision"],
        "sampling": Setting("sampled", "temperature 1, or temperature 0.001 and top_k 1", tuple(SAMPLING)),
        "source": dataclasses.replace(SOURCE, choices=("own", "cut-cross-entropy")),
    },
    lambda profile, seed: [
        ("grpo-trainer", {"beta": beta, "precision": precision, "sampling": sampling, "source": source})
        for beta in (0.0, 0.04)
        for precision in ("fp32", "autocast")
        for sampling in SAMPLING
        for source in ("own", "cut-cross-entropy")
        if profile in ("nightly", "soak")
    ],
    moves=True,
)
def live_rollouts(call: CheckCall) -> Iterator[CheckResult]:
    """Four steps that generate, log-probs of a source against the model's own logits: the loss difference by cause.

    The first rollouts must be the same tokens: parameters and seed are the same, and no log-prob has been taken. From then
    on the differences are reported.
    """
    s = _settings(call)
    _once(call)
    sources = (call.settings.source, "plain")
    runs = [_run(call, s, source) for source in sources]
    broken = [
        f"log-probs by {source}: {message}"
        for source, run in zip(sources, runs, strict=True)
        if (message := run.broken)
    ]
    yield holds("finite loss", not broken, "; ".join(broken))
    if broken:
        return
    counts = [len(run.losses) for run in runs]
    yield holds("steps", counts == [STEPS, STEPS], f"{counts} steps instead of {STEPS}", gate="exact")
    apart = first_difference(*(run.windows for run in runs))
    same = apart is None or not apart.startswith("step 1,")
    yield holds("first rollouts", same, f"with the same parameters and seed: {apart}", gate="exact")
    message = apart or "every token is the same"
    parts = causes(*(_parts(call, s, run, runs[1]) for run in runs))
    for name, values in parts.items():
        listed = ", ".join(f"{v:.3g}" for v in values)
        yield reported(f"loss difference: {name}", max(map(abs, values)), f"steps 1 to {STEPS}: {listed}; {message}")


@dataclasses.dataclass(frozen=True)
class Live:
    """What a run did, step by step: its loss, what it was given, its sequences, the parameters at which it was taken.

    `furthest`: largest log-ratio of a token, in nats, reference to policy or policy to the one that generated, as scored.
    """

    losses: list[float]
    batches: list[dict[str, Any]]
    windows: list[Sequences]
    parameters: list[dict[str, Tensor]]
    furthest: list[float]

    @property
    def broken(self) -> str | None:
        """The first loss that is not finite, with what the run scored; None where all are.

        Raises:
            Unsupported: where that is the definition's value in float32, exp(log-ratio) being infinite.
        """
        step = next((i for i, loss in enumerate(self.losses) if not math.isfinite(loss)), None)
        if step is None:
            return None
        message = f"loss {self.losses[step]} at step {step + 1}, largest log-ratio {self.furthest[step]:.0f} nats"
        if self.furthest[step] > OVERFLOW:
            raise Unsupported(f"{message}: infinite in float32 by definition")
        return message


def _run(call: CheckCall, s: SimpleNamespace, source: str) -> Live:
    """A run of all steps; of those on the first generation where nothing finite is left to generate from."""
    try:
        return _live(call, s, source, STEPS)
    except RuntimeError as error:
        if "probability tensor" not in str(error):
            raise
    return _live(call, s, source, ITERATIONS)


def rate(sampling: str) -> float:
    """The learning rate at which log-probs move as they do at temperature 1: `RATE`·τ².

    The gradient of a log-prob of logits/τ is 1/τ times that of the logits, and so is that of the loss: a step moves it by
    rate/τ².
    """
    temperature: float = SAMPLING[sampling]["temperature"]
    return RATE * temperature**2


def _live(call: CheckCall, s: SimpleNamespace, source: str, count: int) -> Live:
    name = call.case.family
    wanted = twin_runs.options(name, s) | SAMPLING[call.settings.sampling]
    wanted |= {"max_steps": count, "learning_rate": rate(call.settings.sampling), "num_iterations": ITERATIONS}
    args = drive.arguments(drive.config(call.trainer), call.device, wanted, ("num_iterations",))
    data = twin_runs.dataset(name, twin_runs.rows(name))
    run = drive.build(
        call.trainer, stored_window.policy(s.model), args, train_dataset=data, reward_funcs=drive.reward_by_place
    )
    install(run, source)
    scored: list[Tensor] = []
    drive.spied(run, "_get_per_token_logps_and_entropies", functools.partial(_keep, scored))
    with drive.seeded(), drive.fixed(call, run) if source == "own" else drive.seeded():
        steps = recorder.train(run)
    furthest = [_furthest(batch, logps) for batch, logps in zip(steps.batches, scored, strict=True)]
    windows_of_steps = [batches.sequences_of([batch]) for batch in steps.batches]
    return Live(steps.losses, steps.batches, windows_of_steps, steps.parameters, furthest)


def _keep(scored: list[Tensor], args: Any, kwargs: Any, out: Any) -> None:
    if torch.is_grad_enabled():  # the policy in the loss, not what scores the generation
        scored.append((out["logps"] if isinstance(out, dict) else out[0]).detach())


def _furthest(batch: Mapping[str, Any], logps: Tensor) -> float:
    reference, old = batch.get("ref_per_token_logps"), batch.get("old_per_token_logps")
    scored = batch["completion_mask"].bool()
    ratios = [0.0]
    if reference is not None:
        ratios.append(float((reference - logps)[scored].max()))
    if old is not None:
        ratios.append(float((logps - old)[scored].max()))
    return max(ratios)


def first_difference(found: list[Sequences], plain: list[Sequences]) -> str | None:
    """Where the tokens of two runs first differ: "step 2, sequence 3, token 5: 17, not 21"; None if nowhere."""
    for step, (window, other) in enumerate(zip(found, plain, strict=True), 1):
        for row, ((ids, start), (ids_of_other, start_of_other)) in enumerate(zip(window, other, strict=True)):
            mine, theirs = ids[start:], ids_of_other[start_of_other:]
            if mine != theirs:
                at = next((i for i, (a, b) in enumerate(zip(mine, theirs, strict=False)) if a != b), None)
                if at is None:
                    return f"step {step}, sequence {row}: {len(mine)} tokens, not {len(theirs)}"
                return f"step {step}, sequence {row}, token {at}: {mine[at]}, not {theirs[at]}"
    return None


Parts = list[dict[str, float]]
"""For each step the loss that a run reports, and what the definition makes of its rollouts in stages."""


def _parts(call: CheckCall, s: SimpleNamespace, run: Live, plain: Live) -> Parts:
    out = []
    for k, batch in enumerate(run.batches):
        old = k - k % ITERATIONS  # the step before which it was generated
        model = stored_window.policy_at(s.model, run.parameters[k])
        generator = stored_window.policy_at(s.model, run.parameters[old]) if k > old else None
        defined = functools.partial(_definition, call, s, model, generator)
        given = batch.get("ref_per_token_logps")
        out.append(
            {
                "reported": run.losses[k],
                "its reference": defined(batch, run.windows[k], given),
                "by definition": defined(batch, run.windows[k], None),
                "on plain rollouts": defined(plain.batches[k], plain.windows[k], None),
            }
        )
    return out


def causes(found: Parts, plain: Parts) -> dict[str, list[float]]:
    """The difference of the losses of two runs at each step, and the four parts that add up to it.

    log-probs: what a run reports less the definition on its own rollouts, advantages and reference; reward and KL: what the
    reference's log-probs add to that; generation: other rollouts and the rewards that they get, at the same parameters;
    parameters: what earlier steps left behind, on the same rollouts.
    """
    stages = ("reported", "its reference", "by definition", "on plain rollouts")
    change = {name: [a[name] - b[name] for a, b in zip(found, plain, strict=True)] for name in stages}
    each = list(zip(*(change[name] for name in stages), strict=True))
    return {
        "total": change["reported"],
        "log-probs": [a - b for a, b, _, _ in each],
        "reward and KL": [b - c for _, b, c, _ in each],
        "generation": [c - d for _, _, c, d in each],
        "parameters": [d for *_, d in each],
    }


def _definition(
    call: CheckCall,
    s: SimpleNamespace,
    model: Any,
    generator: Any,
    batch: Mapping[str, Any],
    window: Sequences,
    given: Tensor | None,
) -> float:
    """GRPO's loss on a batch in float64, its advantages as they are.

    `generator` is the policy that generated, None where that is `model`; `given` are the reference's log-probs, None for those
    of its own logits.
    """
    fam = policy.FAMILY
    temperature = SAMPLING[call.settings.sampling]["temperature"]
    settings = defaults(fam.settings) | windows.head_settings(model)
    settings |= {"loss_type": s.loss, "beta": s.beta, "temperature": temperature}
    with torch.no_grad(), Double():
        tensors = windows.policy_tensors(window, model)
        tensors["advantages"] = batch["advantages"].cpu().double()
        if generator is not None:
            tensors["old_logps"] = windows.padded(windows.completion_logps(generator, window, temperature))
        if s.beta != 0.0:
            width = max(len(ids) - start for ids, start in window)
            ref_logps = windows.completion_logps(stored_window.reference(s.model), window, temperature)
            tensors["ref_logps"] = windows.padded(ref_logps) if given is None else given[:, :width].cpu().double()
        inputs = Inputs(Case("policy", 0, "fp64"), SimpleNamespace(**settings), tensors, (), {})
        return float(fam.oracle(inputs, exact_mark)["loss"])
