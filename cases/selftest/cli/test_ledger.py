"""`parity ledger add`, one or all: what was new is known afterwards, and nothing beside it."""

import json
import shutil
from pathlib import Path

import pytest
from click.testing import CliRunner
from msgspec import structs

from parity import data
from parity.case.case import Frozen
from parity.cli.commands import main
from parity.compare.result_rows import empty_row
from parity.results.ledger import Ledger
from parity.results.report.rows import Writer, read, rewrite
from parity.results.row import About, Header, Last
from parity.trainers import catalogue

NORM = Path(__file__).parents[3] / "fixtures" / "rms_norm.py"
WRONG = """
def norm(x, weight, eps):
    wide = x.float()
    factor = FACTOR if len(weight) < 5 else 1.0
    return factor * wide / (wide.square().mean(-1, keepdim=True) + eps).sqrt() * weight
"""


@pytest.fixture(scope="module")
def red(tmp_path_factory, warm_workers):
    """A folder with a wrong kernel, an empty ledger, and the red run of the kernel."""
    folder = tmp_path_factory.mktemp("red")
    (folder / "kernel.py").write_text(WRONG.replace("FACTOR", "1.5"))
    (folder / "mine").mkdir()
    (folder / "mine" / "ledger.toml").touch()
    done = run(folder)
    assert done.exit_code == 1 and (folder / "reports/results.ndjson").exists(), (done.output, done.exception)
    return folder


def run(folder):
    words = "run --profile quick --dtype fp32 --device cpu --workers 1".split() + ["--family", f"{NORM}:FAMILY"]
    words += ["--implementation", f"{folder}/kernel.py:norm", "--ledger", f"{folder}/mine/ledger.toml"]
    return CliRunner().invoke(main, [*words, "--reports", f"{folder}/reports"])


def ledger(folder, *words, into=None):
    at = ["--run", f"{folder}/reports/results.ndjson", *(["--ledger", f"{into}/mine/ledger.toml"] if into else [])]
    return CliRunner().invoke(main, ["ledger", *words, *at])


def added(folder, header, rows, *words):
    """`ledger add` after a whole run with these rows, to a ledger that is not there yet."""
    rewrite(folder / "results.ndjson", header, rows)
    with Writer(folder / "results.ndjson", append=True) as write:
        write(Last(end=header.end, run=header.run))
    at = ["--run", str(folder / "results.ndjson"), "--ledger", str(folder / "mine.toml")]
    return CliRunner().invoke(main, ["ledger", "add", *words, *at])


def test_add_writes_one_narrow_entry(red, tmp_path):
    shutil.copytree(red / "mine", tmp_path / "mine")
    _, rows = read(red / "reports" / "results.ndjson")
    case = next(r.case for r in rows if r.new and r.settings)
    done = ledger(red, "add", case, "--reason", "half as much again", "--link", "kernel.py", into=tmp_path)
    if done.exit_code == 2:  # the case of the finding is the minimised one
        case = done.output.rpartition("choose from ")[2].split()[0]
        done = ledger(red, "add", case, "--reason", "half as much again", "--link", "kernel.py", into=tmp_path)
    assert done.exit_code == 0, done.output
    entry = Ledger.load(tmp_path / "mine" / "ledger.toml").entries[-1]
    assert (entry.implementations, entry.link) == (
        (f"{red}/kernel.py:norm",),
        "kernel.py",
    ) and "bf16" not in entry.dtypes
    assert (tmp_path / "mine" / entry.case).exists() and "B" not in entry.settings
    again = ledger(red, "add", case, "--reason", "x", "--link", "y", into=tmp_path)
    assert again.exit_code == 2 and "is there already" in again.output and "line" in again.output


def test_an_installed_ledger_is_not_written(red, tmp_path, monkeypatch):
    """The next installation would lose the entry."""
    (shipped := tmp_path / "ledger.toml").touch()
    monkeypatch.setattr(data, "_CHECKOUT", tmp_path / "none")
    monkeypatch.setattr(data, "ledger_file", lambda: shipped)
    header, rows = read(red / "reports/results.ndjson")
    rewrite(tmp_path / "results.ndjson", structs.replace(header, header=About()), rows)
    case = next(r.case for r in rows if r.new and r.settings)
    words = ["ledger", "add", case, "--reason", "x", "--link", "y", "--run", str(tmp_path / "results.ndjson")]
    done = CliRunner().invoke(main, words)
    assert done.exit_code == 2 and "name a ledger of your own, --ledger FILE" in done.output, done.output
    assert not shipped.read_text()


def test_of_two_that_fail_on_a_case_one_is_entered(red, tmp_path):
    """The reason is of one of them."""
    header, rows = read(red / "reports/results.ndjson")
    case = next(r.case for r in rows if r.new and r.settings)
    twice = [*rows, *(structs.replace(r, implementation="other.py:norm") for r in rows)]
    done = added(tmp_path, header, twice, case, "--reason", "x", "--link", "y")
    assert done.exit_code == 2 and "fail on it: say which, with --implementation" in done.output, done.output


def test_what_a_trainer_gets_wrong_on_two_paths_is_one_entry_unless_one_is_named(tmp_path):
    trainer = catalogue.family("dpo-trainer")
    case = trainer.case(0, "fp32", {"check": "losses", "loss": "ipo"})
    about = {"verdict": "disagree", "quantity": "loss", "cls": "logic", "gate": "scalar", "headroom": 9.0}
    its = {path: empty_row(trainer, case, f"dpo-trainer.{path}", "cpu", **about) for path in ("fixed", "released")}
    rewrite(tmp_path / "results.ndjson", Header(run="r1", header=About()), its.values())
    words = ["ledger", "add", case.id, "--reason", "x", "--link", "y", "--run", str(tmp_path / "results.ndjson")]

    def entered(name, *more):
        done = CliRunner().invoke(main, [*words, "--ledger", str(tmp_path / name), *more])
        assert done.exit_code == 0, done.output
        (entry,) = Ledger.load(tmp_path / name).entries
        return entry

    both = entered("both.toml")
    assert both.implementations == ("dpo-trainer.released", "dpo-trainer.fixed")
    assert all(both.covers(row, {"check": "losses", "loss": "ipo"}) for row in its.values())
    for path in its:
        assert entered(f"{path}.toml", "--implementation", f"dpo-trainer.{path}").implementations == (
            f"dpo-trainer.{path}",
        )


def test_what_is_accepted_is_known_in_the_next_run(red):
    done = ledger(red, "add", "--all", "--expires", "24h")
    assert done.exit_code == 0, done.output
    entries = Ledger.load(red / "mine" / "ledger.toml").entries
    accepted = [e for e in entries if "Unexplained" in e.reason]
    assert accepted and len(accepted) == len(entries) and all(e.expires and e.unlinked for e in accepted)
    after = run(red)
    assert after.exit_code == 0, after.output[-2000:]
    ours = f"{red}/kernel.py:norm"
    known = {r.known for r in read(red / "reports/results.ndjson")[1]} - {None}
    assert {e.id for e in accepted} <= known
    for entry in accepted:
        (gave,) = Frozen.load(red / "mine" / entry.case).recorded
        assert gave["failing"][ours] and gave["versions"]["torch"]


def test_measured_anew_what_grew_is_known_again(red):
    """After the baseline: the kernel is 2.5 times as wrong, within what the entry allows."""
    entry = next(e for e in Ledger.load(red / "mine" / "ledger.toml").entries if "Unexplained" in e.reason)
    path = red / "mine" / entry.case
    own, kernel = f"{red}/kernel.py:norm", (red / "kernel.py").read_text()
    (red / "kernel.py").write_text(kernel.replace("1.5", "2.25"))
    before = path.read_text()
    at = ["--ledger", f"{red}/mine/ledger.toml", "--device", "cpu", "--family", f"{NORM}:FAMILY"]
    done = CliRunner().invoke(main, ["ledger", "measure", entry.id, *at])
    (red / "kernel.py").write_text(kernel)
    assert done.exit_code == 0 and f"{path.name}: written" in done.output, done.output
    sizes = [json.loads(text)["recorded"][0]["failing"][own]["y"][1] for text in (before, path.read_text())]
    assert 2.4 < sizes[1] / sizes[0] < 2.6
    path.write_text(before)
    (red / "other.py").write_text(kernel)
    words = ["ledger", "measure", entry.id, "--implementation", f"{red}/other.py:norm", *at]
    other = CliRunner().invoke(main, words)
    assert other.exit_code == 3 and f"{entry.id}: not measured" in other.output, other.output
    by_case = CliRunner().invoke(main, ["ledger", "measure", path.stem, *at])
    assert by_case.exit_code == 0, by_case.output
    done = CliRunner().invoke(main, ["ledger", "measure", *at])
    assert {line.partition(":")[0] for line in done.output.splitlines() if ".json: " in line} == {path.name}


def test_half_a_run_is_no_baseline(red, tmp_path):
    half = tmp_path / "results.ndjson"
    half.write_bytes(b"".join((red / "reports/results.ndjson").read_bytes().splitlines(keepends=True)[:-1]))
    words = ["ledger", "add", "--all", "--run", str(half), "--ledger", str(tmp_path / "mine.toml")]
    done = CliRunner().invoke(main, words)
    assert done.exit_code == 2 and "did not finish" in done.output and not (tmp_path / "mine.toml").exists()


def test_a_case_that_is_no_finding(red):
    done = ledger(red, "add", "policy-0", "--reason", "x", "--link", "y")
    assert done.exit_code == 2 and "choose from" in done.output


def test_a_run_without_new_findings_has_nothing_to_accept(red, tmp_path):
    header, rows = read(red / "reports/results.ndjson")
    done = added(tmp_path, header, [row for row in rows if row.verdict != "disagree"], "--all")
    assert done.exit_code == 0 and "no new findings" in done.output
    assert not (tmp_path / "mine.toml").exists()
