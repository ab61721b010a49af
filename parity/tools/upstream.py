"""`parity upstream`: each entry of the ledger as a folder that a person can send: script, text, patch."""

import concurrent.futures
import dataclasses
import multiprocessing
from collections.abc import Iterator, Sequence
from pathlib import Path

from parity.decoding import save_json, write
from parity.errors import UsageError
from parity.process import prepare
from parity.results.ledger import Entry, Ledger
from parity.tools.issue.entry import shown, text


@dataclasses.dataclass(frozen=True)
class Sent:
    """What became of an entry, in a line, whether it is right, and whether its script ran."""

    id: str
    right: bool
    outcome: str
    ran: bool = True


def entries(ledger: Ledger, ids: Sequence[str]) -> list[Entry]:
    """The entries called for, all if none is named.

    Raises:
        UsageError: for an id that does not exist.
    """
    known = {e.id: e for e in ledger.entries}
    for name in ids:
        if name not in known:
            raise UsageError(f"entry {name!r} is unknown, choose from {', '.join(known)}")
    return [known[name] for name in ids or known]


def written(entry: Entry, ledger: Ledger, folder: Path) -> Sent:
    """Write one entry's folder: script.py, issue.md, result.json, and patch.diff where a patch is known."""
    found = shown(entry, ledger)
    if found is None:
        return Sent(entry.id, False, "has no script", ran=False)
    place = folder / entry.id
    write(place / "script.py", found.code)
    write(place / "issue.md", text(found, ledger))
    if found.diff:
        write(place / "patch.diff", found.diff)
    codes = {name: None if r is None else r.code for name, r in (("exit", found.done), ("mended", found.mended))}
    save_json(place / "result.json", codes | {"told": found.outcome})
    return Sent(entry.id, found.right, found.outcome, found.done is not None)


def _task(id: str, ledger_file: Path, folder: Path) -> Sent:
    prepare("cpu", 1)
    ledger = Ledger.load(ledger_file)
    try:
        return written(entries(ledger, [id])[0], ledger, folder)
    except Exception as error:  # one entry that cannot be written leaves the others theirs; it counts as a failure
        return Sent(id, False, f"{type(error).__name__}: {error}")


def upstream(ids: Sequence[str], ledger_file: Path, folder: Path, workers: int) -> Iterator[Sent]:
    """Write the folders of some entries, all if none is named, as many at a time as there are workers."""
    wanted = [e.id for e in entries(Ledger.load(ledger_file), ids)]
    # No max_tasks_per_child: with it the pool of Python 3.11 stops for good once its first processes have had their share.
    with concurrent.futures.ProcessPoolExecutor(workers, multiprocessing.get_context("spawn")) as pool:
        tasks = [pool.submit(_task, id, ledger_file, folder) for id in wanted]
        yield from (task.result() for task in concurrent.futures.as_completed(tasks))
