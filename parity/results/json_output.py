"""What `--json` prints: one object of these structures and nothing else on standard output; `parity schema --json` lists them."""

import math
from collections.abc import Sequence
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from parity.results.report.findings import Finding
from parity.results.report.outcomes import headroom
from parity.results.report.summary import Line, Summary
from parity.results.row import finite


def _of(text: str) -> Meta:
    return Meta(description=text)


class FindingOut(msgspec.Struct, kw_only=True, rename={"cls": "class"}):
    """Cases in which an implementation fails in the same quantities."""

    implementation: Annotated[str, _of("its id")]
    family: Annotated[str, _of("family of losses, or the trainer")]
    verdict: Annotated[str, _of("disagree, nondeterministic, crashed, timed-out or out-of-memory")]
    cls: Annotated[str | None, _of("logic or precision")]
    blame: Annotated[str | None, _of("candidate, reference, both, harness; null: not decided")]
    quantities: Annotated[list[str], _of("in which it starts")]
    gate: Annotated[str | None, _of("the tightest gate of the case shown")]
    headroom: Annotated[float | None, _of("the worst of all cases; null: without a finite size")]
    cases: Annotated[int, _of("in how many")]
    dtypes: Annotated[list[str], _of("in which")]
    known: Annotated[str | None, _of("its ledger entry; null: new")]
    case: Annotated[str, _of("the smallest case")]
    message: Annotated[str, _of("what differs")]
    replay: Annotated[str, _of("the command that shows it again")]


class CellOut(msgspec.Struct, kw_only=True):
    """An implementation in a dtype on a device."""

    implementation: Annotated[str, _of("its id")]
    family: Annotated[str, _of("its family")]
    dtype: Annotated[str, _of("of the parameters under test")]
    device: Annotated[str, _of("cpu or cuda")]
    compared: Annotated[int, _of("implementation-cases")]
    verdict: Annotated[str, _of("over all of them")]
    headroom: Annotated[float | None, _of("the worst, known findings left out where anything else was judged")]
    at: Annotated[str | None, _of("its quantity")]
    known: Annotated[list[str], _of("ledger entries of what it fails")]
    reason: Annotated[str, _of("the commonest reason for what was not compared")]


class RunOut(msgspec.Struct, kw_only=True):
    """`parity run --json`, `parity report --json`."""

    run: Annotated[str, _of("id of the run")]
    exit_code: Annotated[int, _of("of the command")]
    reasons: Annotated[list[str], _of("why it is not 0")]
    incomplete: Annotated[str, _of("how far a run came that did not finish; empty for one that did")]
    compared: Annotated[dict[str, int], _of("device -> implementation-cases")]
    new: Annotated[list[FindingOut], _of("findings that no ledger entry covers")]
    known: Annotated[list[FindingOut], _of("findings that the ledger has")]
    matrix: Annotated[list[CellOut], _of("every implementation, dtype and device")]


class ImplementationOut(msgspec.Struct, kw_only=True):
    """`parity list --json` prints a list of these."""

    id: Annotated[str, _of("its id")]
    family: Annotated[str, _of("its family")]
    role: Annotated[str, _of("reference or candidate")]
    library: Annotated[str | None, _of("the package")]
    version: Annotated[str | None, _of("as installed")]
    missing: Annotated[str | None, _of("why it cannot run here; null: it can")]
    opt_in: Annotated[bool, _of("runs only where it is named")]
    interpreted: Annotated[bool, _of("a Triton kernel: without CUDA in Triton's interpreter")]
    contexts: Annotated[list[str], _of("plain, autocast, compile, checkpoint")]


class SettingOut(msgspec.Struct, kw_only=True):
    """`parity list --settings FAMILY --json` prints a list of these."""

    name: Annotated[str, _of("its name")]
    default: Annotated[Any, _of("its default")]
    values: Annotated[list[Any] | None, _of("those it may take; null: see its meaning")]
    meaning: Annotated[str, _of("what it is")]


class CheckOut(msgspec.Struct, kw_only=True):
    """`parity list --checks TRAINER --json` prints a list of these."""

    name: Annotated[str, _of("its name")]
    run_as: Annotated[list[str], _of("released, fused, fixed")]
    cases: Annotated[dict[str, int], _of("profile -> how many")]
    settings: Annotated[list[str], _of("its settings")]
    meaning: Annotated[str, _of("what it checks")]


class ProfileOut(msgspec.Struct, kw_only=True):
    """`parity list --profiles --json` prints a list of these."""

    name: Annotated[str, _of("its name")]
    fixed_seed: Annotated[bool, _of("the same cases every time")]
    cases: Annotated[dict[str, int], _of("loss family -> cases drawn")]


class UncoveredOut(msgspec.Struct, kw_only=True):
    """`parity list --uncovered --json` prints a list of these: trainers of the installed TRL."""

    trainer: Annotated[str, _of("class in TRL")]
    why: Annotated[str, _of("why it has no check")]


class DoctorOut(msgspec.Struct, kw_only=True):
    """`parity doctor --json`."""

    versions: Annotated[dict[str, str], _of("installed packages")]
    device: Annotated[str, _of("cpu or cuda")]
    device_text: Annotated[str, _of("what it is")]
    problems: Annotated[list[str], _of("why a GPU that is there cannot be used, or what runs wrong on it")]
    compiler: Annotated[str | None, _of("the C++ compiler; null: torch.compile paths crash")]
    ready: Annotated[list[str], _of("implementations that can run")]
    interpreted: Annotated[list[str], _of("those of them that run in Triton's interpreter here")]
    blocked: Annotated[dict[str, list[str]], _of("reason -> implementations that cannot run")]
    rollouts: Annotated[list[str], _of("recordings")]
    engine: Annotated[str | None, _of("the installed vLLM")]
    tools: Annotated[dict[str, bool], _of("uv, git: whether it is there")]


class EnvironmentOut(msgspec.Struct, kw_only=True):
    """`parity env list --json` prints a list of these."""

    name: Annotated[str, _of("its name")]
    bytes: Annotated[int, _of("that removing it frees")]
    before: Annotated[str | None, _of("date: nothing newer is in it")]
    versions: Annotated[dict[str, str], _of("its packages")]
    broken: Annotated[dict[str, str], _of("package -> why it does not import")]


class MovedOut(msgspec.Struct, kw_only=True):
    """A quantity that differs between two releases."""

    case: Annotated[str, _of("name of the frozen case")]
    implementation: Annotated[str, _of("its id")]
    quantity: Annotated[str | None, _of("null: a side did not judge")]
    mark: Annotated[str, _of("+ worse, - better, ~ otherwise moved")]
    nearer: Annotated[str, _of("before or after: nearer to the definition; empty: cannot be said")]
    before: Annotated[str | None, _of("verdict")]
    after: Annotated[str | None, _of("verdict")]
    headroom_before: Annotated[float | None, _of("null: none, or without a finite size")]
    headroom_after: Annotated[float | None, _of("the same")]


class CompareOut(msgspec.Struct, kw_only=True):
    """`parity compare --json`."""

    before: Annotated[dict[str, str], _of("versions of the first environment")]
    after: Annotated[dict[str, str], _of("versions of the second")]
    cases: Annotated[int, _of("frozen cases")]
    judged: Annotated[list[int], _of("quantities judged in each")]
    moved: Annotated[list[MovedOut], _of("what differs")]
    notes: Annotated[list[str], _of("sampled tokens, settings that came, went or changed their default")]
    exit_code: Annotated[int, _of("of the command")]


class BisectOut(msgspec.Struct, kw_only=True):
    """`parity bisect --json`."""

    outcome: Annotated[str, _of("found, alike, swapped, unjudged or unstable")]
    low: Annotated[str, _of("the last release that answers like the older end")]
    high: Annotated[str, _of("the first that answers like the newer one")]
    between: Annotated[list[str], _of("releases that could not be judged")]
    by: Annotated[str, _of("what decided: verdict or headroom")]
    moved: Annotated[dict[str, list[str]], _of("package -> its versions in the two")]
    cause: Annotated[list[str], _of("packages of which each alone shows the change")]
    measured: Annotated[list[dict[str, Any]], _of("release, verdict and headroom of every measurement, in order")]
    exit_code: Annotated[int, _of("of the command")]


EVERY = (
    *(RunOut, FindingOut, CellOut, ImplementationOut, SettingOut, CheckOut, ProfileOut, UncoveredOut, DoctorOut),
    *(EnvironmentOut, CompareOut, MovedOut, BisectOut),
)


def text(value: Any) -> str:
    """The JSON of a structure or of a list of them, indented."""
    return msgspec.json.format(msgspec.json.encode(value), indent=1).decode()


def of_run(summary: Summary, code: int, reasons: Sequence[str]) -> RunOut:
    """A run as its reports show it."""
    return RunOut(
        run=summary.run,
        exit_code=code,
        reasons=list(reasons),
        incomplete=summary.incomplete,
        compared=dict(summary.compared),
        new=[_finding(f) for f in summary.findings],
        known=[_finding(f) for f in summary.known],
        matrix=[_cell(line) for line in summary.lines],
    )


def _finding(f: Finding) -> FindingOut:
    return FindingOut(
        implementation=f.implementation,
        family=f.family,
        verdict=f.verdict,
        cls=f.lead.cls,
        blame=f.lead.blame,
        quantities=list(f.roots),
        gate=f.lead.gate,
        headroom=finite(headroom(f.worst)) if f.roots else None,
        cases=f.cases,
        dtypes=list(f.dtypes),
        known=f.known,
        case=f.lead.case,
        message=f.lead.message,
        replay=f.lead.replay,
    )


def _cell(line: Line) -> CellOut:
    size = math.inf if line.worst is None else headroom(line.worst)
    return CellOut(
        implementation=line.implementation,
        family=line.family,
        dtype=line.dtype,
        device=line.device,
        compared=line.counts.compared,
        verdict=line.verdict,
        headroom=finite(size),
        at=None if line.worst is None else line.worst.subject,
        known=list(line.known),
        reason=line.reason,
    )
