"""`parity upstream`: each entry of the ledger as a folder that a person can send: script, text with its numbers, patch."""

import dataclasses
import re
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

from parity.decoding import save_json, write
from parity.errors import UsageError
from parity.results.ledger import Entry, Ledger
from parity.tools.issue import edits, written
from parity.tools.issue.ran import Ran, ran
from parity.tools.issue.text import numbers, versions

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
        if not self.code:
            return False
        ended = self.done is None or self.done.code == self.wanted
        return ended and (self.mended is None or self.mended.code == GONE)

    @property
    def outcome(self) -> str:
        """In a line, what came out."""
        if not self.code:
            return "has no script"
        if self.done is None:
            return f"not run: {', '.join(self.lacks)} not installed: {written.install(self.lacks)}"
        last = ([line for line in self.done.output.splitlines() if line] or self.done.error.strip().splitlines())[-1:]
        said = {SHOWS: "shows", GONE: "is gone"}.get(self.done.code, "script fails")
        with_patch = f"; no patch: {self.misfit}" if self.misfit else ""
        with_patch = with_patch if self.mended is None else f"; with the patch: exit {self.mended.code}"
        return f"{said}: {''.join(last)}{with_patch}"


def shown(entry: Entry, ledger: Ledger) -> Shown:
    """Run an entry's script, and run it again with the patch if there is one.

    A finding that is part of another shares its script, unless it has its own.
    """
    name = source(entry, ledger)
    code = written.script(ledger.folder, name)
    if code is None:
        return Shown(entry, "")
    lacks = tuple(written.missing(code))
    if lacks:
        return Shown(entry, code, lacks)
    done, wanted = ran(code), edits.edits(ledger.folder, name)
    if done.code != SHOWS or not wanted:
        return Shown(entry, code, done=done)
    try:
        files = edits.patched(wanted)
    except UsageError as error:
        return Shown(entry, code, done=done, misfit=str(error))
    with edits.applied(files) as folder:
        return Shown(entry, code, (), done, edits.diff(files), ran(code, first=folder))


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
    effect = re.split(r"(?<=[.!])\s+(?=[A-Z])", user.effect, maxsplit=1)[0].rstrip(".")
    return f"{entry.link.partition(':')[0]}: {user.when}: {effect[:1].lower()}{effect[1:]}"


def upstream(ids: Sequence[str], ledger_file: Path, folder: Path, workers: int) -> Iterator[Shown]:
    """Write the folders of some entries, all if none is named, as many at a time as there are workers.

    Raises:
        UsageError: for an id that does not exist.
    """
    ledger = Ledger.load(ledger_file)
    known = {e.id: e for e in ledger.entries}
    if odd := [name for name in ids if name not in known]:
        raise UsageError(f"entry {odd[0]!r} is unknown, choose from {', '.join(known)}")
    with ThreadPoolExecutor(workers) as pool:  # the scripts are processes
        tasks = [pool.submit(sent, known[name], ledger, folder) for name in ids or known]
        yield from (task.result() for task in as_completed(tasks))


def sent(entry: Entry, ledger: Ledger, folder: Path) -> Shown:
    """Write one entry's folder: script.py, issue.md, result.json, and patch.diff where a patch is known."""
    found, place = shown(entry, ledger), folder / entry.id
    if found.code:
        write(place / "script.py", found.code)
        write(place / "issue.md", text(found, ledger))
        codes = {name: r and r.code for name, r in (("exit", found.done), ("mended", found.mended))}
        save_json(place / "result.json", codes | {"told": found.outcome})
    if found.diff:
        write(place / "patch.diff", found.diff)
    return found
