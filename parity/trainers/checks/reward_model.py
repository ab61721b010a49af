"""A reward model: the score of each sequence, and the loss of Bradley and Terry on pairs of them."""

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from parity.case.inputs import Setting
from parity.errors import Unsupported
from parity.trainers.check import CheckCall, CheckCase, Quantity, check, pairwise, same, shared, tells
from parity.trainers.definitions.scored import rows
from parity.trainers.definitions.training_step import exact_step, first_step, logged, measured, window_loss
from parity.trainers.rig import drive, models, recorder
from parity.trainers.rig.stored_window import Window
from parity.upstream import trl

REWARD, MARGIN = "reward-trainer", 0.5
SETTINGS = {
    "model": Setting("llama", "tiny model", ("llama", "qwen2")),
    "split": Setting("8x1", "batch x accumulation, of pairs", ("8x1", "2x4")),
    "margin": Setting(False, "pairs come with a margin each", (False, True)),
    "center": Setting(0.0, "center_rewards_coefficient", (0.0, 0.1)),
    "pad": Setting("<pad>", "the tokenizer's padding token; TRL takes <eos> where there is none", ("<pad>", "<eos>")),
    "limit": Setting(False, "max_length: pairs of which one sequence is longer are left out", (False, True)),
}
CASES: list[CheckCase] = [
    (REWARD, {"margin": True, "center": 0.1}),
    (REWARD, {"split": "2x4", "model": "qwen2", "center": 0.1}),
    (REWARD, {"limit": True}),
]
COUNTED = ("accuracy", "num_tokens")


def cases(seed: int) -> Iterator[CheckCase]:
    """Pairs of values with a padding token of its own: <eos> as padding moves every number, whatever else is wrong."""
    yield from ((REWARD, s) for s in pairwise({name: s for name, s in SETTINGS.items() if name != "pad"}, seed))
    yield REWARD, {"pad": "<eos>"}


def _rewards(model: Any, sequences: list[list[int]]) -> Tensor:
    """The score of the last token of each sequence, (N,)."""
    hidden = model.model(**rows(sequences), use_cache=False).last_hidden_state
    last = torch.tensor([len(ids) - 1 for ids in sequences])
    return model.score(hidden[torch.arange(len(sequences)), last]).squeeze(-1)


@check("reward-model", (REWARD,), SETTINGS, cases, pr=CASES)
def reward_model(call: CheckCall) -> Iterator[Quantity]:
    """Pairs as they were given, loss, gradients and logged numbers by the score of each sequence's last token."""
    s, window = call.settings, Window.of(call.case.family)
    sides = [[ids for ids, _ in side] for side in window.pair()]
    margins = [MARGIN * i for i in range(len(window.rows))]
    lengths = [max(map(len, pair)) for pair in zip(*sides, strict=True)]
    limit = sorted(lengths)[1] if s.limit else None
    kept = [i for i, length in enumerate(lengths) if limit is None or length <= limit]
    if s.limit:
        yield tells("left out", len(kept) < len(lengths), f"{len(kept)} of {len(lengths)} pairs are within {limit}")
    if len(kept) % 2 and s.split != "8x1":
        raise Unsupported("the last micro-batch has one pair, and weighs as much as one of two")
    both, own = [side[i] for side in sides for i in kept], torch.tensor(margins)[kept].double() * s.margin

    def loss(model: Any) -> Tensor:
        """-log σ(r_c - r_r - margin) + center·(r_c + r_r)², the mean over pairs (arXiv 2307.09288, 2312.09244)."""
        better, worse = _rewards(model, both).chunk(2)
        return (-logsigmoid(better - worse - own) + s.center * (better + worse).square()).mean()

    def numbers(model: Any) -> Mapping[str, Tensor]:
        earned = _rewards(model, both)
        better, worse = earned.chunk(2)
        out = {"min_reward": earned.min(), "mean_reward": earned.mean(), "max_reward": earned.max()}
        out |= {"accuracy": (better > worse).double().mean(), "margin": (better - worse).mean()}
        return out | {"num_tokens": torch.tensor(float(sum(map(len, both))))}

    def model(dtype: torch.dtype = torch.float32) -> Any:
        return models.model(f"{s.model}_scores", dtype).train()

    data = window.dataset()
    data = data.add_column("margin", margins) if s.margin else data
    wanted = recorder.plain(s.split) | recorder.LOGGED | {"per_device_eval_batch_size": 8}
    wanted |= {"center_rewards_coefficient": s.center or None, "max_length": limit}
    drive.needs(call.trainer, "center_rewards_coefficient")
    given = {"processing_class": models.own_tokenizer(s.pad), "train_dataset": data, "eval_dataset": data}
    trainer = drive.build(call.trainer, model(), wanted, **given)
    with drive.fixed(call.path, trainer):
        steps = recorder.train(trainer)
        with trl.quiet():
            evaluated = drive.numbers(trainer.evaluate())
    if any("attention_mask" not in part for part in steps.batches):
        raise Unsupported("the installed version hands chosen and rejected sequences to its loss apart")
    batches = [zip(part["input_ids"], part["attention_mask"], strict=True) for part in steps.batches]
    yield same([tokens[there.bool()].tolist() for batch in batches for tokens, there in batch], both)
    step = shared(call, "step", lambda: exact_step(model(torch.float64), loss))
    yield from first_step(step, steps)
    yield window_loss(step, evaluated["eval_loss"], "evaluation loss")
    truth = shared(call, "logged", lambda: measured(model(torch.float64), numbers, COUNTED))
    if s.split == "8x1":
        yield from logged(truth, drive.logged(trainer))
    yield from logged(truth, evaluated, of="eval_")
