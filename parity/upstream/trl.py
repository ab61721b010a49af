"""TRL, 0.17 to 1.16: its classes by name, the fields of its configs, its fused path, and a construction that prints nothing.

What a release does not have is found out here: callers say what they want, and get it or an `Unsupported` that says why not.
"""

import contextlib
import dataclasses
import functools
import gc
import importlib
import importlib.metadata
import importlib.util
import inspect
import io
import itertools
import logging
import os
import pkgutil
import random
import re
import typing
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from packaging.version import Version

from parity.errors import Unsupported
from parity.fixes.override import source_of
from parity.judge.calls import told
from parity.process import scratch_folder

QUIET: dict[str, Any] = {"report_to": [], "bf16": False, "fp16": False, "save_strategy": "no", "disable_tqdm": True}
"""Arguments of every config: the model's own precision, nothing stored or reported. Their defaults moved between releases."""

TRANSFORMERS = "Trainer"
"""The class of transformers itself."""
LIGER_LAYERS = ("rope", "rms_norm", "layer_norm", "swiglu", "geglu", "cross_entropy", "fused_linear_cross_entropy")
"""What `use_liger_kernel` exchanges in a model besides the trainer's loss, for every model of the process."""


@functools.cache
def since(version: str) -> bool:
    """Whether the installed TRL is `version` or later; False where there is none."""
    installed = importlib.metadata.version("trl") if importlib.util.find_spec("trl") else "0"
    return Version(installed) >= Version(version)


def chunks_are_triton() -> bool:
    """Whether the chunked functions are Triton kernels alone, on the CPU in its interpreter: 1.16 brought a path in torch."""
    return since("1.15") and not since("1.16")


@contextlib.contextmanager
def triton_taken(*modules: str) -> Iterator[None]:
    """Forward and backward of TRL's chunked functions take the Triton path, whatever the device; in 1.15 there is no other."""
    with contextlib.ExitStack() as stack:
        for module in map(importlib.import_module, modules):
            if chunks_are_triton() and not hasattr(module, "_use_triton"):
                continue
            stack.callback(setattr, module, "_use_triton", module._use_triton)
            module._use_triton = lambda device: True  # type: ignore[attr-defined]
        yield


@functools.cache
def class_named(name: str) -> type:
    """A class of the installed TRL, in `trl` or wherever in `trl.experimental` it lives, else of transformers. Raises
    Unsupported when neither has one, or when the module that defines it does not import; with why."""
    import trl

    failed: BaseException | None = None
    for module in itertools.chain(["trl"], _experimental(name), ["transformers"]):
        try:
            return getattr(importlib.import_module(module), name)
        except AttributeError:
            pass
        except (ImportError, RuntimeError) as error:  # a lazy module of TRL: the name is there, its import fails
            failed = error
    if failed is None:
        raise Unsupported(f"trl {trl.__version__} has no {name}")
    while failed.__cause__ is not None:
        failed = failed.__cause__
    raise Unsupported(f"trl {trl.__version__}: {name} does not import: {told(failed)[:220]}")


def _experimental(name: str) -> Iterator[str]:
    """The packages of `trl.experimental` in whose files a class is defined, read without importing them."""
    spec = importlib.util.find_spec("trl.experimental")
    for place in (spec and spec.submodule_search_locations) or ():
        for info in sorted(pkgutil.iter_modules([place]), key=lambda m: m.name):
            root = Path(place) / info.name
            files = sorted(root.glob("**/*.py")) if info.ispkg else [root.with_suffix(".py")]
            if any(re.search(rf"^class {name}\b", f.read_text(), re.MULTILINE) for f in files):
                yield f"trl.experimental.{info.name}"


def config_class(trainer: type, config: type) -> Any:
    """The subclass of `config` that the nearest `__init__` with an annotated `args` asks for, else `config` itself."""
    for base in trainer.__mro__:
        with contextlib.suppress(Exception):  # an annotation may name what was imported for type checkers alone
            hint = typing.get_type_hints(vars(base)["__init__"]).get("args")
            for one in (hint, *typing.get_args(hint)):
                if inspect.isclass(one) and issubclass(one, config):
                    return one
    return config


def config_name(trainer: str) -> str:
    return (trainer.removesuffix("Trainer") or "TrainingArguments") + "Config" * (trainer != TRANSFORMERS)


def config_of(trainer: str) -> type:
    """The config class of the trainer with this name. Raises Unsupported as `class_named`."""
    return class_named(config_name(trainer))


@functools.cache
def fields(config: type) -> Mapping[str, Any]:
    """Name -> default of every field of a TRL config."""
    return {f.name: f.default for f in dataclasses.fields(config)}


def configured(config: type, device: str, wanted: Mapping[str, Any]) -> Any:
    """A config with `QUIET` and `wanted`, without the fields that the version lacks; prompts are never cut."""
    known = fields(config)
    given = {**QUIET, "output_dir": output_dir(), "use_cpu": device == "cpu", "max_prompt_length": None, **wanted}
    # None asks for the model's own coefficient where that is the default; elsewhere the default is a number
    given.setdefault("router_aux_loss_coef", None if known.get("router_aux_loss_coef", 0) is None else 0.0)
    return config(**{name: value for name, value in given.items() if name in known})


def liger(config: type) -> dict[str, Any]:
    """The arguments that turn the version's fused loss on. `use_liger_kernel` would exchange the model's layers as well.
    Raises Unsupported where there is no fused path beside the plain one (TRL since 1.15 fuses for everyone)."""
    known = fields(config)
    if known.get("use_liger_loss") is False:
        return {"use_liger_loss": True}
    if "use_liger_kernel" not in known or since("1.15.0"):
        version = importlib.metadata.version("trl")
        raise Unsupported(f"{config.__name__} of trl {version} has no fused path beside the plain one")
    return {"use_liger_kernel": True, "liger_kernel_config": dict.fromkeys(LIGER_LAYERS, False)}


def lora(targets: Any = ("q_proj", "v_proj"), **options: Any) -> Any:
    """A LoRA of rank 2 without dropout, as a `peft_config`."""
    from peft import LoraConfig

    given = {"r": 2, "lora_alpha": 4, "lora_dropout": 0.0, "bias": "none", "task_type": "CAUSAL_LM", **options}
    return LoraConfig(target_modules=targets if isinstance(targets, str) else list(targets), **given)


def tokenizer(words: Mapping[str, int], **options: Any) -> Any:
    """A tokenizer of words, <pad> and <eos> among them, split at spaces; any other word has the id of <pad>."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    inner = Tokenizer(models.WordLevel(dict(words), unk_token="<pad>"))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    names = ["input_ids", "attention_mask"]
    return PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="<eos>", model_input_names=names, **options)


def accepts(kind: type, name: str) -> bool:
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


@functools.cache
def mentions(text: str, kind: Any = None) -> bool:
    """Whether the source of GRPOTrainer's losses has this text: what a version reads, it can be given. Of a subclass
    `kind` its own losses count too, and those that they override."""
    losses = ("compute_loss", "_compute_loss", "compute_liger_loss")
    methods = [vars(base).get(name) for base in (kind or class_named("GRPOTrainer")).__mro__ for name in losses]
    return any(text in source_of(method) for method in methods if method is not None)


@functools.cache
def output_dir() -> str:
    """The folder of this process that every config names."""
    return scratch_folder("trainer")


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Without what TRL and transformers print at every construction: warnings, logs and progress bars."""
    with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()), _without_logs(), _without_bars():
        warnings.simplefilter("ignore")
        yield


@contextlib.contextmanager
def _without_logs() -> Iterator[None]:
    """At the handlers: a logger whose level is set empties the caches of all others."""
    loggers = [logging.root, *(logging.getLogger(name) for name in ("transformers", "trl", "accelerate"))]
    handlers = [logging.lastResort, *(handler for one in loggers for handler in one.handlers)]
    levels = [(one, one.level) for one in handlers if one is not None]
    before = [(one, one.level) for one in loggers]
    for one, level in levels:
        one.level = max(level, logging.ERROR)
    try:
        yield
    finally:
        for one, level in levels:
            one.level = level
        for logger, level in before:
            if logger.level != level:  # a trainer sets that of transformers to what is in effect
                logger.setLevel(level)


@contextlib.contextmanager
def _without_bars() -> Iterator[None]:
    import datasets
    from transformers.utils import logging as hugging_face

    shown = hugging_face.is_progress_bar_enabled(), not datasets.are_progress_bars_disabled()
    before = os.environ.get("TQDM_DISABLE")
    hugging_face.disable_progress_bar()
    datasets.disable_progress_bars()
    os.environ["TQDM_DISABLE"] = "1"  # TRL's bars around precomputed log-probs
    try:
        yield
    finally:
        if os.environ.pop("TQDM_DISABLE", None) and before is not None:
            os.environ["TQDM_DISABLE"] = before
        if shown[0]:
            hugging_face.enable_progress_bar()
        if shown[1]:
            datasets.enable_progress_bars()


@contextlib.contextmanager
def environment_kept() -> Iterator[None]:
    """Older accelerate leaves settings in environment variables when a trainer is made: not the trainer's doing. Where datasets
    starts processes it leaves a copy of `os.environ` in its place."""
    kept = vars(os.environ)["_data"]  # each name and value encoded: to read all of them by it decodes each
    before = dict(kept)
    try:
        with mock.patch.object(os, "environ", os.environ):
            yield
    finally:
        if kept != before:
            for name in set(kept) - set(before):
                del os.environb[name]
            os.environb.update(before)


@contextlib.contextmanager
def collecting_little() -> Iterator[None]:
    """Within it gc.collect looks at new objects alone: accelerate's, in each run, goes through all of torch for half its time."""
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


@contextlib.contextmanager
def generators_kept() -> Iterator[None]:
    """transformers seeds every generator when a trainer is made: not the loss's doing.

    A seed reaches the CPU's alone where no GPU is in use; torch would keep it for each kind of device that may be used one day,
    every time with a stack trace that takes longer than what it seeds.
    """
    states = random.getstate(), np.random.get_state()  # noqa: NPY002 the global one is meant
    kept, cuda = (torch.manual_seed, torch.cuda.manual_seed_all), torch.cuda.is_initialized()
    if not cuda:
        torch.manual_seed, torch.cuda.manual_seed_all = torch.default_generator.manual_seed, lambda seed: None
    try:
        with torch.random.fork_rng(range(torch.cuda.device_count()) if cuda else ()):
            yield
    finally:
        torch.manual_seed, torch.cuda.manual_seed_all = kept
        random.setstate(states[0])
        np.random.set_state(states[1])  # noqa: NPY002


@contextlib.contextmanager
def looked_up_once() -> Iterator[None]:
    """Within it a package is looked for, and its metadata parsed, once a process: accelerate asks for a dozen a trainer."""
    original = importlib.metadata.metadata, importlib.util.find_spec
    if original == (_metadata.__wrapped__, _find_spec.__wrapped__):  # and nobody else has put another in its place
        importlib.metadata.metadata, importlib.util.find_spec = _metadata, _find_spec
    try:
        yield
    finally:
        importlib.metadata.metadata, importlib.util.find_spec = original


_metadata = functools.cache(importlib.metadata.metadata)
_find_spec = functools.cache(importlib.util.find_spec)
