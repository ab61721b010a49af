"""A user's own trainer goes through the checks of the TRL class that it extends; what it inherits is known, not new."""

import contextlib
import dataclasses
import json
import os
import re

import msgspec
import pytest
from click.testing import CliRunner

from parity import data
from parity.case.case import Case
from parity.case.profiles import Profile
from parity.cli.commands import main
from parity.errors import UsageError
from parity.implementations.user import loaded
from parity.registry import family, from_file, run_case, select
from parity.results.ledger import Ledger
from parity.running.shard import Session
from parity.sampling.find import find
from parity.trainers import catalogue
from parity.trainers.checks import update

FILE = "fixtures/trainers.py"
GRPO = family("grpo-trainer")


def rows(name, case):
    own = [i for i in from_file(f"{FILE}:{name}") if i.family == case.family]
    references = [i for i in select(()) if i.family == case.family and i.role == "reference"]
    return {(r.implementation.rpartition(":")[2], r.quantity): r for r in run_case(case, [*references, *own], "cpu")}


def verdicts(found, name):
    return {q: r.verdict for (i, q), r in found.items() if i == name}


def test_a_subclass_is_a_candidate_of_its_trainer_and_of_the_loss():
    kinds = {i.family: i for i in from_file(f"{FILE}:Same")}
    assert set(kinds) == {"grpo-trainer", "policy"}
    assert {i.id for i in kinds.values()} == {f"{FILE}:Same"}
    assert {i.role for i in kinds.values()} == {"candidate"}
    assert [i.family for i in from_file(f"{FILE}:Unpacked")] == ["sft-trainer"]
    assert {i.id for i in select([f"{FILE}:Same"])} >= {f"{FILE}:Same", "trl.GRPOTrainer", "grpo-trainer.released"}


def test_a_class_that_extends_no_trainer_is_refused_with_the_choices():
    with pytest.raises(UsageError, match="must extend one of TRL's trainers GRPOTrainer, RLOOTrainer"):
        from_file(f"{FILE}:ScaledConfig")


def test_an_id_is_the_path_that_replays_from_here(monkeypatch, tmp_path):
    (tmp_path / "inner").mkdir()
    (tmp_path / "inner" / "kernel.py").write_text("def loss(hidden, weight, ids): return hidden\n")
    monkeypatch.chdir(tmp_path)
    assert [i.id for i in from_file("inner/kernel.py:loss")] == ["inner/kernel.py:loss"]
    assert [i.id for i in from_file(f"{tmp_path}/inner/kernel.py:loss")] == ["inner/kernel.py:loss"]
    monkeypatch.chdir(tmp_path / "inner")
    assert [i.id for i in from_file("kernel.py:loss")] == ["kernel.py:loss"]
    os.mkdir("below")
    monkeypatch.chdir("below")
    assert [i.id for i in from_file("../kernel.py:loss")] == [f"{tmp_path}/inner/kernel.py:loss"]


def test_a_file_is_executed_once():
    importing = contextlib.nullcontext
    assert loaded(f"{FILE}:Same", importing) is loaded(os.path.abspath(FILE) + ":Same", importing)


def test_a_dropped_ratio_is_the_subclass_s_fault():
    case, _ = find("cases/history/is-ratio.json")
    for name, right in (("Same", True), ("WithoutSampler", False)):
        found = rows(name, case)
        assert set(verdicts(found, "trl.GRPOTrainer").values()) == {"agree"}
        assert (set(verdicts(found, name).values()) == {"agree"}) is right, name
    assert {q for q, v in verdicts(found, "WithoutSampler").items() if v == "disagree"} >= {"loss", "grad_weight"}
    assert found["WithoutSampler", "loss"].blame == "candidate"


def test_a_check_that_does_not_drive_the_class_says_so():
    case = family("sft-trainer").case(0, "fp32", {"check": "processes"})
    own = [i for i in from_file(f"{FILE}:Unpacked") if i.family == case.family]
    (row,) = run_case(case, own, "cpu")
    assert row.verdict == "unsupported" and "check processes does not drive" in row.message


OWN = {
    "Repeated": """(trl.GRPOTrainer):
    def _prepare_inputs(self, batch):
        super()._prepare_inputs(batch)
        return self._buffered_inputs[self._step // self.num_iterations % self.args.steps_per_generation]
""",
    "Begun": """(trl.SFTTrainer):
    def _prepare_dataset(self, *args, **kwargs):
        dataset = super()._prepare_dataset(*args, **kwargs)
        return dataset.map(lambda x: {"input_ids": [1, *x["input_ids"]], "labels": [-100, *x["labels"]]})
""",
    "Decayed": """(trl.GRPOTrainer):
    def get_decay_parameter_names(self, model):
        return [name for name, _ in model.named_parameters()]
""",
    "Dropping": """(trl.DPOTrainer):
    def _compute_loss(self, *args, **kwargs):
        self.ref_model.train()
        return super()._compute_loss(*args, **kwargs)
""",
    "Needing": """(trl.SFTTrainer):
    def compute_loss(self, *args, **kwargs):
        import no_such_package
""",
    "RowByRow": """(trl.GRPOTrainer):
    def _compute_loss(self, model, inputs):
        rows = [{k: v[i : i + 1] if hasattr(v, "ndim") and v.ndim else v for k, v in inputs.items()} for i in range(4)]
        return sum(super(RowByRow, self)._compute_loss(model, row) / 4 for row in rows)
""",
}


def of_own(name, folder, **settings):
    """Rows of a class of `OWN`, whose trainer as released agrees."""
    (folder / "own.py").write_text(f"import trl\n\n\nclass {name}{OWN[name]}")
    (own,) = (i for i in from_file(f"{folder}/own.py:{name}") if i.is_trainer)
    case = family(own.family).case(0, "fp32", settings)
    released = next(i for i in select(()) if i.id == own.extends)
    found = list(run_case(case, [released, own]))
    assert {r.verdict for r in found if r.implementation == released.id} == {"agree"}
    return {r.quantity: r for r in found if r.implementation == own.id}


@pytest.mark.parametrize(
    ("name", "window", "verdict", "told"),
    [
        ("Repeated", {"kind": "again", "loss": "dapo"}, "crashed", "the window holds 4 known sequences instead of 8"),
        ("Begun", {"kind": "uneven"}, "crashed", "the check cannot follow this class: ValueError: .*trainers/.*"),
        ("Needing", {"kind": "uneven"}, "unsupported", "needs no_such_package, which is not installed"),
    ],
)
def test_a_class_that_cannot_be_judged_where_the_released_one_can_is_told_why(name, window, verdict, told, tmp_path):
    """It failed, but where a package is missing."""
    (row,) = of_own(name, tmp_path, check="windows", **window).values()
    assert row.verdict == verdict and re.fullmatch(told, row.message, re.DOTALL)
    assert (row.blame == "candidate" and row.failing) is (verdict == "crashed")


def test_a_class_that_scores_rows_one_by_one_is_judged(tmp_path):
    found = of_own("RowByRow", tmp_path, check="step-one")
    assert found.keys() >= {"logps", "loss"} and {r.verdict for r in found.values()} == {"agree"}


def test_an_update_of_its_own_is_judged_where_a_user_s_class_is_asked_for(tmp_path):
    usual, own = (catalogue.cases("grpo-trainer", "pr", 0, own=mine) for mine in (False, True))
    first, resumed = (case for case in own if case.settings["check"] == "update")
    assert usual == [case for case in own if case not in (first, resumed)] and resumed.settings["resumed"]
    assert find(first.id) == (first, "grpo-trainer.released")
    found = of_own("Decayed", tmp_path, **first.settings)
    wrong = {q for q, r in found.items() if r.verdict != "agree"}
    assert wrong == {"parameters behind step 1", "parameters behind step 2"}


@pytest.mark.parametrize(("trainer", "settings"), update.OF_USER, ids=str)
def test_an_update_as_released_agrees_with_its_definition_and_tests_something(trainer, settings):
    """A user's class is held against the same cases."""
    case = family(trainer).case(0, "fp32", {"check": "update", **settings})
    (released,) = (i for i in select(()) if i.id == f"{trainer}.released")
    assert {r.verdict for r in run_case(case, [released])} == {"agree"}


def test_a_reference_in_training_mode_shows(tmp_path):
    found = of_own("Dropping", tmp_path, check="twins")
    assert {q for q, r in found.items() if r.verdict == "disagree"} == {"loss", "gradient"}


def test_a_config_of_its_own_is_what_it_is_given():
    case = family("policy").case(3, "fp32", {"B": 2, "T": 3, "V": 7, "H": 5})
    found = rows("Scaled", case)
    row = found["Scaled", "grad_hidden"]
    assert row.verdict == "disagree" and row.value == pytest.approx(1.001 * row.value_oracle, rel=1e-5)


def test_a_twin_judges_the_subclass():
    case = family("sft-trainer").case(0, "fp32", {"check": "twins", "split": "2x4"})
    found = rows("Unpacked", case)
    assert verdicts(found, "sft-trainer.released")["gradient"] == "agree"
    assert verdicts(found, "Unpacked")["gradient"] == "disagree"
    assert found["Unpacked", "gradient"].against == "sft-trainer.released"


def test_what_one_trainer_has_precomputed_is_no_answer_of_another(tmp_path):
    """`datasets` kept it by data and model for the whole process: a wrong subclass agreed after TRL's own, a right one was called
    wrong after it."""
    (tmp_path / "mine.py").write_text("""from trl import DPOTrainer
class Same(DPOTrainer): pass
class Halved(DPOTrainer):
    def compute_ref_log_probs(self, model, inputs):
        return tuple(logps / 2 for logps in super().compute_ref_log_probs(model, inputs))
""")
    case = family("dpo-trainer").case(0, "fp32", {"check": "losses", "precomputed": True})
    (reference,) = [i for i in select(()) if i.family == case.family and i.role == "reference"]
    (same, halved) = (i for name in ("Same", "Halved") for i in from_file(f"{tmp_path}/mine.py:{name}"))
    found = {(r.implementation, r.quantity): r.verdict for i in (reference, halved, same) for r in run_case(case, [i])}
    verdict = {one: found[one.id, "loss"] for one in (reference, halved, same)}
    assert [*verdict.values()] == ["agree", "disagree", "agree"]


@pytest.fixture
def session():
    """A session with the ledger that ships; implementations are set by the test."""
    return Session((), "quick", Profile({}), ("fp32",), "cpu", Ledger.load(data.ledger_file()), print)


def known(session, case):
    return {r.quantity: r.known for r in session._run(case, session._of(case), None, False) if r.verdict != "agree"}


def test_what_the_class_it_extends_does_wrong_is_known(session):
    case = Case.load(data.cases_dir() / "regressions" / "gc-overwrite.json")
    session.implementations = from_file(f"{FILE}:Same")
    assert set(known(session, case).values()) == {"gc-overwrite"}
    session.implementations = [dataclasses.replace(i, extends="") for i in session.implementations]
    assert set(known(session, case).values()) == {None}


def test_what_the_class_it_extends_does_right_on_the_same_case_is_new(session):
    case = GRPO.case(0, "fp32", {"check": "twins"})
    entry = next(e for e in session.ledger.entries if e.id == "gc-overwrite")
    entry = msgspec.structs.replace(entry, quantities=("*",), settings={})
    session.ledger = Ledger((entry,), session.ledger.path)
    released = next(i for i in select(()) if i.id == "grpo-trainer.released")
    session.implementations = [released, *from_file(f"{FILE}:Scaled")]
    found = known(session, case)
    assert found == {"gradient": None}, "the entry's scope covers it, but the class it extends agrees here"


@pytest.mark.parametrize(
    ("name", "said"), [("Scaled", "1.001 times the definition's; Scaled has a loss of its own"), ("Same", "")]
)
def test_a_replay_says_what_the_watch_says_of_its_loss(tmp_path, name, said):
    case = {"schema": 1, "family": "grpo-trainer", "seed": 0, "dtype": "fp32", "settings": {"check": "twins"}}
    (file := tmp_path / "case.json").write_text(json.dumps({"case": case}))
    done = CliRunner().invoke(main, ["replay", str(file), "--implementation", f"{FILE}:{name}"])
    assert done.exit_code == bool(said), done.output
    lines = [line for line in done.output.splitlines() if line.startswith("watch")]
    assert len(lines) == bool(said) and all(
        "watch, step 1: gradients of the log-probs are not those" in x for x in lines
    )
    assert said in " ".join(done.output.split())
