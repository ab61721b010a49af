"""Values that the installed config class of a run's trainer does not take: of another type, or no known choice."""

import dataclasses
import json
import re
from typing import Any, NoReturn

from parity.errors import Unsupported, UsageError
from parity.tools.advice.settings import Run, Unknown
from parity.upstream import trl


def refuse(run: Run) -> None:
    """Refuse a value that none of the trainers that may run takes.

    Raises:
        UsageError: naming the setting, its value, and what it takes.
    """
    refusals = []
    for trainer in run.trainers:
        try:
            config = trl.class_named(trainer.removesuffix("Trainer") + "Config")
        except Unsupported:
            return
        said = next(filter(None, (_wrong(config, name, value) for name, value in run.args.items())), None)
        if said is None:
            return
        refusals.append(f"{run.name}: {said}")
    if refusals:
        raise UsageError(refusals[0])


def _wrong(config: type, name: str, value: Any) -> str | None:
    """What is wrong with a value, as transformers' own parser of command lines says it; None where nothing is."""
    from transformers import HfArgumentParser

    class Parser(HfArgumentParser):
        def error(self, message: str) -> NoReturn:
            raise ValueError(re.sub(r"^argument \S+: ", "", message))

    field = {f.name: f for f in dataclasses.fields(config)}.get(name)
    if field is None or value in (None, [], {}) or isinstance(value, Unknown):
        return None
    given = value if isinstance(value, list | tuple) else [value]
    words = [json.dumps(v) if isinstance(v, dict) else str(v) for v in given]
    one = dataclasses.make_dataclass("One", [(name, field.type, field)])
    if isinstance(value, list | tuple) and "list" not in str(field.type).lower():
        return f"{name}: it takes one value, and no list"
    try:
        for word in words:
            Parser(one).parse_args([f"--{name}={word}"])
    except ValueError as error:
        return f"{name}: {error}"
    known = _choices(config, field)
    odd = [word for word in ",".join(words).split(",") if known and word.strip() not in known]
    return f"{name}: invalid choice: {odd[0]!r} (choose from {', '.join(sorted(known))})" if odd else None


def _choices(config: type, field: dataclasses.Field[Any]) -> set[str]:
    """The choices of a setting of TRL's that its help alone lists: the words in quotes, if its default is one of them."""
    from transformers import TrainingArguments

    if field.metadata.get("choices") or field.type not in (str, list[str], "str", "list[str]"):
        return set()
    default = field.default_factory() if field.default_factory is not dataclasses.MISSING else field.default
    words = set(re.findall(r"[`'\"]+(\w+)[`'\"]+", field.metadata.get("help") or ""))
    words -= {f.name for f in dataclasses.fields(config)}
    common = {f.name for f in dataclasses.fields(TrainingArguments)}
    listed = default if isinstance(default, list) else [default]
    return words if field.name not in common and listed and set(listed) <= words else set()
