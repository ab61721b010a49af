"""Beyond one full window: evaluation, the incomplete last window, a second step, two steps on one generation.

`WINDOWS` is the table of them: each has a setup, the trainers that have it, and a function that says what is judged.
"""

import copy
import dataclasses
import functools
import itertools
import tempfile
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from parity.case.inputs import Setting
from parity.errors import Unsupported
from parity.judge.oracle import Oracle
from parity.trainers.check import CheckCall, CheckCase, Quantity, always, check, holds, same, shared, summed, tells
from parity.trainers.checks.twins import GRPO_TYPES, SETTINGS, by_definition, judged, step_of, twin
from parity.trainers.definitions.formulas import Generation, Loss, beyond
from parity.trainers.definitions.scored import Scored
from parity.trainers.definitions.training_step import exact_step, gradients, logged, measured, window_loss
from parity.trainers.rig import drive, models, recorder, stored_window, twin_runs
from parity.trainers.rig.stored_window import Window
from parity.trainers.rig.twin_runs import Run
from parity.trainers.specs import JUDGED, SPECS, having
from parity.upstream import trl

STORED = tuple(t for t in JUDGED if SPECS[t].generates != "method")
EVALUATING = tuple(t for t in JUDGED if SPECS[t].generates != "model")
"""All but online DPO, which has no loss in evaluation."""
GROUPED = tuple(t for t in JUDGED if SPECS[t].grouped)
TOKENS = tuple(t for t in GROUPED if SPECS[t].clips != "sequences")
MASKING = having("mask_truncated_completions")
PARTS, AGAIN = "steps_per_generation", "num_iterations"
SYNCED = {"sync_ref_model": True, "ref_model_sync_steps": 1, "ref_model_mixup_alpha": 0.3}
CLIPPED = {"epsilon": 0.2, "epsilon_high": 1.5}
"""Bounds that some ratios are beyond, and some between: in the place of the other each would clip other tokens."""
QUANTILE = "top_entropy_quantile"
BEFORE = 4
"""Seed of the older policy whose largest share of a completion is not that of a longest one, whose mean needs no mask."""
BONUS = {QUANTILE: 0.6, "entropy_coef": 0.1}
"""An entropy bonus of the tokens that are trained on."""
BOUNDED = {"reward_weights": [1.0, -0.5], "reward_clip_range": (0.125, 0.375)}
"""Of two reward functions that are one."""
OF_SEQUENCES = {"importance_sampling_level": "sequence", "epsilon_high": 0.08, "delta": 1.1} | {
    "use_bias_correction_kl": True,
    "off_policy_mask_threshold": 0.02,
}
"""The settings of GRPO's ratio that no other case has, each of them with an effect."""
ADAPTIVE = {"use_adaptive_entropy": True, "entropy_coef": 0.1, "entropy_coef_delta": 0.05}
ADAPTIVE |= {"entropy_coef_min": 0.02, "entropy_coef_max": 0.18}
"""An entropy coefficient that begins at 0.1 and moves by 0.05 a step, within limits: up below the target, down above it."""
ABOVE = 100.0
"""An entropy above that of any window."""
TWO_STEPS = {"max_steps": 2, "learning_rate": 0.05}
"""The second step must differ from the first."""
SAVED = {"save_strategy": "steps", "save_steps": 1}
SLOW = TWO_STEPS | {"learning_rate": 0.0005}
"""The second step's ratios stay within their bounds."""
EVALUATED = {"per_device_eval_batch_size": 8, "num_generations_eval": stored_window.GENERATIONS}
EPOCH = {"max_steps": -1, "num_train_epochs": 1, "dataloader_drop_last": False}
EPOCHS = EPOCH | recorder.LOGGED | SAVED | {"num_train_epochs": 2, "save_steps": 6}
"""Of four steps each; a checkpoint is in the middle of the second."""


class WindowRun(Run):
    """A run that is set up for a kind of window; `every` has its rows before some of them are truncated."""

    def __init__(self, call: CheckCall, kind: "Kind"):
        drive.needs(call.trainer, *kind.own)
        self.call, self.kind = call, kind
        s = twin(call.case.family, loss=call.settings.loss, split=kind.split, beta=kind.beta)
        rows = Window.of(call.case.family).rows[: kind.count]
        self.every = [dataclasses.replace(r, end=models.END) if i in kind.ended else r for i, r in enumerate(rows)]
        rows, ends = self.every, models.two_ends if kind.ended else None
        if kind.truncated:  # no end, not in the loss; all others end
            whole = [i not in kind.truncated for i in range(len(rows))]
            rows = [dataclasses.replace(r, counted=w, ended=w) for r, w in zip(rows, whole, strict=True)]
        more: dict[str, Any] = (
            {"adapter": lambda: (models.model(s.model), trl.lora())} if kind.adapted else {"changed": ends}
        )
        super().__init__(call.case.family, s, call.path, rows, plain=True, **more, **kind.config, **kind.own)

    def data(self) -> Any:
        return super().data().to_iterable_dataset() if self.kind.streamed else super().data()

    def there(self, number: int) -> Window:
        """What the window of an optimizer step held."""
        return self.window.found_in(self.steps.window(number))

    def policy(self, number: int) -> Any:
        """The policy that an optimizer step was taken at."""
        out = stored_window.policy(self.s.model, torch.float64)
        if self.kind.adapted:
            out = stored_window.written_out(stored_window.with_adapter(out))
        out.load_state_dict(self.steps.parameters[number])
        return out

    def gradient(
        self, quantity: str, number: int, count: int | None = None, of: list[dict[str, Any]] | None = None, **asked: Any
    ) -> Quantity:
        """The gradient of a window by the definition of its rows, or `of` some micro-batches, at the parameters that it was taken
        at. `asked` goes to `Loss`. Raises Unsupported where `count` rows are expected there, and others are found."""
        window = self.there(number) if of is None else self.window.found_in(of)
        if count not in (None, len(window.rows)):
            raise Unsupported(f"the window holds {len(window.rows)} known sequences instead of {count}")

        def step() -> Oracle:
            return exact_step(self.policy(number), Loss(window, self.s, **asked))

        still = "learning_rate" not in self.kind.config  # then every path takes it at the same parameters
        exact = shared(self.call, f"{window.rows} {asked}", step) if still else step()
        return gradients(exact, self.steps.gradients[number], quantity)

    def sizes(self, *expected: int) -> Quantity:
        sizes = tuple(len(self.there(i).rows) for i in range(len(self.steps.gradients)))
        return holds("windows", sizes == expected, f"windows of {sizes} sequences instead of {expected}")


def begun(trainer: Any) -> bool:
    """Whether <bos> stands before each prompt of evaluation: in KTO's older releases."""
    return "answer_input_ids" in getattr(trainer.eval_dataset, "column_names", ())


def _evaluation(run: WindowRun) -> Iterator[Quantity]:
    """The loss that evaluation reports on the window is the loss that training takes its gradient of, before an accumulated
    step that changes nothing and behind it, in evaluation mode."""
    if begun(run.built):
        raise Unsupported("KTO of the installed version puts <bos> before each prompt")
    step = by_definition(run.trainer, run.s)
    for name in ("evaluation loss", "evaluation loss behind a step"):
        with trl.quiet(), drive.dropping(run.built.model):
            found = float(run.built.evaluate()["eval_loss"])
        yield window_loss(step, found, name)
        _ = run.steps


def _last(run: WindowRun, *sizes: int) -> Iterator[Quantity]:
    """The last step is the gradient of the sequences that are left."""
    yield run.sizes(*sizes)
    last = len(run.steps.gradients) - 1
    yield run.gradient(f"gradient of window {last + 1}", last)


def _streamed(run: WindowRun) -> Iterator[Quantity]:
    """Three sequences without a length, two in a step. The third is left over from the first epoch: a step of its own, part of
    the next, or left out. Each step is the gradient of all that it has read, or of its last two."""
    for number in range(len(run.steps.gradients)):
        read = run.steps.window(number)
        parts = [read] if len(read) <= 2 else [read, read[-2:]]
        either = [run.gradient(f"gradient of step {number + 1}", number, of=part) for part in parts]
        yield min(either, key=lambda q: q.judged.headroom)


def _truncated(run: WindowRun) -> Iterator[Quantity]:
    """mask_truncated_completions: three of eight completions have no <eos>, earn their rewards, and are not trained on."""
    if run.kind.ended and not hasattr(run.built, "eos_token_ids"):
        raise Unsupported(f"{run.call.trainer} of the installed version knows the tokenizer's <eos> alone")
    earned = stored_window.rewards(Window(run.trainer, run.every).sequences)
    step = step_of(run.call, run, Loss(run.window, run.s, earned=earned))
    yield window_loss(step, sum(run.steps.losses))
    yield gradients(step, run.steps.gradients[0])
    clipped = "completions/clipped_ratio"
    if clipped in (log := drive.logged(run.built)):
        yield summed(clipped, log[clipped], [1 / len(run.every)] * len(run.kind.truncated), "the share without an end")


def _controlled(run: WindowRun) -> Iterator[Quantity]:
    """use_adaptive_entropy (Skywork-OR1, arXiv 2505.22312): the coefficient grows by 0.05 behind a window whose mean entropy of a
    token is at most the target, else it shrinks, within its limits. The bonus is applied where the window before was at
    most there.

    Two windows of two micro-batches, parameters as they are. Targets: above all, below all, between the first window's mean and
    its last micro-batch's, between the second's and both windows'. Evaluation moves nothing, of a coefficient within its limits.
    """
    run.built = run.build(max_steps=2, entropy_target=ABOVE)
    run.steps = seen = twin_runs.train(run.built, run.path)
    model = stored_window.policy(run.s.model, torch.float64)

    def entropy(micro_batches: list[dict[str, Any]]) -> float:
        return float(Scored(model, run.window.found_in(micro_batches).sequences).entropy)

    sizes = [sum(len(t) - n for t, n in run.window.found_in([b]).sequences) for b in seen.window(1)]
    yield tells("sizes", len(set(sizes)) == 1, f"{sizes} tokens in micro-batches, of each of which the bonus is a mean")
    own = [entropy(seen.window(0)), entropy(seen.window(1))]
    targets = ABOVE, 0.0, (own[0] + entropy(seen.window(0)[-1:])) / 2, (own[1] + entropy(seen.batches)) / 2
    for number, target in enumerate(targets, 1):
        if target != ABOVE:
            run.built = run.build(max_steps=2, entropy_target=target)
            run.steps = twin_runs.train(run.built, run.path)
        values = [0.1]
        for x in own:
            values.append(min(values[-1] + 0.05, 0.18) if x <= target else max(values[-1] - 0.05, 0.02))
        moves = [after - before for before, after in itertools.pairwise(values)]
        coefficient = float(run.built.entropy_coef)
        yield summed(f"coefficient at target {number}", coefficient, (0.1, *moves), f"means of {own}, target {target}")
        applied = {"entropy_coef": values[1] if own[0] <= target else 0.0}
        yield run.gradient(f"gradient of step 2 at target {number}", 1, policy=applied)
    with trl.quiet():
        run.built.evaluate()
    now = float(run.built.entropy_coef)
    yield holds("coefficient after evaluation", now == coefficient, "evaluation moves it", now, coefficient)


def _generation(run: WindowRun) -> Iterator[Quantity]:
    """Two steps on one generation, each on its half or both on the whole: the second one's ratios are to the policy that
    generated, not to the last one."""
    steps = 1 if AGAIN in run.kind.own else 2
    generation = Generation(run.window.sequences, run.policy(0), steps)
    for number in range(len(run.steps.gradients)):
        count = len(run.window.rows) // steps
        yield run.gradient(f"gradient of step {number + 1}", number, count=count, generation=generation)


def _interrupted(run: WindowRun) -> recorder.Steps:
    """The steps of a whole run. Those of `run` are another trainer's, which goes on from its checkpoint."""
    with tempfile.TemporaryDirectory(prefix="parity-resumed-") as folder:
        whole = twin_runs.train(run.build(output_dir=folder), run.path)
        run.built = run.build(output_dir=folder)
        with drive.fixed(run.path, run.built):
            checkpoint = f"{folder}/checkpoint-{run.kind.config['save_steps']}"
            run.steps = recorder.train(run.built, resume_from_checkpoint=checkpoint)
    return whole


def _resumed(run: WindowRun) -> Iterator[Quantity]:
    """The last epoch of a resumed run: the steps before the checkpoint and those behind it see every sequence once. Its
    `num_tokens` are those of all its epochs."""
    whole, epochs = _interrupted(run), run.kind.config["num_train_epochs"]
    before = whole.batches[: whole.windows[run.kind.config["save_steps"] - 1]]
    seen, wanted = recorder.sequences_of(before + run.steps.batches), run.window.expected
    yield same(seen[(epochs - 1) * len(wanted) :], wanted)
    counted = [row["num_tokens"] for row in run.built.state.log_history if "num_tokens" in row]
    if counted and epochs > 1:
        yield summed("num_tokens", float(counted[-1]), [float(len(t)) for t, _ in seen])


def _packed(run: WindowRun) -> Iterator[Quantity]:
    """Evaluation of packed rows, of the dataset itself and of the same one by a name."""
    prepares = "evaluate" in vars(trl.class_named(run.call.trainer))
    given = {"one": run.data() if prepares else run.built.eval_dataset}
    with trl.quiet(), drive.fixed(run.path, run.built):
        found = run.built.evaluate() | run.built.evaluate(given)
    for name, key in (("evaluation loss", "eval_loss"), ("loss of the named", "eval_one_loss")):
        yield window_loss(by_definition(run.trainer, run.s), float(found[key]), name)


def _mismatched(run: WindowRun) -> Iterator[Quantity]:
    """KTO's KL is of prompts with completions of others (arXiv 2402.01306, section 4.1), also where one row is left over."""
    if "KL_input_ids" not in run.steps.batches[0]:
        raise Unsupported("KTO of the installed version hands its KL's completions on otherwise")
    pairs = [zip(b["KL_input_ids"], b["KL_attention_mask"], strict=True) for b in run.steps.batches]
    drawn = [tokens[there > 0].tolist() for batch in pairs for tokens, there in batch]
    own = sum(tokens in drawn for tokens, _ in run.window.sequences)
    yield holds("completions of the KL", not own, f"{own} of {len(drawn)} are the prompt's own")


def _synced(run: WindowRun) -> Iterator[Quantity]:
    """sync_ref_model: behind a step the reference is α times the policy and 1 - α times itself (arXiv 2404.09656, equation 2).
    With checkpoints the second step is another trainer's, from the first one's."""
    last = 1
    if SAVED.items() <= run.kind.config.items():
        _interrupted(run)
        last = 0
    share, now = run.kind.own["ref_model_mixup_alpha"], run.steps.parameters[last]
    reference = copy.deepcopy(stored_window.reference(run.s.model))
    for name, parameter in reference.named_parameters():
        parameter.mul_(1 - share).add_(now[name].double(), alpha=share)
    yield run.gradient("gradient of step 2", last, count=4, reference=reference)


def _clipped(run: WindowRun) -> Iterator[Quantity]:
    """One step with the log-probs of an older policy: ratios within and beyond both bounds; their logged shares."""
    window = run.window.sequences
    whole = SPECS[run.trainer].clips == "sequences" or "importance_sampling_level" in run.kind.own
    older = stored_window.policy(run.s.model, torch.float64, stored_window.OLDER if whole else BEFORE)
    made = functools.partial(Loss, run.window, run.s, generation=Generation(window, older, steps=1))
    loss = made(policy=run.kind.own)
    twin_runs.hand_old(run.built, {tuple(t): lp for (t, _), lp in zip(window, loss.old([]), strict=True)})
    yield from judged(run.call, run, loss)
    if "importance_sampling_level" in run.kind.own:
        return
    model = stored_window.policy(run.s.model, torch.float64)
    counts = measured(model, functools.partial(beyond, loss), beyond(loss, model))
    exchanged = {"epsilon": CLIPPED["epsilon_high"], "epsilon_high": CLIPPED["epsilon"]}
    others = beyond(made(policy={**run.kind.own, **exchanged}), model)
    share, other = ([float(x[f"clip_ratio/{side}_mean"]) for side in ("low", "high")] for x in (counts.exact, others))
    told = all(0 < x < 0.5 and x != y for x, y in zip(share, other, strict=True))
    yield tells("beyond", told, f"low and high: {share}, by each other's bound {other}")
    yield from logged(counts, drive.logged(run.built), "the share of what is beyond the bound")


def _bounded(run: WindowRun) -> Iterator[Quantity]:
    """reward_clip_range: the weighted sum of the rewards is limited, then the KL is taken off."""
    own = run.kind.own
    earned = (sum(own["reward_weights"]) * stored_window.rewards(run.window.sequences)).clamp(*own["reward_clip_range"])
    yield from judged(run.call, run, Loss(run.window, run.s, earned=earned), there=False)


def _misaligned(run: WindowRun) -> Iterator[Quantity]:
    """Generations of two micro-batches, windows of three, and a last one of the fourth: from before the first step. Its
    ratios are to the policy that generated it, its tokens are estimated as half of the generation's."""
    yield run.sizes(6, 2)
    whole = run.window.found_in(run.steps.batches[2:]).sequences
    yield run.gradient("gradient of window 2", 1, generation=Generation(whole, run.policy(0), steps=2))


@dataclasses.dataclass(frozen=True)
class Kind:
    """A kind of window: the setup of its run, and what is judged."""

    judge: Callable[[WindowRun], Iterator[Quantity]]  # what is judged of the run
    trainers: tuple[str, ...]  # those that have it
    split: str = "8x1"  # batch x accumulation
    beta: float = SETTINGS["beta"].default  # weight of the KL
    config: Mapping[str, Any] = dataclasses.field(default_factory=dict)  # more of the trainer's config
    own: Mapping[str, Any] = dataclasses.field(default_factory=dict)  # also; without these there is nothing to judge
    adapted: bool = False  # whether a LoRA is trained
    count: int | None = None  # rows that the run has
    ended: tuple[int, ...] = ()  # rows that end with `models.END`
    truncated: tuple[int, ...] = ()  # rows without an end
    streamed: bool = False  # whether the dataset has no length
    losses: tuple[str, ...] = ()  # GRPO's loss types that it is looked at with; empty: the default


WINDOWS = {
    # without a beta GRPO's evaluation is 0
    "evaluation": Kind(_evaluation, EVALUATING, "2x4", beta=0.04, config=EVALUATED, losses=GRPO_TYPES),
    "incomplete": Kind(lambda run: _last(run, 4, 1), STORED, "1x4", config=EPOCH, count=5),
    "uneven": Kind(lambda run: _last(run, 4, 3), STORED, "2x2", config=EPOCH, count=7),
    "second": Kind(lambda run: iter([run.gradient("gradient of step 2", 1, count=4)]), STORED, "2x2", config=TWO_STEPS),
    "streamed": Kind(_streamed, ("sft-trainer",), "1x2", config={"max_steps": 2}, count=3, streamed=True),
    "truncated": Kind(_truncated, MASKING, config=recorder.LOGGED, truncated=(1, 4, 5), losses=GRPO_TYPES),
    "ends": Kind(_truncated, MASKING, config=recorder.LOGGED, truncated=(1, 4, 5), ended=(0, 6)),
    "controlled": Kind(_controlled, ("grpo-trainer",), "2x2", config=EVALUATED, own=ADAPTIVE),
    "generation": Kind(_generation, GROUPED, "2x2", config=TWO_STEPS, own={PARTS: 4}, losses=GRPO_TYPES),
    "again": Kind(_generation, GROUPED, "4x2", config=SLOW, own={AGAIN: 2}, losses=("dapo",)),
    "adapter": Kind(_generation, GROUPED, "4x2", config=SLOW, own={AGAIN: 2}, losses=("dapo",), adapted=True),
    "synced": Kind(_synced, having("sync_ref_model"), "2x2", beta=0.04, config=TWO_STEPS, own=SYNCED),
    "resumed": Kind(_synced, having("sync_ref_model"), "2x2", beta=0.04, config=TWO_STEPS | SAVED, own=SYNCED),
    "epochs": Kind(_resumed, JUDGED, "2x1", config=EPOCHS),
    "between": Kind(_resumed, GROUPED, "2x1", config=EPOCH | SAVED, own={PARTS: 2}),
    "packed": Kind(_packed, ("sft-trainer",), config={**EVALUATED, "packing": True, "max_length": 48}),
    "mismatched": Kind(_mismatched, ("kto-trainer",), "4x1", config={**EPOCH, "loss_type": "kto"}, count=5),
    "clipped": Kind(_clipped, ("grpo-trainer", "rloo-trainer"), config=recorder.LOGGED, own=CLIPPED, losses=GRPO_TYPES),
    "entropies": Kind(
        _clipped, TOKENS, beta=0.04, config=recorder.LOGGED, own=CLIPPED | {QUANTILE: 0.6}, losses=("dapo",)
    ),
    "bonus": Kind(_clipped, TOKENS, config=recorder.LOGGED, own=CLIPPED | BONUS, losses=("dapo",)),
    "sequence": Kind(_clipped, ("grpo-trainer",), beta=0.04, own=OF_SEQUENCES),
    "bounded": Kind(_bounded, ("rloo-trainer",), beta=0.04, own=BOUNDED),
    "misaligned": Kind(_misaligned, GROUPED, "2x3", config=TWO_STEPS | EPOCH, own={PARTS: 2}, losses=GRPO_TYPES),
}
"""Kind -> window. Incomplete: five sequences in windows of four. Uneven: seven, two by two: the last micro-batch holds one."""

PER_LOSS = ("evaluation", "truncated", "clipped")
"""Where each of GRPO's loss types has a branch of its own: `clipped` has the ratios that are not 1."""
PR: list[CheckCase] = [("grpo-trainer", {"kind": kind, "loss": "dapo"}) for kind in ("generation", "misaligned")]
PR += [("grpo-trainer", {"kind": kind, "loss": loss}) for kind in PER_LOSS for loss in GRPO_TYPES]
PR = [("sft-trainer", {"kind": "uneven"}), *PR]


def cases(seed: int) -> Iterator[CheckCase]:
    """Every kind, those that a trainer has."""
    for kind, window in WINDOWS.items():
        for trainer in window.trainers:
            losses = [{"loss": loss} for loss in window.losses] if "loss" in SPECS[trainer].own else []
            yield from ((trainer, {"kind": kind, **more}) for more in losses or [{}])


KIND = Setting("evaluation", "what is looked at", tuple(WINDOWS))


@check("windows", JUDGED, {"kind": KIND, "loss": SETTINGS["loss"]}, cases, pr=PR, covered=always)
def beyond_one_window(call: CheckCall) -> Iterator[Quantity]:
    """Evaluation, incomplete windows and second steps follow the same definition."""
    window = WINDOWS[call.settings.kind]
    if call.case.family not in window.trainers:
        raise Unsupported(f"{call.case.family} has no windows of this kind")
    yield from window.judge(WindowRun(call, window))
