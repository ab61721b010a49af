"""The verdict about an upgrade: the gravest of its parts, or that about the team's own settings."""

import dataclasses
import re
import time
from types import SimpleNamespace

import pytest
from msgspec.structs import replace

from cases.selftest.results.runs import row
from parity.errors import UsageError
from parity.nightly import upgrade
from parity.nightly.upgrade import CHANGED, NOT_SAFE, SAFE, UNKNOWN, Part
from parity.results.memory import CommandOutcome
from parity.tools.settings_check import Run
from parity.versions.client import EnvironmentUnusable
from parity.versions.compare import Compared
from parity.versions.environment import Environment
from parity.versions.row_diff import Difference


@pytest.mark.parametrize(
    "code, reached, found, said",
    [
        (0, "", SAFE, "nothing new"),
        (1, "", NOT_SAFE, "not known"),
        (1, "9 of 20 cases", NOT_SAFE, "not known"),
        (4, "", CHANGED, "is gone"),
        (0, "9 of 20 cases", UNKNOWN, "so far, but its time was over: 9 of 20 cases"),
        (4, "9 of 20 cases", UNKNOWN, "9 of 20 cases"),
        (None, "", UNKNOWN, "its time was over"),
        (3, "", UNKNOWN, "it could not answer (exit code 3): the end of its log"),
        (3, "9 of 20 cases", UNKNOWN, "exit code 3"),
    ],
)
def test_what_a_command_says(code, reached, found, said):
    part = upgrade.part(CommandOutcome("run", "parity run", code, 9.0, "its log\nthe end of its log", reached))
    assert part.verdict == found and said in part.summary and part.printed == "its log\nthe end of its log"


@pytest.mark.parametrize(
    "own, others, found, beyond",
    [
        (None, (SAFE, SAFE), SAFE, ""),
        (None, (SAFE, CHANGED), CHANGED, ""),
        (None, (UNKNOWN, CHANGED), UNKNOWN, ""),
        (None, (UNKNOWN, NOT_SAFE), NOT_SAFE, ""),
        (SAFE, (NOT_SAFE, UNKNOWN), SAFE, " for your settings, beyond them not safe"),
        (NOT_SAFE, (SAFE, SAFE), NOT_SAFE, " for your settings, beyond them safe"),
    ],
)
def test_the_verdict_is_about_the_own_settings_where_there_are_some(own, others, found, beyond):
    parts = [Part(f"part {n}", v, "", "") for n, v in enumerate(others)]
    parts = [Part("your settings", own, "", ""), *parts] if own else parts
    assert upgrade.verdict(parts) == found
    page = upgrade.page("trl==1.17.0", parts).splitlines()
    assert page[0] == f"# Upgrade to trl==1.17.0: {found}{beyond}"
    assert page[4].startswith("| your settings |" if own else "| part 0 |"), "the verdict for these settings first"


HERE = Environment(None, {}, {})
RIGHT, WRONG = row(), row(verdict="disagree", headroom=3.0)
SAME = Compared("trl", (HERE, HERE), 9, ([RIGHT] * 100, [RIGHT] * 100), ())
NOT_THERE, NOR_THIS = (row(verdict="unsupported", quantity=None, message=f"{n} blocks | too many") for n in (137, 1100))
GRPO = Run("grpo.yaml", ("GRPOTrainer",), {"beta": 0.04})
DPO = Run("dpo.yaml", ("DPOTrainer",), {"beta": 0.1})
CONFIGS = tuple({"GRPOConfig": {"pad_to_multiple_of": value}} for value in ("auto", None))


def pair(before, after):
    return Difference("case", "trl.f", after.quantity, before, after)


WORSE = [pair(RIGHT, WRONG), pair(WRONG, RIGHT)]
MOVED = [pair(RIGHT, RIGHT), pair(RIGHT, NOT_THERE), pair(RIGHT, NOR_THIS)]
FEWER = {"rows": ([RIGHT] * 100, [RIGHT] * 79), "moved": [pair(RIGHT, NOT_THERE)]}


@pytest.mark.parametrize(
    "more, found, said",
    [
        ({}, SAFE, "nothing moved"),
        ({"moved": WORSE, "configs": CONFIGS}, NOT_SAFE, "1 quantities are wrong; 1 worse; 1 better; GRPO"),
        ({"moved": [pair(WRONG, RIGHT)]}, CHANGED, "1 better"),
        ({"moved": MOVED}, CHANGED, "1 otherwise moved; 2 judged before and not there: 1100 blocks | too many (2)"),
        ({"configs": CONFIGS}, CHANGED, "GRPOConfig, defaults changed: pad_to_multiple_of 'auto' -> None"),
        (FEWER, UNKNOWN, "79 of 100 quantities could be judged there; 1"),
    ],
    ids=["the same", "worse", "better", "moved", "a default", "mostly unjudged"],
)
def test_what_moved_is_told_and_what_is_not_judged_there_is_not_safe(monkeypatch, more, found, said):
    """1.15.0 was called safe with 26 cases that nothing had judged, and with another default."""
    monkeypatch.setattr(upgrade.compare, "compare", lambda *_, **__: dataclasses.replace(SAME, **more))
    part = upgrade.compared("trl==1.16.0", "trl==1.15.0", "cpu", 9.0)
    assert part.verdict == found and said in part.summary and "judged quantities" in part.printed
    line = next(line for line in upgrade.page("trl==1.15.0", [part]).splitlines() if line.startswith("| compare"))
    assert line.replace(r"\|", "").count("|") == 4


@pytest.mark.parametrize("error", [EnvironmentUnusable("no answer"), UsageError("both sides are the same")])
def test_a_comparison_that_cannot_be_made_leaves_a_page(monkeypatch, error):
    def compare(*_, **__):
        raise error

    monkeypatch.setattr(upgrade.compare, "compare", compare)
    assert upgrade.compared("trl==1.16.0", "trl==1.15.0", "cpu", 9.0).verdict == UNKNOWN


def test_the_own_settings_have_a_limit_on_the_clock_and_the_rest_goes_on(tmp_path, monkeypatch):
    """They had none: a release whose loss hangs held the check for an hour, and then ended it without a page."""
    root = tmp_path / "made"
    (root / "bin").mkdir(parents=True)
    (root / "bin" / "python").write_text("#!/bin/sh\nsleep 60\n")
    (root / "bin" / "python").chmod(0o755)
    made = Environment(root, {}, {})
    monkeypatch.setattr(upgrade.compare.Environment, "of", lambda specs: made)
    config = tmp_path / "grpo.yaml"
    config.write_text("beta: 0.04")
    monkeypatch.setattr(upgrade.steps, "run", lambda name, *_: CommandOutcome(name, "", 0, 1.0, ""))
    whole = upgrade.compare.compare
    monkeypatch.setattr(upgrade.compare, "compare", lambda *_, **more: whole(*_, **more) if more["asked"] else SAME)
    begun = time.monotonic()
    found, parts = upgrade.check("trl==1.15.0", config, tmp_path, lambda line: None, "cpu", 1.0, "GRPOTrainer")
    assert time.monotonic() - begun < 30 and found == UNKNOWN
    assert [p.name for p in parts] == [upgrade.OWN, "run", "compare"]
    assert re.search(r"no answer for \d+ s, ", parts[0].summary)


def test_the_time_in_which_environments_are_made_counts(monkeypatch):
    clocks = []

    def made(specs):
        time.sleep(0.2)
        return HERE

    def look(environment, clock, **_):
        clocks.append(clock)
        return SimpleNamespace(rows=[RIGHT], configs={})

    monkeypatch.setattr(upgrade.compare.Environment, "of", made)
    monkeypatch.setattr(upgrade.compare, "look", look)
    for limit in (20.0, None):
        upgrade.compare.compare((["trl==1.16.0"], ["trl==1.15.0"]), asked=[], clock=limit)
    assert all(10.0 < clock <= 19.6 for clock in clocks[:2]) and clocks[2:] == [None, None]
    with pytest.raises(EnvironmentUnusable, match="its time was over"):
        upgrade.compare.compare((["trl==1.16.0"], ["trl==1.15.0"]), asked=[], clock=0.1)


def test_each_command_has_its_time_and_what_it_came_to_is_read(tmp_path, monkeypatch):
    asked = []

    def step(name, words, log, limit):
        asked.append((name, words, limit))
        return CommandOutcome(name, "", 0, 1.0, "")

    monkeypatch.setattr(upgrade.steps, "run", step)
    limits = []
    monkeypatch.setattr(upgrade.compare, "compare", lambda *_, **more: limits.append(more["clock"]) or SAME)
    found, parts = upgrade.check("trl==1.15.0", None, tmp_path, lambda line: None, "cpu", 100.0)
    assert found == SAFE and [p.name for p in parts] == ["run", "compare"]
    assert limits == [100.0]
    words = asked[0][1]
    assert words[-2:] == ["--max-time", "80s"] and words[words.index("--reports") + 1] == str(tmp_path / "run")


@pytest.mark.parametrize(
    "there, found, said",
    [
        (lambda case: RIGHT, SAFE, "nothing moved"),
        (lambda case: WRONG if case.dtype == "bf16" else RIGHT, NOT_SAFE, "3 quantities are wrong with exactly these"),
        (lambda case: NOT_THERE if case.dtype == "bf16" else RIGHT, UNKNOWN, "3 of 6 quantities with exactly these"),
        (lambda case: NOT_THERE if case.settings["beta"] != 0.04 else RIGHT, CHANGED, "2 judged before and not there"),
    ],
    ids=["the same", "wrong in bf16", "bf16 not judged", "neighbours not judged"],
)
def test_settings_that_are_not_judged_there_are_not_called_right(monkeypatch, there, found, said):
    """1.15.0's kernels in bf16 are judged on a GPU alone: the check said "right, 3 quantities moved inside their gates"."""
    after = dataclasses.replace(HERE, versions={"trl": "1.15.0"})
    monkeypatch.setattr(upgrade.compare.Environment, "of", lambda specs: after if "1.15.0" in specs[0] else HERE)

    def look(made, cases, **_):
        what = there if made is after else lambda case: RIGHT
        rows = [replace(what(case), case=case.id, dtype=case.dtype) for case in cases]
        return SimpleNamespace(rows=rows, configs={"GRPOConfig": {"beta": 0.0}})

    monkeypatch.setattr(upgrade.compare, "look", look)
    part = upgrade.own_settings("trl==1.16.0", "trl==1.15.0", GRPO, "cpu", 100.0)
    assert (part.verdict, part.summary[: len(said)]) == (found, said)


def test_a_teams_settings_are_cases_and_so_are_their_neighbours():
    wanted = {"beta": 0.04, "loss_type": "dapo", "epsilon_high": 0.28}
    found = list(upgrade.own_cases(wanted))
    mine = [case for label, case in found if label == upgrade.OWN]
    assert [{n: case.settings[n] for n in wanted} for case in mine] == [wanted] * 6
    moved = {label: case.settings for label, case in found if label != upgrade.OWN}
    assert moved["beta=0.08"]["beta"] == 0.08 and moved["loss_type=bnpo"]["epsilon_high"] == 0.28
    assert "loss_type=dapo" not in moved


def test_a_run_of_another_trainer_has_that_trainers_checks(monkeypatch):
    """A dpo.yaml with a beta was judged as GRPO's; one without was refused."""
    asked = []
    monkeypatch.setattr(upgrade.compare, "compare", lambda *_, **more: asked.append(more["asked"]) or SAME)
    assert upgrade.own_settings("trl==1.16.0", "trl==1.15.0", DPO, "cpu", 100.0).verdict == SAFE
    (cases,) = asked
    assert {case.family for _, case in cases} == {"dpo-trainer"} and len(cases) > 20
    with pytest.raises(UsageError, match="NashMDTrainer has no check"):
        upgrade.own_settings("trl==1.16.0", "trl==1.15.0", Run("run.yaml", ("NashMDTrainer",)), "cpu", 100.0)


@pytest.mark.parametrize(
    "args, after, found, said",
    [
        ({"beta": 0.1}, {"beta": 0.2, "tools": None}, SAFE, "nothing moved"),
        ({}, {"beta": 0.2, "tools": None}, CHANGED, "default of beta: 0.1 -> 0.2"),
        ({"tools": None}, {"beta": 0.1}, NOT_SAFE, "wrong in checks of DPOTrainer; DPOConfig has no tools there"),
        ({"beta": 0.1, "tools": None}, {"beta": 0.1}, SAFE, "nothing moved"),
        ({"beta": 0.3, "tools": None}, {}, NOT_SAFE, "; DPOConfig has no beta there"),
        ({"beta": 0.1, "tools": ["f"]}, {"beta": 0.1}, CHANGED, "DPOConfig has no tools there, if it was set"),
        ({"beta": 0.1}, None, NOT_SAFE, "; TRL has no DPOConfig there"),
    ],
    ids=[
        "set",
        "left at its default",
        "gone",
        "every field, at its default",
        "every field",
        "one that the class computes",
        "no class",
    ],
)
def test_the_fields_of_a_runs_config_class_are_compared(monkeypatch, args, after, found, said):
    configs = {"DPOConfig": {"beta": 0.1, "tools": None}}, {} if after is None else {"DPOConfig": after}
    monkeypatch.setattr(upgrade.compare, "compare", lambda *_, **__: dataclasses.replace(SAME, configs=configs))
    part = upgrade.own_settings("trl==1.16.0", "trl==1.15.0", dataclasses.replace(DPO, args=args), "cpu", 100.0)
    assert part.verdict == found and said in part.summary


def test_there_is_no_upgrade_to_what_is_installed(tmp_path, monkeypatch):
    """It compared a release with itself, for up to two hours."""
    monkeypatch.setattr(upgrade, "installed", lambda package: "1.16.0")
    with pytest.raises(UsageError, match=r"trl==1\.16\.0 is installed here: there is nothing to upgrade to"):
        upgrade.check("trl==1.16.0", None, tmp_path, lambda line: None, "cpu", 100.0)


def test_next_is_the_newest_release(monkeypatch):
    monkeypatch.setattr(upgrade.releases, "newest", lambda package: SimpleNamespace(version=f"9.{len(package)}"))
    assert upgrade.resolved("trl==NEXT") == "trl==9.3" and upgrade.resolved("trl==1.15.0") == "trl==1.15.0"
    with pytest.raises(UsageError, match="write PKG==VER"):
        upgrade.resolved("trl")
