"""The files of a watched run: `watch.ndjson`, a line for each look, and beside it a page of all findings."""

import dataclasses
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

TOKENS = "0123456789abcdefghij"
"""The error of a token as a sign: 9 the largest or not finite, each less half as large, 0 none; letters: a masked token."""


def token_signs(error: Any, masked: Any) -> list[str]:
    """Errors of tokens, a tensor (B, T), and which are masked, as a text of `TOKENS` for each sequence."""
    top = error[error.isfinite()].amax() if bool(error.isfinite().any()) else error.new_tensor(1.0)
    level = (error / top).log2().ceil().add(9).clamp(1, 9).where(error > 0, 0.0)
    sign = level.where(error.isfinite(), 9.0).int() + 10 * masked
    return ["".join(TOKENS[n] for n in line) for line in sign.tolist()]


def levels(texts: Sequence[str]) -> list[list[tuple[int, bool]]]:
    """(level 0 to 9, masked) of each token of sequences as texts of `TOKENS`."""
    known = {sign: (n % 10, n > 9) for n, sign in enumerate(TOKENS)}
    return [[known.get(sign, (9, False)) for sign in line] for line in texts]


@dataclasses.dataclass(frozen=True)
class Finding:
    """One difference that noise does not explain."""

    what: str  # "trainer", "sampler", "old", "reference", "gradient", "loss" or "update"
    units: float  # rms of the difference in units of the noise; NaN where it has none
    causes: tuple[str, ...]  # those that explain it down to noise; empty where none of the known ones does
    text: str  # one line
    tokens: tuple[Mapping[str, Any], ...] = ()  # those that differ most
    # units of each token as signs of `TOKENS`, a text for each sequence
    strips: tuple[str, ...] = ()


def write(to: Path, looked: Sequence[Mapping[str, Any]], findings: Sequence[Finding], fresh: Sequence[Finding]) -> None:
    """Adds the last of the looks with its `fresh` findings to `to`; the page has all of them, and needs jinja2 and rich.
    Raises OSError where a file cannot be written."""
    line = json.dumps({**looked[-1], "findings": [dataclasses.asdict(f) for f in fresh]})
    to.parent.mkdir(parents=True, exist_ok=True)
    with to.open("a") as file:  # null for a number that is not finite
        file.write(json.dumps(json.loads(line, parse_constant=lambda name: None)) + "\n")
    if fresh:
        try:
            from parity.results.report.render import filled
        except ImportError:  # a training run needs not have them
            return
        to.with_suffix(".html").write_text(filled("watch.html.j2", findings=findings, looked=looked), "utf-8")
