"""Trainers of one class that share what transformers builds for each of them alike: accelerator, callbacks, collator.

Building a GRPOTrainer takes longer than the loss that it is asked for. `transformers.Trainer.__init__` therefore runs once a
process for a class and the arguments that it reads, and what it left behind is kept. TRL's own `__init__` runs for every
trainer, over a copy of that with the new model and arguments in the place of the first ones, so that nothing which TRL
derives from a config or a model is carried over. What is shared is looked at before each use: changed, it is built anew.
"""

import contextlib
import copy
import dataclasses
import functools
import importlib.metadata
import importlib.util
import random
from collections.abc import Callable, Iterator
from typing import Any

import torch

from parity.errors import HarnessError
from parity.judge.timings import within

CHECKED = 50
"""One in so many trainers that share is compared with one that is built from nothing."""

_lottery = random.Random()  # of its own: what is drawn from it must not move the generator that implementations see

Plain = bool | int | float | str | None


@dataclasses.dataclass(frozen=True)
class Base:
    """What `Trainer.__init__` left in the first trainer of a class.

    Attributes:
        left: name -> value of each attribute that it set, the dataclasses among them (state, control) as copies.
        model, args: those that the first trainer was given.
        accelerator: the state of its accelerator, which is the process's and which every new config clears.
        looks: the plain values within what is shared, as they were.
    """

    left: dict[str, Any]
    model: Any
    args: Any
    accelerator: dict[str, Any]
    looks: Any

    def as_new(self) -> bool:
        """Put the accelerator's state back; whether nothing else that is shared has changed."""
        vars(self.left["accelerator"].state).update(self.accelerator)
        return bool(self.looks == _looks_of_shared(self.left))

    def hand_to(self, trainer: Any, model: Any, args: Any) -> None:
        """Set every attribute in `trainer` as `Trainer.__init__(model, args)` would."""
        given = {id(self.model): model, id(self.args): args}
        for name, value in self.left.items():
            value = given.get(id(value), value)
            vars(trainer)[name] = copy.copy(value) if _is_record(value) and value is not args else value
        trainer.callback_handler.model = model


_BASES: dict[Any, Base] = {}


@within("phase", "building a trainer")
def build(kind: type, **given: Any) -> Any:
    """`kind(**given)`, sharing with the trainers of this class that came before; with none if it is no class of TRL's own.

    A user's subclass may keep state of its own anywhere, and an adapter changes the model's class: both are built from
    nothing.

    Raises:
        HarnessError: where construction fails that succeeds from nothing.
    """
    if not kind.__module__.startswith("trl.") or given.get("peft_config") is not None:
        return kind(**given)
    key = kind, _base_arguments(given["args"])
    base = _BASES.get(key)
    if base is None or not base.as_new():
        with _initialising(functools.partial(_kept, key)):
            return kind(**given)
    try:
        with _initialising(lambda original, trainer, model, args: base.hand_to(trainer, model, args)):
            return kind(**given)
    except Exception as error:
        kind(**given)  # as a rule it refuses too, and this is what it says
        raise HarnessError(
            f"{kind.__name__} shares a base and fails, built from nothing it does not: {error}"
        ) from error


def _kept(key: Any, original: Callable[[], None], trainer: Any, model: Any, args: Any) -> None:
    """Runs the original `Trainer.__init__` and keeps what it left."""
    before = dict(vars(trainer))
    original()
    unset = object()
    left = {n: v for n, v in vars(trainer).items() if before.get(n, unset) is not v}
    left = {n: copy.deepcopy(v) if _is_record(v) and v is not args else v for n, v in left.items()}
    state = dict(vars(trainer.accelerator.state))
    _BASES[key] = Base(left, trainer.model, args, state, _looks_of_shared(left))


@contextlib.contextmanager
def _initialising(instead: Callable[[Callable[[], None], Any, Any, Any], None]) -> Iterator[None]:
    """Within it `Trainer.__init__` is `instead(original, trainer, model, args)`."""
    from transformers import Trainer

    original = Trainer.__init__

    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        named = {**dict(zip(("model", "args"), args, strict=False)), **kwargs}
        instead(functools.partial(original, self, *args, **kwargs), self, named["model"], named["args"])

    Trainer.__init__ = init
    try:
        yield
    finally:
        Trainer.__init__ = original


def _base_arguments(args: Any) -> tuple[str, ...]:
    """The values of the fields that transformers itself reads, those of TRL's own left out."""
    return tuple(repr(getattr(args, name)) for name in _base_fields())


@functools.cache
def _base_fields() -> tuple[str, ...]:
    from transformers import TrainingArguments

    return tuple(f.name for f in dataclasses.fields(TrainingArguments))


def _is_record(value: Any) -> bool:
    return dataclasses.is_dataclass(value) and not isinstance(value, type)


def _looks_of_shared(left: dict[str, Any]) -> dict[str, Any]:
    """The plain values within what trainers share; records are copied for each, arguments and model are its own."""
    return {name: _looks(value) for name, value in left.items() if not _is_record(value)}


def _looks(value: Any, depth: int = 3) -> Any:
    """The plain values within a value, to be compared with those of another time; a model is known by being one."""
    if isinstance(value, Plain):
        return value
    if isinstance(value, torch.nn.Module) or depth == 0:
        return type(value).__name__
    if isinstance(value, list | tuple):
        return [_looks(v, depth - 1) for v in value]
    if isinstance(value, dict):
        return {k: _looks(v, depth - 1) for k, v in value.items()}
    return type(value).__name__, {k: _looks(v, depth - 1) for k, v in getattr(value, "__dict__", {}).items()}


def due() -> bool:
    """Whether this call is the random one in `CHECKED` that is compared."""
    return _lottery.randrange(CHECKED) == 0


def require_same(shared: Any, fresh: Any, found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> None:
    """Hold a trainer that shares and what it gave against one built from nothing, on the same inputs.

    Raises:
        HarnessError: naming the attributes or the outputs that are not the same to the last bit.
    """
    mine, theirs = vars(shared), vars(fresh)
    apart = [f"attribute {n}" for n in sorted(mine.keys() ^ theirs.keys())]
    apart += [f"attribute {n}" for n in sorted(mine.keys() & theirs.keys()) if not _same(mine[n], theirs[n])]
    apart += [f"output {n}" for n in sorted(found.keys() | wanted.keys()) if not _same(found.get(n), wanted.get(n))]
    if apart:
        raise HarnessError(
            f"a {type(shared).__name__} that shares a base differs from one built from nothing: {', '.join(apart[:5])}"
        )


def _same(a: Any, b: Any) -> bool:
    """Equal plain values, tensors to the last bit (a NaN is one), containers item by item; of anything else the type."""
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        return a.shape == b.shape and a.dtype == b.dtype and bool(((a == b) | (a.isnan() & b.isnan())).all())
    if isinstance(a, Plain):
        return type(a) is type(b) and (a == b or (a != a and b != b))
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(_same(a[k], b[k]) for k in a)
    if isinstance(a, list | tuple) and isinstance(b, list | tuple):
        return len(a) == len(b) and all(map(_same, a, b))
    return type(a) is type(b)


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
