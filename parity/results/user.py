"""What a finding means to somebody who trains: the `[finding.user]` table of a ledger entry."""

from typing import Any, Literal

import msgspec

Severity = Literal["high", "medium", "low", "convention"]
SEVERITIES: dict[Severity, str] = {
    "high": "default or common settings",
    "medium": "settings that recipes of today use, or a crash, or logs alone",
    "low": "extremes",
    "convention": "a choice of the library, not counted as a defect",
}
"""By what a recipe of today meets, most severe first."""


class ForUser(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A finding in the terms of a user of the library. An entry that is `part_of` another has no line of its own.

    `applies` lists alternatives, each a table of settings of a training run: "trainer" and "loss_type" take lists of
    names, "model", "imports" and "uses" lists of words of which one must occur, the name of a library a version
    specifier, numbers a table with `min`, `max` or `not`; all of a table must hold. What no setting shows is in
    `only_if`. `rank` orders the lines, `since` is the release that brought it, where that was bisected or read.
    """

    part_of: str = ""
    when: str = ""
    effect: str = ""
    fix: str = ""
    since: str = ""
    only_if: str = ""
    rank: int = 99
    applies: tuple[dict[str, Any], ...] = ()
