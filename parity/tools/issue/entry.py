"""An entry of the ledger that has a script by hand, as it is sent: title, reason, numbers, script, patch, versions."""

import dataclasses

from parity.errors import UsageError
from parity.results.ledger import Entry, Ledger
from parity.tools.issue import patch, written
from parity.tools.issue.ran import Ran, ran
from parity.tools.issue.text import first_sentence, numbers, versions

SHOWS, GONE = 1, 0
"""Exit codes of a script: the defect shows, it is gone."""


@dataclasses.dataclass(frozen=True)
class Shown:
    """What became of an entry's script in a fresh process.

    Attributes:
        done: with the installed libraries; None where some of them (`lacks`) are not installed.
        diff: what mends the released files; empty where no patch is known, or where the defect is not there.
        mended: the script with the diff applied to a copy.
        misfit: why the known patch cannot be applied: this is another release.
    """

    entry: Entry
    code: str
    lacks: tuple[str, ...] = ()
    done: Ran | None = None
    diff: str = ""
    mended: Ran | None = None
    misfit: str = ""

    @property
    def wanted(self) -> int:
        """The exit code that is right: the installed release has the defect, or it is one that cannot have it."""
        return SHOWS if self.entry.in_force() else GONE

    @property
    def right(self) -> bool:
        """Whether the script shows what it must, and nothing more once the libraries are mended."""
        ended = self.done is None or self.done.code == self.wanted
        return ended and (self.mended is None or self.mended.code == GONE)

    @property
    def outcome(self) -> str:
        """In a line, what came out."""
        if self.done is None:
            return f"not run: {', '.join(self.lacks)} not installed: {written.install(self.lacks)}"
        last = ([line for line in self.done.output.splitlines() if line] or self.done.error.strip().splitlines())[-1:]
        said = {SHOWS: "shows", GONE: "is gone"}.get(self.done.code, "script fails")
        with_patch = f"; no patch: {self.misfit}" if self.misfit else ""
        with_patch = with_patch if self.mended is None else f"; with the patch: exit {self.mended.code}"
        return f"{said}: {''.join(last)}{with_patch}"


def shown(entry: Entry, ledger: Ledger) -> Shown | None:
    """Run an entry's script, and run it again with the patch if there is one; None where it has no script.

    A finding that is part of another shares its script, unless it has its own.
    """
    name = source(entry, ledger)
    code = written.script(ledger.folder, name)
    if code is None:
        return None
    lacks = tuple(written.missing(code))
    if lacks:
        return Shown(entry, code, lacks)
    done, edits = ran(code), patch.edits(ledger.folder, name)
    if done.code != SHOWS or not edits:
        return Shown(entry, code, done=done)
    try:
        files = patch.patched(edits)
    except UsageError as error:
        return Shown(entry, code, done=done, misfit=str(error))
    with patch.applied(files) as folder:
        return Shown(entry, code, (), done, patch.diff(files), ran(code, first=folder))


def source(entry: Entry, ledger: Ledger) -> str:
    """The entry whose script and patch are this one's: itself, or the whole that it is part of."""
    has_script = (ledger.folder / "scripts" / f"{entry.id}.py").exists()
    return entry.id if has_script or not entry.user.part_of else entry.user.part_of


def text(found: Shown, ledger: Ledger) -> str:
    """What one pastes upstream, in Markdown."""
    entry = found.entry
    gives = f"Not run on this machine: {', '.join(found.lacks)} not installed."
    if found.done is not None:
        gives = numbers(found.done.output)
    parts = [
        f"# {title(entry, ledger)}",
        entry.reason,
        f"## What it gives\n\n{gives}",
        f"## Script\n\nExits with 1 while this is so, with 0 once it is mended.\n\n```python\n{found.code}```",
        f"## Patch\n\nWith it the script exits with 0.\n\n```diff\n{found.diff}```" if found.diff else "",
        f"## Code\n\n{entry.link}" if entry.link else "",
        versions(written.modules(found.code)),
    ]
    return "\n\n".join(p for p in parts if p) + "\n"


def title(entry: Entry, ledger: Ledger) -> str:
    """`library version: setting: effect`, in the user's terms."""
    user = entry.user
    if user.part_of:
        user = next(e.user for e in ledger.entries if e.id == user.part_of)
    effect = first_sentence(user.effect)
    return f"{entry.link.partition(':')[0]}: {user.when}: {effect[:1].lower()}{effect[1:]}".rstrip(".")
