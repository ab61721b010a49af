"""Real trainers of the installed TRL over tiny models: configured, built and run for one recorded step."""

import contextlib
import importlib
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextvars import ContextVar
from typing import Any
from unittest import mock

import torch

from parity.case.inputs import Setting
from parity.errors import Unsupported
from parity.fixes.override import override
from parity.trainers.rig import models, stored_window
from parity.trainers.rig.stored_window import reward
from parity.trainers.specs import spec_of
from parity.upstream import trl

REENTRANT, NON_REENTRANT, CUSTOM, OFF = "reentrant", "non-reentrant", "custom", "off"
PROMPTS, COMPLETION = 2, 8
_USER_CLASS: ContextVar[type | None] = ContextVar("_USER_CLASS", default=None)
BASE: dict[str, Any] = (
    {"per_device_train_batch_size": 2 * PROMPTS, "gradient_accumulation_steps": 1, "max_steps": 1, "logging_steps": 1}
    | {"learning_rate": 1e-2, "lr_scheduler_type": "constant", "optim": "sgd", "max_grad_norm": 1e9}
    | {"num_generations": 2, "max_completion_length": COMPLETION, "max_new_tokens": COMPLETION, "top_k": 0}
    | {"dataloader_pin_memory": False, "seed": 3407, "disable_dropout": True}
)
"""Arguments of one step that every version reads alike: their defaults moved between releases."""
TILE, NARROW = "_CHUNKED_LOGPROB_CHUNK_SIZE", 24
TILES = Setting(0, "words in a tile of TRL's fused LM head; 0: as it is, one tile", (0, NARROW))
DROPPED = 0.5
"""Dropout of a reference and a teacher, which have none where they are in evaluation mode, as they should be."""


@contextlib.contextmanager
def using(user_class: type | None) -> Iterator[None]:
    """While it lasts, `trl_class` gives a user's trainer, if there is one, instead of the TRL trainer that it extends, and
    `datasets` caches in a folder of its own: reference log-probs that one trainer has precomputed are found there by every
    other on the same data and model."""
    from datasets import fingerprint

    token = _USER_CLASS.set(user_class or _USER_CLASS.get())
    try:
        with mock.patch.object(fingerprint, "_TEMP_DIR_FOR_TEMP_CACHE_FILES", None):
            yield
    finally:
        _USER_CLASS.reset(token)


def trl_class(name: str) -> type:
    """A class of the installed TRL by name, or the user's trainer that extends it. Raises Unsupported when the installed
    version has none, or when the module that defines it does not import; with why."""
    released, user_class = trl.class_named(name), _USER_CLASS.get()
    return user_class if user_class is not None and issubclass(user_class, released) else released


def config(trainer: str) -> type:
    """The config class of a trainer; a subclass of it if the user's trainer is annotated with one of its own."""
    found: type = trl.config_class(trl_class(trainer), trl_class(trl.config_name(trainer)))
    return found


def needs(trainer: str, *fields: str) -> None:
    """Raises Unsupported, naming those of the fields that the trainer's config lacks in the installed version."""
    missing = [name for name in fields if name not in trl.fields(config(trainer))]
    if missing:
        raise Unsupported(f"{trainer} of the installed version has no {', '.join(missing)}")


def checkpointing(kind: str) -> dict[str, Any]:
    """The config's arguments for a kind of gradient checkpointing; a custom wrapper belongs to the model, not to them."""
    if kind in (OFF, CUSTOM):
        return {"gradient_checkpointing": False}
    return {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": kind == REENTRANT}}


@contextlib.contextmanager
def tiled(width: int) -> Iterator[None]:
    """TRL's fused LM head in tiles of so many words, of which it has one for any tiny model; 0: as it is. Raises Unsupported
    where the installed version has none of a width."""
    if not width:
        yield
        return
    module = importlib.import_module("trl.trainer.utils")
    if not hasattr(module, TILE):
        raise Unsupported("the LM head of the installed version has no tiles")
    with mock.patch.object(module, TILE, width):
        yield


def build(
    trainer: str, model: Any, wanted: Mapping[str, Any], device: str = "cpu", peft_config: Any = None, **more: Any
) -> Any:
    """A real trainer over `model` with the data that its kind takes. Its config has `BASE` and `wanted`, without the
    fields that the version lacks; `more` goes to its constructor. Raises Unsupported where the release has another trainer
    under this name (RLOO before 0.21 is a PPO trainer)."""
    kind = trl_class(trainer)
    args = trl.configured(config(trainer), device, {**BASE, **wanted})
    if not trl.accepts(kind, "model"):
        raise Unsupported(f"the installed version's {trainer} is another one: it takes no `model`")
    given: dict[str, Any] = {"model": model, "args": args, "processing_class": models.own_tokenizer(), **more}
    spec = spec_of(trainer)
    given.setdefault("train_dataset", stored_window.dataset(stored_window.brief(), spec.data))
    if spec.rewarded and trl.accepts(kind, "reward_funcs"):
        given.setdefault("reward_funcs", [reward] * len(wanted.get("reward_weights", [1.0])))
    elif spec.rewarded:  # online DPO before it took reward functions: a judge, by the same hash
        from trl import BasePairwiseJudge

        class Judge(BasePairwiseJudge):
            def judge(self, prompts: Any, completions: Any, shuffle_order: bool = True) -> list[int]:
                return [int(reward([second])[0] > reward([first])[0]) for first, second in completions]

        given.setdefault("judge", Judge())
    if peft_config is not None:
        given["peft_config"] = peft_config
    with trl.quiet(), trl.environment_kept():
        out = kind(**given)
    others = (getattr(out, name, None) for name in ("ref_model", "teacher_model"))
    theirs = {module for other in others if isinstance(other, torch.nn.Module) for module in other.modules()}
    _drop(theirs - {*out.model.modules()}, DROPPED)
    return out


def _drop(modules: Iterable[torch.nn.Module], share: float) -> None:
    for module in modules:
        if hasattr(module, "attention_dropout"):
            module.attention_dropout = share


@contextlib.contextmanager
def dropping(model: torch.nn.Module) -> Iterator[None]:
    """While it lasts, a model that has no dropout has some, but in evaluation mode."""
    _drop(model.modules(), DROPPED)
    try:
        yield
    finally:
        _drop(model.modules(), 0.0)


@contextlib.contextmanager
def seeded() -> Iterator[None]:
    """Generation draws the same numbers every time: torch's state is set, and put back."""
    with torch.random.fork_rng(range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()):
        torch.manual_seed(3407)
        yield


def logged(trainer: Any) -> dict[str, Any]:
    """What a trainer logged of its first step; empty if nothing."""
    return numbers(next((entry for entry in trainer.state.log_history if "loss" in entry or "kl" in entry), {}))


def numbers(entry: Mapping[str, Any]) -> dict[str, Any]:
    """An entry of a log, NaN where TRL wrote None for it: a metric without one value that is a number."""
    return {name: math.nan if value is None else value for name, value in entry.items()}


def fixed(path: str, trainer: Any) -> contextlib.AbstractContextManager[Any]:
    """What the path "fixed" means: `parity.fixes.apply` on the constructed trainer, undone afterwards."""
    from parity.fixes import apply

    return apply(trainer) if path == "fixed" else contextlib.nullcontext()


def scorer(trainer: Any) -> str:
    """The name of the method that scores completions."""
    newer = "_get_per_token_logps_and_entropies"
    return newer if hasattr(trainer, newer) else "_get_per_token_logps"


def scores(returned: Any) -> tuple[Any, Any]:
    """The log-probs and, where the release hands them out, the entropies, of what a `scorer` returned."""
    if isinstance(returned, dict):
        return returned["logps"], returned.get("entropies")
    return returned[:2] if isinstance(returned, tuple) else (returned, None)


def changed(holder: Any, name: str, change: Callable[[tuple[Any, ...], Any], Any]) -> None:
    """Let every call of a method of one object return `change(args, result)`."""
    override(holder, name, "rig", lambda _, original, *args, **kwargs: change(args, original(*args, **kwargs)))
