"""Mutants of whole trainers: TRL's class with one passage of one method changed.

They are edits of the installed release: a passage that it does not have is an error, so that no mutant is lost unseen.
Each goes through the released way of its trainer's checks, cell by cell, until a quantity disagrees that the class itself
has right.
"""

import dataclasses
import importlib
import inspect
import sys
import textwrap
from collections.abc import Iterator, Sequence
from typing import Any

from parity import data
from parity.case.case import Case
from parity.implementations.implementation import Implementation
from parity.judging.execute import Outcome
from parity.registry import facts, select
from parity.results.ledger import Ledger
from parity.selftest.mutants.matrix import Fate
from parity.trainers import catalogue
from parity.trainers.check import TRAINERS, Cell, CheckResult
from parity.trainers.execute import attempt, judged_row, stopped_row
from parity.trainers.rig import drive

PROFILES = ("pr", "nightly")


@dataclasses.dataclass(frozen=True)
class Edit:
    """A mistake in a trainer: in the source of `method`, `old` becomes `new`, once."""

    name: str
    mistake: str
    method: str
    old: str
    new: str


SCORE, LOSS, LOGPS = "_generate_and_score_completions", "_compute_loss", "_get_per_token_logps_and_entropies"
FIRST_TOKEN = ("labels[:, :-logits_to_keep] = -100", "labels[:, : labels.size(1) - logits_to_keep + 1] = -100")
ATTENDED = ('"attention_mask": attention_mask_batch}', '"attention_mask": torch.ones_like(attention_mask_batch)}')
ADAPTER_ON = "the reference is scored with the adapter that is trained"
REFERENCE_ADAPTER = ('adapter_name="ref" if "ref" in model.peft_config else None', 'adapter_name="default"')
UNWRAPPED = tuple(text.replace("model.peft", "ref_model_unwrapped.peft") for text in REFERENCE_ADAPTER)

EDITS: dict[str, tuple[Edit, ...]] = {
    "grpo-trainer": (
        Edit("adapter-on", ADAPTER_ON, SCORE, *REFERENCE_ADAPTER),
        Edit("first-token", "the first completion token is not scored", LOGPS, *FIRST_TOKEN),
        Edit("padding-attended", "the attention mask is all ones", LOGPS, *ATTENDED),
        Edit(
            "chunk-rows",
            "every chunk of rows takes the attention mask of the first",
            LOGPS,
            "attention_mask[start:end]",
            "attention_mask[: end - start]",
        ),
        Edit(
            "tool-mask",
            "a tool's tokens are trained on",
            LOSS,
            'completion_mask * inputs["tool_mask"]',
            "completion_mask",
        ),
        Edit(
            "kl-direction",
            "exp of the reversed log-ratio in the KL term",
            LOSS,
            "torch.exp(ref_per_token_logps - per_token_logps)",
            "torch.exp(per_token_logps - ref_per_token_logps)",
        ),
        Edit("beta", "the KL term is not weighted", LOSS, "self.beta * per_token_kl", "per_token_kl"),
        Edit(
            "window-tokens",
            "the token count of the generation batch is taken for the window's",
            LOSS,
            " * self.current_gradient_accumulation_steps / self.args.steps_per_generation",
            "",
        ),
        Edit("accumulation", "not divided by the accumulation steps", LOSS, "loss = loss / normalizer", "loss = loss"),
        Edit(
            "evaluation",
            "evaluation is divided by them too",
            LOSS,
            ' if mode == "train" else 1.0  # no accum in eval',
            "",
        ),
        Edit(
            "ratio",
            "log-probs of the time of generation are never taken",
            SCORE,
            "self.args.gradient_accumulation_steps % generate_every != 0 or (",
            "(",
        ),
        Edit("reference", "the policy is its own reference", SCORE, "self.ref_model,\n", "self.model,\n"),
        Edit(
            "counted-tools",
            "a tool's tokens count in the normaliser",
            SCORE,
            "self.accelerator.gather(loss_mask.sum())",
            "self.accelerator.gather(completion_mask.sum())",
        ),
        Edit(
            "truncated",
            "truncated completions are trained on",
            SCORE,
            "completion_mask = completion_mask * (~is_truncated).unsqueeze(1).int()",
            "completion_mask = completion_mask",
        ),
        Edit(
            "prompt-mask",
            "prompts are padded left, their mask right",
            SCORE,
            'prompt_mask, padding_value=0, padding_side="left"',
            'prompt_mask, padding_value=0, padding_side="right"',
        ),
        Edit("spread", "1e-6 beside the standard deviation", SCORE, "(std_rewards + 1e-4)", "(std_rewards + 1e-6)"),
        Edit(
            "batch-mean",
            "the mean of the batch instead of the group's",
            SCORE,
            "torch.nanmean(rewards.view(-1, num_generations), dim=1)",
            "torch.nanmean(rewards).expand(rewards.numel() // num_generations)",
        ),
        Edit(
            "sampler-dropped",
            "the sampler's importance ratio is 1",
            SCORE,
            'output["importance_sampling_ratio"] = vllm_importance_sampling_ratio',
            'output["importance_sampling_ratio"] = torch.ones_like(vllm_importance_sampling_ratio)',
        ),
        Edit(
            "sampler-turned",
            "it is turned round",
            SCORE,
            "(old_per_token_logps - sampling_per_token_logps) * mask",
            "(sampling_per_token_logps - old_per_token_logps) * mask",
        ),
        Edit(
            "sampler-tools",
            "a tool's tokens are in it",
            SCORE,
            "(old_per_token_logps - sampling_per_token_logps) * mask",
            "(old_per_token_logps - sampling_per_token_logps) * completion_mask",
        ),
        Edit("sampler-mean", "the mean of a sequence", SCORE, "diff.sum(dim=-1, keep", "diff.mean(dim=-1, keep"),
        Edit(
            "sampler-bound",
            "what is beyond the upper bound stays",
            SCORE,
            "vllm_importance_sampling_ratio > max_val",
            "vllm_importance_sampling_ratio > math.inf",
        ),
        Edit("unscored", "nobody's reward is 0", SCORE, "rewards[unscorable_mask] = torch.nan", "pass"),
        Edit(
            "reward-weights",
            "rewards are not weighted",
            SCORE,
            "rewards_per_func * self.reward_weights.to(device).unsqueeze(0)",
            "rewards_per_func",
        ),
    ),
    "rloo-trainer": (
        Edit("adapter-on", ADAPTER_ON, SCORE, *REFERENCE_ADAPTER),
        Edit("first-token", "the first completion token is not scored", LOGPS, *FIRST_TOKEN),
        Edit("padding-attended", "the attention mask is all ones", LOGPS, *ATTENDED),
        Edit(
            "own-reward", "the baseline divides by all of the group", SCORE, "(scorable_counts - 1)", "scorable_counts"
        ),
        Edit("kl-sign", "the KL is a reward", SCORE, "rewards - self.beta * kl", "rewards + self.beta * kl"),
        Edit(
            "kl-mean", "mean instead of sum of the KL", SCORE, "completion_mask).sum(-1)", "completion_mask).mean(-1)"
        ),
        Edit(
            "length",
            "log-probs of a sequence are averaged",
            LOSS,
            "(per_token_logps * completion_mask).sum(1)",
            "(per_token_logps * completion_mask).sum(1) / completion_mask.sum(1)",
        ),
        Edit(
            "spread",
            "1e-6 beside the standard deviation",
            SCORE,
            "nanstd(advantages) + 1e-4",
            "nanstd(advantages) + 1e-6",
        ),
    ),
    "dpo-trainer": (
        Edit("adapter-on", ADAPTER_ON, LOSS, *UNWRAPPED),
        Edit(
            "reward", "logged rewards without beta", LOSS, "self.beta * chosen_logratios.detach()", "chosen_logratios"
        ),
        Edit(
            "mean",
            "the policy's log-probs are averaged",
            LOSS,
            "per_token_logps.sum(dim=1)",
            "per_token_logps.mean(dim=1)",
        ),
        Edit(
            "reference",
            "the policy is its own reference",
            LOSS,
            "ref_outputs = self.ref_model(",
            "ref_outputs = model(",
        ),
        Edit("beta", "beta is 1", LOSS, "-F.logsigmoid(self.beta * delta_score)", "-F.logsigmoid(delta_score)"),
        Edit(
            "detached",
            "no gradient through the rejected",
            LOSS,
            "rejected_logps - ref_r",
            "rejected_logps.detach() - ref_r",
        ),
    ),
    "kto-trainer": (
        Edit("adapter-on", ADAPTER_ON, LOSS, *UNWRAPPED),
        Edit(
            "no-kl",
            "the KL estimate is 0",
            LOSS,
            "(KL_logps - ref_KL_logps).mean()",
            "0 * (KL_logps - ref_KL_logps).mean()",
        ),
        Edit(
            "rejected-kl", "it is left out for the rejected", LOSS, "(kl - rejected_logratios)", "(-rejected_logratios)"
        ),
        Edit(
            "prompt",
            "prompt tokens count",
            LOSS,
            '.masked_fill(batch["completion_mask"] == 0, -100)',
            '.masked_fill(batch["attention_mask"] == 0, -100)',
        ),
        Edit("weight", "the undesirable weight is 1", LOSS, "self.undesirable_weight * ", ""),
    ),
    "sft-trainer": (
        Edit(
            "own-tokens",
            "each micro-batch divides by its own tokens",
            "compute_loss",
            "if num_items_in_batch is None else num_items_in_batch",
            "",
        ),
        Edit(
            "padding",
            "padding counts",
            "compute_loss",
            "per_token_loss.sum() / torch",
            "per_token_loss.mean() * 0 + "
            "per_token_loss.sum() / (per_token_loss.numel() / outputs.label_mask.sum()) / torch",
        ),
    ),
    "online-dpo-trainer": (
        Edit("adapter-on", ADAPTER_ON, "training_step", "with self.model.disable_adapter():", "if True:"),
        Edit("padding", "padding counts", "training_step", "(cr_logprobs * ~cr_padding_mask)", "cr_logprobs"),
        Edit(
            "padding-attended",
            "the attention mask is all ones",
            "_forward",
            '"attention_mask": prompt_completion_mask}',
            '"attention_mask": torch.ones_like(prompt_completion_mask)}',
        ),
        Edit("order", "the worse is chosen", "training_step", "first_half >= second_half", "first_half < second_half"),
        Edit("beta", "beta is 1", "training_step", "-F.logsigmoid(self.beta * logits)", "-F.logsigmoid(logits)"),
        Edit("sum", "the pairs' losses are added", "training_step", "loss = losses.mean()", "loss = losses.sum()"),
    ),
    "distillation-trainer": (
        Edit("own-tokens", "each micro-batch by its own tokens", LOSS, "=num_items_in_batch,", "=None,"),
        Edit("beta", "always the forward KL", LOSS, "self.beta,", "0.0,"),
        Edit(
            "prompt-mask",
            "all positions are trained on",
            LOSS,
            "loss_mask = completion_mask if",
            "loss_mask = torch.ones_like(completion_mask) if",
        ),
    ),
}
"""Family of the trainer -> its mutants."""


def released(family: str) -> type:
    """The class that the mutants of a family are edits of."""
    return drive.trl_class(TRAINERS[family])


def mutated(family: str, edit: Edit) -> type:
    """A subclass of the released class with the edit in its method.

    Raises:
        LookupError: where the method of the installed release does not have the passage.
    """
    kind = released(family)
    base = next(b for b in kind.__mro__ if edit.method in vars(b))
    source = textwrap.dedent(inspect.getsource(vars(base)[edit.method]))
    if edit.old not in source:
        raise LookupError(f"{family}.{edit.name}: {edit.method} has no {edit.old!r}")
    source = source.replace(edit.old, edit.new, 1).replace("super()", "super(_base, self)")
    made: dict[str, Any] = {}
    text = f"def _made(_base):\n{textwrap.indent(source, '    ')}\n    return {edit.method}\n"
    module = sys.modules.get(base.__module__) or importlib.import_module(base.__module__)
    exec(
        compile(text, f"<{family}.{edit.name}>", "exec"), vars(module), made
    )  # the module's names, as they are when called
    return type(kind.__name__, (kind,), {edit.method: made["_made"](base), "__module__": __name__})


def cells(family: str, seed: int) -> Iterator[Case]:
    """The cells of a trainer that drive its class in this process: those of profile pr first, then the others of nightly."""
    seen: set[str] = set()
    for profile in PROFILES:
        for case in catalogue.cases(family, profile, seed):
            if case.id not in seen and catalogue.family(family).check(case).drives:
                seen.add(case.id)
                yield case


def fates(family: str, seed: int, budget: int, device: str = "cpu") -> list[Fate]:
    """The fate of each mutant of a trainer and of the class itself, the control, on at most `budget` cells.

    The control sees those that the mutants need.
    """
    implementation = next(i for i in select(()) if i.id == f"{family}.released")
    ledger = Ledger.load(data.ledger_file())
    kinds = {e.name: mutated(family, e) for e in EDITS[family]}
    kinds["correct"] = type("Same", (released(family),), {"__module__": __name__})
    mistakes = {e.name: e.mistake for e in EDITS[family]}
    alive = {name: Fate(family, name, mistakes.get(name, ""), seed, 0, 0) for name in kinds}
    done: dict[str, Fate] = {}
    for number, case in enumerate(cells(family, seed)):
        if number == budget or not any(mistakes.get(name) for name in alive):
            break
        used = device if catalogue.family(family).check(case).moves else "cpu"
        cell = Cell(case, catalogue.family(family).full_settings(case), "released", used)
        for name in list(alive):
            with drive.using(kinds[name]):
                alive[name] = _judged(cell, implementation, alive[name], ledger)
            if alive[name].killed:
                done[name] = alive.pop(name)
    return [done.get(name) or alive[name] for name in kinds]


def _judged(cell: Cell, implementation: Implementation, fate: Fate, ledger: Ledger) -> Fate:
    outcome, results = attempt(catalogue.family(cell.case.family).check(cell.case), cell, implementation)
    fate = dataclasses.replace(fate, cases=fate.cases + 1, judged=fate.judged + len(results))
    return _killed_by(cell, implementation, fate, ledger, outcome, results)


def _killed_by(
    cell: Cell,
    implementation: Implementation,
    fate: Fate,
    ledger: Ledger,
    outcome: Outcome,
    results: Sequence[CheckResult],
) -> Fate:
    """Dead of the first quantity that disagrees, or of a crash; not of what the ledger knows of the released class."""
    dead: dict[str, Any] = {"dtype": cell.case.dtype, "case": cell.case.to_json()}
    if outcome.verdict == "crashed":
        if ledger.match(stopped_row(cell, implementation, outcome), facts(cell.case)) is not None:
            return fate
        return dataclasses.replace(fate, gate="crashed", message=outcome.message, **dead)
    for result in results:
        row = judged_row(cell, implementation, result)
        if row.verdict == "disagree" and ledger.match(row, facts(cell.case)) is None:
            return dataclasses.replace(fate, gate=row.gate or "", quantity=result.quantity, message=row.message, **dead)
    return fate
