"""`parity upstream`: each entry of the ledger as a folder that a person can send: script, text with its numbers, patch."""

import dataclasses
import re
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

from parity.decoding import write
from parity.errors import UsageError
from parity.results.ledger import Entry, Ledger
from parity.tools import issue
from parity.tools.issue import Ran, numbers, ran, report, versions

SHOWS, GONE = 1, 0  # exit codes of a script: the defect shows, it is gone


@dataclasses.dataclass(frozen=True)
class Shown:
    """What became of an entry's script in a fresh process."""

    entry: Entry
    code: str = ""
    done: Ran | None = None  # with the installed libraries; None where it was not run
    diff: str = ""  # what mends the released files; empty where no patch is known, or where the defect is not there
    mended: Ran | None = None  # the script with the diff applied to a copy
    why: str = ""  # why there is no script, it was not run, or the known patch does not fit this release

    @property
    def right(self) -> bool:
        """Whether the script shows what it must, here or where it can run, and nothing more once the libraries are mended."""
        wanted = SHOWS if self.entry.in_force() else GONE  # a release that cannot have it has it not
        ended = self.done is None or self.done.returncode == wanted
        return bool(self.code) and ended and (self.mended is None or self.mended.returncode == GONE)

    @property
    def outcome(self) -> str:
        if self.done is None:
            return self.why
        last = ([line for line in self.done.stdout.splitlines() if line] or self.done.stderr.strip().splitlines())[-1:]
        said = {SHOWS: "shows", GONE: "is gone"}.get(self.done.returncode, "script fails")
        with_patch = self.mended and f"with the patch: exit {self.mended.returncode}"
        patch = f"; {with_patch or self.why}" if with_patch or self.why else ""
        return f"{said}: {''.join(last)}{patch}"


def shown(entry: Entry, ledger: Ledger) -> Shown:
    """Run an entry's script, and run it again with the patch if there is one."""
    name = source(entry, ledger)
    code = issue.script(ledger.folder, name)
    if code is None:
        return Shown(entry, why="has no script")
    if lacks := issue.missing(code):
        return Shown(entry, code, why=f"not run: {', '.join(lacks)} not installed")
    done, wanted = ran(code), issue.edits(ledger.folder, name)
    if done.returncode != SHOWS or not wanted:
        return Shown(entry, code, done)
    try:
        files = issue.patched(wanted)
    except UsageError as error:
        return Shown(entry, code, done, why=f"no patch: {error}")
    with issue.applied(files) as folder:
        return Shown(entry, code, done, issue.diff(files), ran(code, first=folder))


def source(entry: Entry, ledger: Ledger) -> str:
    """The entry whose script and patch are this one's: itself, or the whole that it is part of."""
    has_script = (ledger.folder / "scripts" / f"{entry.id}.py").exists()
    return entry.id if has_script or not entry.user.part_of else entry.user.part_of


def text(found: Shown, ledger: Ledger) -> str:
    """What one pastes upstream, in Markdown."""
    entry, gives = found.entry, numbers(found.done.stdout) if found.done else found.why
    about = versions(issue.modules(found.code))
    return report(title(entry, ledger), entry.reason, gives, found.code, found.diff, entry.link, about)


def title(entry: Entry, ledger: Ledger) -> str:
    """`library version: setting: effect`, in the user's terms."""
    user = entry.user
    if user.part_of:
        user = next(e.user for e in ledger.entries if e.id == user.part_of)
    effect = re.split(r"(?<=[.!])\s+(?=[A-Z])", user.effect, maxsplit=1)[0].rstrip(".")
    return f"{entry.link.partition(':')[0]}: {user.when}: {effect[:1].lower()}{effect[1:]}"


def upstream(ids: Sequence[str], ledger_file: Path, folder: Path, workers: int) -> Iterator[Shown]:
    """Write the folders of some entries, all if none is named, by so many workers. Raises UsageError for an unknown id."""
    ledger = Ledger.load(ledger_file)
    known = {e.id: e for e in ledger.entries}
    if odd := [name for name in ids if name not in known]:
        raise UsageError(f"entry {odd[0]!r} is unknown, choose from {', '.join(known)}")
    with ThreadPoolExecutor(workers) as pool:  # the scripts are processes
        tasks = [pool.submit(sent, known[name], ledger, folder) for name in ids or known]
        yield from (task.result() for task in as_completed(tasks))


def sent(entry: Entry, ledger: Ledger, folder: Path) -> Shown:
    """Write one entry's folder: script.py, issue.md, and patch.diff where a patch is known."""
    found = shown(entry, ledger)
    if found.code:
        files = {"script.py": found.code, "issue.md": text(found, ledger), "patch.diff": found.diff}
        for name, content in files.items():
            if content:
                write(folder / entry.id / name, content)
    return found
