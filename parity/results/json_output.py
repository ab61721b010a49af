"""What `--json` prints: one object of these structures and nothing else on standard output; `parity schema --json` lists them."""

import math
from collections.abc import Sequence
from typing import Annotated, Any, TypeVar

import msgspec

from parity.results.report.findings import Finding
from parity.results.report.outcomes import headroom
from parity.results.report.summary import Line, Summary
from parity.results.row import described, finite

Out = TypeVar("Out", bound=msgspec.Struct)


class FindingOut(msgspec.Struct, kw_only=True, rename={"cls": "class"}):
    """Cases in which an implementation fails in the same quantities."""

    implementation: Annotated[str, described("its id")]
    family: Annotated[str, described("family of losses, or the trainer")]
    verdict: Annotated[str, described("disagree, nondeterministic, crashed, timed-out or out-of-memory")]
    cls: Annotated[str | None, described("logic or precision")]
    blame: Annotated[str | None, described("candidate, reference, both, harness; null: not decided")]
    quantities: Annotated[list[str], described("in which it starts")]
    gate: Annotated[str | None, described("the tightest gate of the case shown")]
    headroom: Annotated[float | None, described("the worst of all cases; null: without a finite size")]
    cases: Annotated[int, described("in how many")]
    dtypes: Annotated[list[str], described("in which")]
    known: Annotated[str | None, described("its ledger entry; null: new")]
    case: Annotated[str, described("the smallest case")]
    message: Annotated[str, described("what differs")]
    replay: Annotated[str, described("the command that shows it again")]


class CellOut(msgspec.Struct, kw_only=True):
    """An implementation in a dtype on a device."""

    implementation: Annotated[str, described("its id")]
    family: Annotated[str, described("its family")]
    dtype: Annotated[str, described("of the parameters under test")]
    device: Annotated[str, described("cpu or cuda")]
    compared: Annotated[int, described("implementation-cases")]
    verdict: Annotated[str, described("over all of them")]
    headroom: Annotated[float | None, described("the worst, known findings left out where anything else was judged")]
    at: Annotated[str | None, described("its quantity")]
    known: Annotated[list[str], described("ledger entries of what it fails")]
    reason: Annotated[str, described("the commonest reason for what was not compared")]


class RunOut(msgspec.Struct, kw_only=True):
    """`parity run --json`, `parity report --json`."""

    run: Annotated[str, described("id of the run")]
    exit_code: Annotated[int, described("of the command")]
    reasons: Annotated[list[str], described("why it is not 0")]
    incomplete: Annotated[str, described("how far a run came that did not finish; empty for one that did")]
    compared: Annotated[dict[str, int], described("device -> implementation-cases")]
    new: Annotated[list[FindingOut], described("findings that no ledger entry covers")]
    known: Annotated[list[FindingOut], described("findings that the ledger has")]
    matrix: Annotated[list[CellOut], described("every implementation, dtype and device")]


class ImplementationOut(msgspec.Struct, kw_only=True):
    """`parity list --json` prints a list of these."""

    id: Annotated[str, described("its id")]
    family: Annotated[str, described("its family")]
    role: Annotated[str, described("reference or candidate")]
    library: Annotated[str | None, described("the package")]
    version: Annotated[str | None, described("as installed")]
    missing: Annotated[str | None, described("why it cannot run here; null: it can")]
    opt_in: Annotated[bool, described("runs only where it is named")]
    interpreted: Annotated[bool, described("a Triton kernel: without CUDA in Triton's interpreter")]
    contexts: Annotated[list[str], described("plain, autocast, compile, checkpoint")]


class SettingOut(msgspec.Struct, kw_only=True):
    """`parity list --settings FAMILY --json` prints a list of these."""

    name: Annotated[str, described("its name")]
    default: Annotated[Any, described("its default")]
    values: Annotated[list[Any] | None, described("those it may take; null: see its meaning")]
    meaning: Annotated[str, described("what it is")]


class CheckOut(msgspec.Struct, kw_only=True):
    """`parity list --checks TRAINER --json` prints a list of these."""

    name: Annotated[str, described("its name")]
    run_as: Annotated[list[str], described("released, fused, fixed")]
    cases: Annotated[dict[str, int], described("profile -> how many")]
    settings: Annotated[list[str], described("its settings")]
    meaning: Annotated[str, described("what it checks")]


class ProfileOut(msgspec.Struct, kw_only=True):
    """`parity list --profiles --json` prints a list of these."""

    name: Annotated[str, described("its name")]
    fixed_seed: Annotated[bool, described("the same cases every time")]
    cases: Annotated[dict[str, int], described("loss family -> cases drawn")]


class CoveredOut(msgspec.Struct, kw_only=True):
    """`parity list --coverage RESULTS --json` prints a list of these, what was never judged first."""

    of: Annotated[str, described("implementation, or family of a trainer")]
    kind: Annotated[str, described("setting; config: a field of the trainer's config; logged: a key that it logs")]
    name: Annotated[str, described("its name")]
    judged: Annotated[int, described("cases compared with it away from its default; of a logged key, that judged it")]
    declined: Annotated[int, described("cases with it that were not compared")]
    why: Annotated[str, described("why never")] = ""


class DoctorOut(msgspec.Struct, kw_only=True):
    """`parity doctor --json`."""

    versions: Annotated[dict[str, str], described("installed packages")]
    device: Annotated[str, described("cpu or cuda")]
    device_text: Annotated[str, described("what it is")]
    problems: Annotated[list[str], described("why a GPU that is there cannot be used, or what runs wrong on it")]
    compiler: Annotated[str | None, described("the C++ compiler; null: torch.compile paths crash")]
    ready: Annotated[list[str], described("implementations that can run")]
    interpreted: Annotated[list[str], described("those of them that run in Triton's interpreter here")]
    blocked: Annotated[dict[str, list[str]], described("reason -> implementations that cannot run")]
    rollouts: Annotated[list[str], described("recordings")]
    engine: Annotated[str | None, described("the installed vLLM")]
    tools: Annotated[dict[str, bool], described("uv, git: whether it is there")]


class EnvironmentOut(msgspec.Struct, kw_only=True):
    """`parity env list --json` prints a list of these."""

    name: Annotated[str, described("its name")]
    bytes: Annotated[int, described("that removing it frees")]
    before: Annotated[str | None, described("date: nothing newer is in it")]
    versions: Annotated[dict[str, str], described("its packages")]
    broken: Annotated[dict[str, str], described("package -> why it does not import")]


class MovedOut(msgspec.Struct, kw_only=True):
    """A quantity that differs between two releases."""

    case: Annotated[str, described("name of the frozen case")]
    implementation: Annotated[str, described("its id")]
    quantity: Annotated[str | None, described("null: a side did not judge")]
    mark: Annotated[str, described("+ worse, - better, ~ otherwise moved")]
    nearer: Annotated[str, described("before or after: nearer to the definition; empty: cannot be said")]
    before: Annotated[str | None, described("verdict")]
    after: Annotated[str | None, described("verdict")]
    headroom_before: Annotated[float | None, described("null: none, or without a finite size")]
    headroom_after: Annotated[float | None, described("the same")]


class CompareOut(msgspec.Struct, kw_only=True):
    """`parity compare --json`."""

    before: Annotated[dict[str, str], described("versions of the first environment")]
    after: Annotated[dict[str, str], described("versions of the second")]
    cases: Annotated[int, described("frozen cases")]
    judged: Annotated[list[int], described("quantities judged in each")]
    moved: Annotated[list[MovedOut], described("what differs")]
    notes: Annotated[list[str], described("sampled tokens, settings that came, went or changed their default")]
    exit_code: Annotated[int, described("of the command")]


class BisectOut(msgspec.Struct, kw_only=True):
    """`parity bisect --json`."""

    outcome: Annotated[str, described("found, alike, swapped, unjudged or unstable")]
    low: Annotated[str, described("the last release that answers like the older end")]
    high: Annotated[str, described("the first that answers like the newer one")]
    between: Annotated[list[str], described("releases that could not be judged")]
    by: Annotated[str, described("what decided: verdict or headroom")]
    moved: Annotated[dict[str, list[str]], described("package -> its versions in the two")]
    cause: Annotated[list[str], described("packages of which each alone shows the change")]
    measured: Annotated[list[dict[str, Any]], described("release, verdict and headroom of every measurement, in order")]
    exit_code: Annotated[int, described("of the command")]


EVERY = (
    *(RunOut, FindingOut, CellOut, ImplementationOut, SettingOut, CheckOut, ProfileOut, CoveredOut),
    *(DoctorOut, EnvironmentOut, CompareOut, MovedOut, BisectOut),
)


def text(value: Any) -> str:
    """The JSON of a structure or of a list of them, indented."""
    return msgspec.json.format(msgspec.json.encode(value), indent=1).decode()


def filled(kind: type[Out], source: Any, **fields: Any) -> Out:
    """A structure with these fields, and the others from attributes of the same name."""
    return kind(**{name: fields[name] if name in fields else getattr(source, name) for name in kind.__struct_fields__})


def of_run(summary: Summary, code: int, reasons: Sequence[str]) -> RunOut:
    """A run as its reports show it."""
    new, known = ([_finding(f) for f in found] for found in (summary.findings, summary.known))
    matrix, compared = [_cell(line) for line in summary.lines], dict(summary.compared)
    more = {"exit_code": code, "reasons": list(reasons), "new": new, "known": known}
    return filled(RunOut, summary, compared=compared, matrix=matrix, **more)


def _finding(f: Finding) -> FindingOut:
    size = finite(headroom(f.worst)) if f.roots else None
    shown = {name: getattr(f.lead, name) for name in ("cls", "blame", "gate", "case", "message", "replay")}
    return filled(FindingOut, f, quantities=list(f.roots), headroom=size, dtypes=list(f.dtypes), **shown)


def _cell(line: Line) -> CellOut:
    worst = line.worst
    size, at = (math.inf, None) if worst is None else (headroom(worst), worst.subject)
    compared, known = line.counts.compared, list(line.known)
    return filled(CellOut, line, compared=compared, headroom=finite(size), at=at, known=known)
