"""Real trainers of the installed TRL over tiny models: configured, built and run for one recorded step."""

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from typing import Any

import torch

from parity.case.case import hashes
from parity.errors import Unsupported
from parity.trainers.check import CheckCall
from parity.trainers.rig import models
from parity.trainers.specs import spec_of
from parity.upstream import trl

REENTRANT, NON_REENTRANT, CUSTOM, OFF = "reentrant", "non-reentrant", "custom", "off"
PROMPTS, COMPLETION = 2, 8


_USER_CLASS: ContextVar[type | None] = ContextVar("_USER_CLASS", default=None)


@contextlib.contextmanager
def using(user_class: type) -> Iterator[None]:
    """While it lasts, `trl_class` gives a user's trainer instead of the TRL trainer that it extends."""
    token = _USER_CLASS.set(user_class)
    try:
        yield
    finally:
        _USER_CLASS.reset(token)


@dataclasses.dataclass
class Noted:
    """What a check set and saw: fields of configs away from their default, and the trainers that it built."""

    config: set[str] = dataclasses.field(default_factory=set)
    trainers: list[Any] = dataclasses.field(default_factory=list)

    def features(self) -> dict[str, list[str]]:
        """`config`, and `logged`: the keys that the trainers logged; for the features of a row."""
        logged = {key for t in self.trainers for entry in t.state.log_history for key in entry}
        return {"config": sorted(self.config), "logged": sorted(logged)}


_NOTED: ContextVar[Noted | None] = ContextVar("_NOTED", default=None)


@contextlib.contextmanager
def noting() -> Iterator[Noted]:
    """While it lasts, configs and trainers are noted."""
    token = _NOTED.set(Noted())
    try:
        yield _NOTED.get() or Noted()
    finally:
        _NOTED.reset(token)


def trl_class(name: str) -> type:
    """A class of the installed TRL by name, or the user's trainer that extends it.

    Raises:
        Unsupported: when the installed version has none, or when the module that defines it does not import; with why.
    """
    return in_use(trl.class_named(name))


def in_use(released: type) -> type:
    """A TRL class, or the user's trainer that extends it."""
    user_class = _USER_CLASS.get()
    return user_class if user_class is not None and issubclass(user_class, released) else released


def config(trainer: str) -> type:
    """The config class of a trainer; a subclass of it if the user's trainer is annotated with one of its own."""
    found: type = trl.config_class(trl_class(trainer), trl_class(f"{trainer.removesuffix('Trainer')}Config"))
    return found


def needs(trainer: str, *fields: str) -> None:
    """Go on only where the trainer's config has the fields.

    Raises:
        Unsupported: naming those that the installed version lacks.
    """
    missing = [name for name in fields if name not in trl.fields(config(trainer))]
    if missing:
        raise Unsupported(f"{trainer} of the installed version has no {', '.join(missing)}")


BASE: dict[str, Any] = {
    "per_device_train_batch_size": 2 * PROMPTS,
    "gradient_accumulation_steps": 1,
    "max_steps": 1,
    "logging_steps": 1,
    "learning_rate": 1e-2,
    "lr_scheduler_type": "constant",
    "optim": "sgd",
    "max_grad_norm": 1e9,
    "dataloader_pin_memory": False,
    "seed": 3407,
    "num_generations": 2,
    "max_completion_length": COMPLETION,
    "max_new_tokens": COMPLETION,
    "top_k": 0,
    "disable_dropout": True,
}
"""Arguments of one step that every version reads alike: their defaults moved between releases."""


def arguments(config: type, device: str, wanted: Mapping[str, Any], needed: tuple[str, ...] = ()) -> Any:
    """The config with `BASE` and `wanted`, without the fields that the version lacks.

    Raises:
        Unsupported: for a field in `needed` that the version has not.
    """
    out, noted = trl.configured(config, device, {**BASE, **wanted}, needed), _NOTED.get()
    if noted is not None:
        known = trl.fields(config)
        noted.config |= {n for n, v in {**BASE, **wanted}.items() if n in known and v != known[n]}
    return out


def checkpointing(kind: str) -> dict[str, Any]:
    """The config's arguments for a kind of gradient checkpointing; a custom wrapper belongs to the model, not to them."""
    if kind in (OFF, CUSTOM):
        return {"gradient_checkpointing": False}
    return {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": kind == REENTRANT}}


def prompts() -> Any:
    """A dataset of prompts of unequal lengths, conversational as every trainer takes them."""
    from datasets import Dataset

    rows = [models.words(7, f"prompt {i}", 2 + 3 * (i % 3)) for i in range(8)]
    return Dataset.from_dict({"prompt": rows})


def preferences() -> Any:
    """A dataset of prompts with a chosen and a rejected completion of unequal lengths."""
    from datasets import Dataset

    return Dataset.from_dict(
        {
            "prompt": [models.words(7, f"prompt {i}", 2 + 3 * (i % 3)) + " " for i in range(8)],
            "chosen": [models.words(7, f"chosen {i}", 3 + i % 4) for i in range(8)],
            "rejected": [models.words(7, f"rejected {i}", 5 - i % 3) for i in range(8)],
        }
    )


def _judge() -> Any:
    """What online DPO took before it took reward functions: a judge, by the same hash."""
    from trl import BasePairwiseJudge

    class Judge(BasePairwiseJudge):
        def judge(self, prompts: Any, completions: Any, shuffle_order: bool = True) -> list[int]:
            return [int(reward([second])[0] > reward([first])[0]) for first, second in completions]

    return Judge()


def texts() -> Any:
    """A dataset of prompts and completions, for supervised fine-tuning."""
    pairs = preferences()
    return pairs.remove_columns("rejected").rename_column("chosen", "completion")


DATA = {"pairs": preferences, "completions": texts}


def reward(completions: Any, **kwargs: Any) -> list[float]:
    """A reward that differs within a group: a hash of the completion, in [0, 1)."""
    return [float(hashes(3, str(c), (1,))[0] >> 40) / 2**24 for c in completions]


def reward_by_place(completions: Any, **kwargs: Any) -> list[float]:
    """By completion and place: the greedy completions of a group are one and the same, and would all have advantage 0."""
    return reward([f"{i} {c}" for i, c in enumerate(completions)])


def build(trainer: str, model: Any, args: Any, peft_config: Any = None, **more: Any) -> Any:
    """A real trainer over `model` with the data that its kind takes.

    Raises:
        Unsupported: where the release has another trainer under this name (RLOO before 0.21 is a PPO trainer).
    """
    kind = trl_class(trainer)
    if not trl.accepts(kind, "model"):
        raise Unsupported(f"the installed version's {trainer} is another one: it takes no `model`")
    given: dict[str, Any] = {"model": model, "args": args, "processing_class": models.tokenizer(), **more}
    spec = spec_of(trainer)
    given.setdefault("train_dataset", DATA.get(spec.data, prompts)())
    if spec.rewarded and trl.accepts(kind, "reward_funcs"):
        given.setdefault("reward_funcs", reward)
    elif spec.rewarded:
        given.setdefault("judge", _judge())
    if peft_config is not None:
        given["peft_config"] = peft_config
    with trl.quiet(), trl.environment_kept():
        out = kind(**given)
    if (noted := _NOTED.get()) is not None:
        noted.trainers.append(out)
    return out


@contextlib.contextmanager
def seeded() -> Iterator[None]:
    """Generation draws the same numbers every time: torch's state is set, and put back."""
    state = torch.random.get_rng_state()
    torch.manual_seed(3407)
    try:
        yield
    finally:
        torch.random.set_rng_state(state)


def train(trainer: Any) -> dict[str, Any]:
    """`trainer.train()` for its one step; the first log entry."""
    with trl.quiet(), trl.environment_kept(), trl.collecting_little(), seeded():
        trainer.train()
    return logged(trainer)


def logged(trainer: Any) -> dict[str, Any]:
    """What a trainer logged of its first step; empty if nothing."""
    return next((entry for entry in trainer.state.log_history if "loss" in entry or "kl" in entry), {})


def fixed(call: CheckCall, trainer: Any) -> contextlib.AbstractContextManager[Any]:
    """What "fixed" means: `parity.fixes.apply` on the constructed trainer, undone afterwards."""
    from parity.fixes import apply

    return apply(trainer) if call.path == "fixed" else contextlib.nullcontext()


SCORERS = "_get_per_token_logps_and_entropies", "_get_per_token_logps"


def scorer(trainer: Any) -> str:
    """The name of the method that scores completions.

    Raises:
        Unsupported: where the release has none (TRL 0.14 scores inside its loss).
    """
    for name in SCORERS:
        if hasattr(trainer, name):
            return name
    raise Unsupported("the installed version scores inside its loss: there is no method to ask")


def spied(holder: Any, name: str, seen: Callable[[tuple[Any, ...], dict[str, Any], Any], None]) -> None:
    """Let `seen(args, kwargs, result)` watch every call of a method of one object."""
    original = getattr(holder, name)

    @functools.wraps(original)
    def watched(*args: Any, **kwargs: Any) -> Any:
        out = original(*args, **kwargs)
        seen(args, kwargs, out)
        return out

    setattr(holder, name, watched)
