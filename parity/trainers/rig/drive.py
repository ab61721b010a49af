"""Real trainers of the installed TRL over tiny models: found, configured, built and run for one recorded step."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib
import importlib.util
import inspect
import pkgutil
import re
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from pathlib import Path
from typing import Any

import torch

from parity.case.case import hashes
from parity.errors import Unsupported
from parity.implementations.trl_trainer import LIGER_LAYERS, annotated, environment_kept
from parity.trainers.check import Cell
from parity.trainers.rig import models

REENTRANT, NON_REENTRANT, CUSTOM, OFF = "reentrant", "non-reentrant", "custom", "off"
PROMPTS, COMPLETION = 2, 8


OWN: ContextVar[type | None] = ContextVar("OWN", default=None)
"""A user's trainer, which stands in for the class of TRL that it extends."""


@contextlib.contextmanager
def standing_in(kind: type) -> Iterator[None]:
    """Within it `found` gives `kind` instead of the TRL trainer that it extends."""
    token = OWN.set(kind)
    try:
        yield
    finally:
        OWN.reset(token)


def found(name: str) -> type:
    """A class of the installed TRL by name, in `trl` or wherever in `trl.experimental` it lives; or what stands in for it.

    Raises:
        Unsupported: when the installed version has none, or when the module that defines it does not import; with why.
    """
    return in_place(_released(name))


def in_place(released: type) -> type:
    """A TRL class, or the user's trainer that stands in for it."""
    own = OWN.get()
    return own if own is not None and issubclass(own, released) else released


def config(trainer: str) -> type:
    """The config class of a trainer, that of what stands in for it if its `__init__` is annotated with one of its own."""
    return annotated(found(trainer), found(f"{trainer.removesuffix('Trainer')}Config"))


@functools.cache
def _released(name: str) -> type:
    import trl

    failed: list[Exception] = []
    try:
        return getattr(trl, name)
    except AttributeError:
        pass
    except (ImportError, RuntimeError) as error:  # a lazy module of TRL: the name is there, its import fails
        failed.append(error)
    for module in _experimental(name):
        try:
            return getattr(importlib.import_module(module), name)
        except AttributeError:
            pass
        except (ImportError, RuntimeError) as error:
            failed.append(error)
    if failed:
        raise Unsupported(f"trl {trl.__version__}: {name} does not import: {_told(failed[-1])}")
    raise Unsupported(f"trl {trl.__version__} has no {name}")


def _experimental(name: str) -> Iterator[str]:
    """The packages of `trl.experimental` in whose files a class is defined, read without importing them."""
    spec = importlib.util.find_spec("trl.experimental")
    for place in (spec and spec.submodule_search_locations) or ():
        for info in sorted(pkgutil.iter_modules([place]), key=lambda m: m.name):
            root = Path(place) / info.name
            files = sorted(root.glob("**/*.py")) if info.ispkg else [root.with_suffix(".py")]
            if any(re.search(rf"^class {name}\b", f.read_text(), re.MULTILINE) for f in files):
                yield f"trl.experimental.{info.name}"


def _told(error: BaseException) -> str:
    """The innermost cause, in one line."""
    while error.__cause__ is not None:
        error = error.__cause__
    return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0][:200]}"


def fields(config: type) -> dict[str, Any]:
    """Name -> default of every field of a TRL config."""
    return {f.name: f.default for f in dataclasses.fields(config)}


@functools.cache
def _output_dir() -> str:
    return tempfile.mkdtemp(prefix="parity-trainer-")


BASE: dict[str, Any] = {
    "per_device_train_batch_size": 2 * PROMPTS,
    "gradient_accumulation_steps": 1,
    "max_steps": 1,
    "logging_steps": 1,
    "learning_rate": 1e-2,
    "lr_scheduler_type": "constant",
    "optim": "sgd",
    "max_grad_norm": 1e9,
    "report_to": [],
    "bf16": False,
    "fp16": False,
    "save_strategy": "no",
    "disable_tqdm": True,
    "dataloader_pin_memory": False,
    "seed": 3407,
    "num_generations": 2,
    "max_completion_length": COMPLETION,
    "max_new_tokens": COMPLETION,
    "max_prompt_length": None,
    "top_k": 0,
    "disable_dropout": True,
    "router_aux_loss_coef": None,
}
"""Arguments of one step that every version reads alike: their defaults moved between releases."""


def arguments(config: type, device: str, wanted: Mapping[str, Any], needed: tuple[str, ...] = ()) -> Any:
    """The config with `BASE` and `wanted`, without the fields that the version lacks.

    Raises:
        Unsupported: for a field in `needed` that the version has not.
    """
    known = fields(config)
    for name in needed:
        if name not in known:
            raise Unsupported(f"{config.__name__} has no {name} in the installed version")
    given = {**BASE, "output_dir": _output_dir(), "use_cpu": device == "cpu", **wanted}
    if known.get("router_aux_loss_coef", 0) is not None:
        given["router_aux_loss_coef"] = 0.0
    if known.get("max_prompt_length", None) is None and "max_prompt_length" in known:
        given.pop("max_prompt_length")
    return config(**{k: v for k, v in given.items() if k in known})


def checkpointing(kind: str) -> dict[str, Any]:
    """The config's arguments for a kind of gradient checkpointing; a custom wrapper belongs to the model, not to them."""
    if kind in (OFF, CUSTOM):
        return {"gradient_checkpointing": False}
    return {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": kind == REENTRANT}}


def fused(config: type) -> dict[str, Any]:
    """The arguments that turn the version's fused path on, layers left alone.

    Raises:
        Unsupported: where there is none beside the plain path (TRL since 1.15 fuses for everyone).
    """
    known = fields(config)
    if known.get("use_liger_loss") is False:
        return {"use_liger_loss": True}
    import trl
    from packaging.version import Version

    if "use_liger_kernel" not in known or Version(trl.__version__) >= Version("1.15.0"):
        raise Unsupported(f"{config.__name__} of trl {trl.__version__} has no fused path beside the plain one")
    return {"use_liger_kernel": True, "liger_kernel_config": dict.fromkeys(LIGER_LAYERS, False)}


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


def reward(completions: Any, **kwargs: Any) -> list[float]:
    """A reward that differs within a group: a hash of the completion, in [0, 1)."""
    return [float(hashes(3, str(c), (1,))[0] >> 40) / 2**24 for c in completions]


def lora_config(targets: Any = ("q_proj", "v_proj"), **options: Any) -> Any:
    """A LoRA of rank 2 without dropout."""
    from peft import LoraConfig

    given = {"r": 2, "lora_alpha": 4, "lora_dropout": 0.0, "bias": "none", "task_type": "CAUSAL_LM", **options}
    return LoraConfig(target_modules=targets if isinstance(targets, str) else list(targets), **given)


PREFERENCES = {"DPOTrainer", "CPOTrainer", "ORPOTrainer"}
REWARDED = {"GRPOTrainer", "RLOOTrainer", "OnlineDPOTrainer", "GMPOTrainer"}


def build(trainer: str, model: Any, args: Any, peft_config: Any = None, **more: Any) -> Any:
    """A real trainer over `model` with the data that its kind takes."""
    kind = found(trainer)
    given: dict[str, Any] = {"model": model, "args": args, "processing_class": models.tokenizer(), **more}
    data = preferences if trainer in PREFERENCES else texts if trainer == "SFTTrainer" else prompts
    given.setdefault("train_dataset", data())
    if trainer in REWARDED and _takes(kind, "reward_funcs"):
        given.setdefault("reward_funcs", reward)
    elif trainer in REWARDED:
        given.setdefault("judge", _judge())
    if peft_config is not None:
        given["peft_config"] = peft_config
    with models.quiet(), environment_kept():
        return kind(**given)


def _takes(kind: type, name: str) -> bool:
    """Whether the constructor of a trainer has the parameter, that of TRL's class where a subclass passes *args, **kwargs on."""
    for cls in kind.__mro__:
        if "__init__" not in vars(cls):
            continue
        parameters = inspect.signature(vars(cls)["__init__"]).parameters
        if name in parameters:
            return True
        if not any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
            return False
    return False


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
    with models.quiet(), environment_kept(), seeded():
        trainer.train()
    return next((entry for entry in trainer.state.log_history if "loss" in entry or "kl" in entry), {})


def fixed(cell: Cell, trainer: Any) -> contextlib.AbstractContextManager[Any]:
    """What "fixed" means: `parity.fixes.apply` on the constructed trainer, taken back afterwards."""
    from parity.fixes import apply

    return apply(trainer) if cell.way == "fixed" else contextlib.nullcontext()


def spied(holder: Any, name: str, seen: Callable[[tuple[Any, ...], dict[str, Any], Any], None]) -> None:
    """Let `seen(args, kwargs, result)` watch every call of a method of one object."""
    original = getattr(holder, name)

    @functools.wraps(original)
    def watched(*args: Any, **kwargs: Any) -> Any:
        out = original(*args, **kwargs)
        seen(args, kwargs, out)
        return out

    setattr(holder, name, watched)
