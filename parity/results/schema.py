"""docs/results.md: the format of a results file, written from the structures that read and write it."""

import types
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import msgspec

from parity.results.header import About, End, Header
from parity.results.row import DECLINED, FAILING, JUDGED, STOPPED, Row

HEAD = """# The results file

Written by `parity schema > docs/results.md`.

`parity run` writes `reports/results.ndjson` as it goes: one JSON object a line, null for NaN and infinity. `parity report FILE`
reads files of older releases too: a missing field is null or empty, an unknown one ignored, another `schema` refused. Fields
are texts, or of the type in brackets.
"""


def page() -> str:
    sets = {"judged": JUDGED, "stopped": STOPPED, "declined": DECLINED}
    parts = [
        HEAD,
        "## The first row\n",
        _fields(Header, leave_out=("end", "interrupted", "parts")),
        "Its `header` holds, as far as it is known:\n",
        _fields(About, leave_out=("seconds", "asked", "plan")),
        "## The last row\n",
        "Its `end` says how the run ended; a killed run leaves none. `part`: a shard is done.\n",
        _fields(End),
        "## Every other row: one quantity of one implementation on one case\n",
        _fields(Row),
        "## Verdicts\n",
        *(f"- {name}: {', '.join(verdicts)}" for name, verdicts in sets.items()),
        f"\nFailing: {', '.join(FAILING)}.",
        "",
    ]
    return "\n".join(parts)


def _fields(kind: type[msgspec.Struct], leave_out: tuple[str, ...] = ()) -> str:
    hints = get_type_hints(kind, include_extras=True)
    lines = []
    for field in msgspec.structs.fields(kind):
        if field.name in leave_out:
            continue
        hint = hints[field.name]
        meta = [m.description for m in getattr(hint, "__metadata__", ()) if isinstance(m, msgspec.Meta)]
        name = _type(hint.__origin__ if meta else hint)
        text = meta[0] if meta else "below"
        always = field.default is field.default_factory is msgspec.NODEFAULT
        notes = [note for note in ("" if name == "text" else name, "always" if always else "") if note]
        brackets = f" ({', '.join(notes)})" if notes else ""
        lines.append(f"- `{field.encode_name}`{brackets}: {text}")
    return "\n".join([*lines, ""])


def _type(hint: Any) -> str:
    """A type as JSON has it."""
    origin, args = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        return " or ".join(_type(a) for a in args if a not in (type(None), msgspec.UnsetType))
    if origin is Literal:
        return " or ".join(args) if len(args) <= 4 else "a verdict"
    if origin is list:
        return "list"
    if origin is dict or (isinstance(hint, type) and issubclass(hint, msgspec.Struct)):
        return "object"
    return {str: "text", int: "integer", float: "number", bool: "true or false"}[hint]
