"""What a newcomer types: patterns, commas, slips of the pen, and the same from Python."""

import shlex
import sys
from types import SimpleNamespace

import click
import pytest
from click.testing import CliRunner

import parity
from cases.selftest.results.runs import row
from parity import data
from parity.cli import commands
from parity.errors import UsageError
from parity.nightly.upgrade import SAFE, Part
from parity.registry import select
from parity.results import memory
from parity.results.ledger import Ledger
from parity.results.report.stack import Stack
from parity.running import run as running
from parity.running.plan import Judged, ShardDone
from parity.tools.issue import Ran


@pytest.mark.parametrize("words", [[], ["ledger"], ["rollouts"]])
def test_summaries_of_commands_are_whole_sentences(words):
    """On 80 columns; click cuts a longer one in the middle."""
    shown = CliRunner().invoke(commands.main, [*words, "--help"], terminal_width=80).output
    listed = shown.partition("Commands:\n")[2].splitlines()
    assert len(listed) >= 2
    assert [line for line in listed if line.endswith("...")] == []


def leaves(command, path=()):
    if isinstance(command, click.Group):
        return [leaf for name, one in command.commands.items() for leaf in leaves(one, (*path, name))]
    return [pytest.param(command, path, id=" ".join(path))]


@pytest.mark.parametrize(("command", "path"), leaves(commands.main))
def test_the_help_of_each_command_has_one_example_that_parses(command, path):
    words = shlex.split(command.epilog.removeprefix("Example: "))
    assert tuple(words[: len(path) + 1]) == ("parity", *path)
    command.make_context(path[-1], words[len(path) + 1 :])


CASES = data.ledger_file().parent
README = [
    line.partition("#")[0].strip()
    for line in (CASES.parent / "README.md").read_text().splitlines()
    if line.startswith("    parity ")
]


class Made:
    """An environment of another release, which takes the command."""

    described = "made"

    @classmethod
    def of(cls, specs):
        return cls()

    def become(self, command, variables):
        assert command[:4] == ["python", "-m", "parity", "run"] and variables == {"PARITY_WITH": "--with trl==0.27.2"}
        sys.exit(0)


@pytest.mark.parametrize("line", [one for one in README if one != "parity demo"])  # test_started.py runs that
def test_each_command_of_the_readme_runs(line, tmp_path, monkeypatch, played):
    """To its end; other releases, a finding's script, and the cases of a whole run, are played."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", shlex.split(line))
    (tmp_path / "grpo.yaml").write_text("beta: 0.1")
    (tmp_path / "my_kernel.py").write_text("def my_loss(hidden, weight, ids): ...")
    monkeypatch.setattr("parity.versions.environment.Environment", Made)
    monkeypatch.setattr("parity.versions.compare.compare", lambda *_, **__: SimpleNamespace(text=str, exit_code=0))
    found = SimpleNamespace(text="", found=SimpleNamespace(outcome="found"))
    monkeypatch.setattr("parity.versions.bisect.search", lambda *_, **__: found)
    monkeypatch.setattr("parity.nightly.upgrade.resolved", str)
    monkeypatch.setattr("parity.nightly.upgrade.check", lambda *_: (SAFE, [Part("run", SAFE, "", "")]))
    name, *words = shlex.split(line)[1:]
    monkeypatch.setattr("parity.tools.upstream.ran", lambda code, first=None: Ran([], 0 if first else 1, "", ""))
    done = CliRunner().invoke(commands.main, [name, *words])
    assert done.exit_code == (name == "replay"), done.output


def test_patterns_choose_implementations():
    every = {i.id for i in select(["liger.*"])}
    assert every == {i.id for i in select(["liger"])} and len(every) > 3
    assert {i.id for i in select(["*.selective_log_softmax"])} == {"trl.selective_log_softmax"}
    assert [i.id for i in select(["trl.GRPOTrainer"])] == ["trl.GRPOTrainer"]  # an id is itself alone
    assert {i.id for i in select(["trl.GRPOTrainer.*"])} == {"trl.GRPOTrainer", "trl.GRPOTrainer.liger"}
    with pytest.raises(UsageError, match=r"'liger.x\*' is unknown"):
        select(["liger.x*"])


@pytest.fixture
def played(monkeypatch):
    """Runs in which the first shard judges one row; the settings of their workers."""
    seen = []

    def events(plans, queue, *limits):
        seen[:] = plans
        for number, shard in enumerate(iter(queue.take, None)):
            if not number:
                mine = next((name for name in plans[0]["implementations"] if ".py:" in name), "a.b")
                yield shard, Judged(row(family="logprobs", implementation=mine))
            yield shard, ShardDone(shard.count)
            queue.back(shard)

    monkeypatch.setattr(running.supervisor, "run", events)
    return seen


@pytest.mark.parametrize(("narrowed", "kept"), [([], 1), (["--family", "logprobs"], 0), (["--dtype", "fp32"], 0)])
def test_a_whole_run_is_kept_for_later_ones(tmp_path, played, narrowed, kept):
    words = ["run", "--profile", "quick", "--device", "cpu", *narrowed, "--reports", str(tmp_path)]
    done = CliRunner().invoke(commands.main, words)
    here = Stack.here(Ledger.load(data.ledger_file())).entries
    known = Stack.of(e for e in here if "--family" not in narrowed or e.family == "logprobs").defects
    assert done.exit_code == 0 and f"{known}, 0 new" in " ".join(done.stdout.split())
    assert len(memory.runs(tmp_path / "history")) == kept


def test_a_run_from_python_has_typed_rows(tmp_path, played):
    found = parity.run(profile="quick", families=("logprobs",), dtypes=("fp32",), reports=tmp_path)
    assert [r.headroom for r in found.rows] == [0.25] and played[0]["dtypes"] == ["fp32"]
    assert found.exit_code == 0 and (tmp_path / "results.ndjson").exists()
    parity.run(profile="quick", families="logprobs", dtypes="fp32", reports=str(tmp_path / "text"))
    assert played[1]["dtypes"] == ["fp32"] and (tmp_path / "text/results.ndjson").exists()
    with pytest.raises(UsageError, match="profile 'huge' is unknown"):
        parity.run(profile="huge")
