"""How the last night stands, as a file for others to see. What it did is in its run's results file and in the history."""

from __future__ import annotations

import contextlib
import datetime
import fcntl
import time
from collections.abc import Collection
from pathlib import Path

import msgspec
from msgspec import field

from parity.decoding import decode, save_json, text_of
from parity.errors import UsageError

FILE, LOCK = "night.json", "night.lock"


class Journal(msgspec.Struct, kw_only=True):
    """A night. `began`: seconds since the epoch, later by the time between a kill and going on; `blind`: the proofs of life that
    failed; `kept`: the id of its long run, once that has ended and is in the history."""

    profile: str
    began: float
    blind: list[str] = field(default_factory=list)
    kept: str = ""
    exit_code: int | None = None

    @property
    def spent(self) -> float:
        """Seconds that it has had."""
        return time.time() - self.began

    def save(self, reports: Path) -> None:
        save_json(reports / FILE, self)

    def end(self, reports: Path, exit_code: int) -> int:
        """Keep it with its exit code, which is given back."""
        self.exit_code = exit_code
        self.save(reports)
        return exit_code

    @classmethod
    def read(cls, reports: Path) -> Journal:
        """The night that was written last. Raises UsageError where there is none, or none that can be read."""
        path = reports / FILE
        found: Journal = decode(cls, text_of(path, "night"), str(path))
        return found

    @classmethod
    def again(cls, reports: Path) -> Journal:
        """The night that was killed. Raises UsageError where it came to its end, or had not begun its long run."""
        found, path = cls.read(reports), reports / FILE
        if found.exit_code is not None:
            raise UsageError(f"{path}: that night has ended, with exit code {found.exit_code}: start a new one")
        results = reports / "results.ndjson"
        if not results.exists() or (written := results.stat().st_mtime) < found.began:
            raise UsageError(f"{path}: that night was killed before its long run: start a new one")
        found.began += time.time() - max(written, path.stat().st_mtime)
        return found


def under_way(reports: Path) -> bool:
    """Whether a night writes into this folder."""
    with contextlib.suppress(FileNotFoundError), open(reports / LOCK) as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return True
    return False


def standing(reports: Path, profile: str, kept: Collection[str]) -> tuple[str, str]:
    """Of the last night, with `kept` the ids of the runs in the history: the id of its run where it is under way, its verdict not
    there yet; and why it is as bad as none at all, or nothing. A night of another profile tells nothing."""
    if not (reports / FILE).exists():
        return "", ""
    try:
        night = Journal.read(reports)
    except UsageError as error:
        return "", str(error)
    if night.profile != profile:
        return "", ""
    which = f"the night of {datetime.datetime.fromtimestamp(night.began, datetime.UTC):%Y-%m-%d %H:%M} UTC"
    if night.exit_code is None and under_way(reports):
        return night.kept, ""
    if night.kept:
        lost = f"{which} ended, and its file in {reports / 'history'} is not there or unreadable"
        return "", "" if night.kept in kept else lost
    if night.exit_code is None:
        return "", f"{which} died, or was stopped, in its long run or before"
    return "", f"{which} ended with {night.exit_code}: {'; '.join(night.blind) or 'nothing compared'}"
