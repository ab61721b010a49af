"""The files of a watched run: `watch.ndjson`, a line for each look, and beside it a page of all findings."""

import dataclasses
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any


@dataclasses.dataclass(frozen=True)
class Finding:
    """One difference that noise does not explain."""

    what: str  # "trainer", "sampler", "old", "reference", "gradient" or "loss"
    units: float  # rms of the difference in units of the noise; NaN where it has none
    causes: tuple[str, ...]  # those that explain it down to noise; empty where none of the known ones does
    text: str  # one line
    tokens: tuple[Mapping[str, Any], ...] = ()  # those that differ most
    # units of each token as signs of `parity.results.row.TOKENS`, a text for each sequence
    strips: tuple[str, ...] = ()


def write(to: Path, looked: Sequence[Mapping[str, Any]], findings: Sequence[Finding], fresh: Sequence[Finding]) -> None:
    """Adds the last of the looks with its `fresh` findings to `to`; the page has all of them, and needs jinja2 and rich.
    Raises OSError where a file cannot be written."""
    line = {**looked[-1], "findings": [dataclasses.asdict(f) for f in fresh]}
    to.parent.mkdir(parents=True, exist_ok=True)
    with to.open("a") as file:
        file.write(json.dumps(_finite(line), allow_nan=False) + "\n")
    if fresh:
        try:
            from parity.results.report.render import filled
        except ImportError:  # a training run needs not have them
            return
        to.with_suffix(".html").write_text(filled("watch.html.j2", findings=findings, looked=looked), "utf-8")


def strips(units: Any, dimmed: Any) -> list[str]:
    """Units (B, T) as signs of `parity.results.row.TOKENS`, a text for each sequence; `dimmed`: which are out of the loss."""
    try:
        from parity.results.row import token_signs
    except ImportError:
        return []
    return token_signs(units.nan_to_num(0.0), dimmed)


def _finite(x: Any) -> Any:
    """As JSON has it: null for a number that is not finite."""
    if isinstance(x, Mapping):
        return {name: _finite(value) for name, value in x.items()}
    if isinstance(x, list | tuple):
        return [_finite(value) for value in x]
    return None if isinstance(x, float) and not math.isfinite(x) else x
