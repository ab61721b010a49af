"""The settings audit on implementations whose answer is known: wrong ones, refusing ones, ones without a parameter."""

from __future__ import annotations

import dataclasses
import warnings
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

from cases.selftest.mutants.mutant import mutants, originals
from parity.case.inputs import Inputs
from parity.cli.commands import main
from parity.families.probes import PROBES, Probe, example
from parity.fixes import FusedLinearGRPOLoss
from parity.implementations.implementation import Implementation, Outputs, require
from parity.implementations.user import from_function
from parity.registry import NAMES, family, loss_family
from parity.sampling.find import find
from parity.tools.audit import NEW, NOTHING, Answer, Pairs, answer, exit_code, markdown, pair

HONEST = {name: originals(name)[0].implementation for name in ("policy", "logprobs")}


def nothing_known(row, case):
    return None


def probe(name: str, label: str) -> Probe:
    return next(p for p in PROBES[name] if p.label.startswith(label))


def asked(implementation: Implementation, label: str, known=nothing_known) -> Answer:
    pairs = Pairs(implementation.family, probe(implementation.family, label), "cpu")
    return answer(implementation, pairs, 1, known)


def mutant(name: str, mistake: str) -> Implementation:
    return next(m.implementation for m in mutants(name) if m.name == mistake)


@pytest.mark.parametrize(
    ("name", "mistake", "label", "expected"),
    [
        ("policy", "temperature-forgotten", "temperature", "ignored"),
        ("policy", "softcap-forgotten", "softcap", "ignored"),
        ("policy", "adapter-ignored", "head=lora", "ignored"),
        ("policy", "tied-embedding-ignored", "head=tied", "ignored"),
        ("policy", "epsilon-high-ignored", "epsilon_high", "ignored"),
        ("policy", "delta-forgotten", "delta", "ignored"),
        ("policy", "bias-correction-dropped", "use_bias_correction_kl", "ignored"),
        ("policy", "bias-correction-twice", "use_bias_correction_kl", "wrong"),
        ("policy", "ratio-dropped", "ratio=token", "ignored"),
        ("policy", "ratio-as-log", "ratio=token", "wrong"),
        ("policy", "tool-mask-dropped", "holes", "ignored"),
        ("policy", "sequence-as-token", "importance_sampling_level", "ignored"),
        ("policy", "micro-batch-for-batch", "other_tokens", "ignored"),
        ("policy", "accumulation-twice", "accumulation=4 (dapo)", "wrong"),
        ("policy", "accumulation-forgotten", "accumulation=4", "ignored"),
        ("policy", "generation-forgotten", "steps_per_generation", "ignored"),
        ("logprobs", "bias-forgotten", "bias", "ignored"),
        ("logprobs", "temperature-before-softcap", "temperature=0.7 (with softcap", "wrong"),
        ("logprobs", "ignored-scored", "ignored", "wrong"),
        ("logprobs", "entropy-gradient-missing", "entropy", "wrong"),
    ],
)
def test_wrong_implementations_get_their_answer(name, mistake, label, expected):
    found = asked(mutant(name, mistake), label)
    assert (found.answer, found.silent) == (expected, True)
    assert found.new
    assert asked(HONEST[name], label).answer == "honoured"


def edited(edit, name: str = "policy") -> Implementation:
    honest = HONEST[name]
    return dataclasses.replace(honest, id="edited", call=lambda x: edit(x, honest.call))


def without_delta(x: Inputs, call) -> Outputs:
    settings = type(x.settings)(**vars(x.settings) | {"delta": None})
    return call(dataclasses.replace(x, settings=settings))


def warns(x: Inputs, call) -> Outputs:
    if x.settings.delta is not None:
        warnings.warn("delta is not supported and has no effect", stacklevel=1)
    return without_delta(x, call)


def refuses(x: Inputs, call) -> Outputs:
    if x.settings.delta is not None:
        raise ValueError(f"delta={x.settings.delta} is not supported")
    return call(x)


def a_fix_of_ours_refuses(x: Inputs, call) -> Outputs:
    if x.settings.delta is not None:
        FusedLinearGRPOLoss(loss_type="nothing")
    return call(x)


def crashes(x: Inputs, call) -> Outputs:
    return call(x) if x.settings.delta is None else {"loss": torch.zeros(2) @ torch.zeros(3)}


@pytest.mark.parametrize(
    ("edit", "expected", "new", "silent", "reason"),
    [
        (warns, "ignored", True, False, ""),
        (refuses, "refused", False, None, "delta=1.8 is not supported"),
        (a_fix_of_ours_refuses, "refused", False, None, "nothing"),
        (crashes, "crashed", True, False, ""),
    ],
)
def test_warnings_clear_errors_and_unclear_ones_are_told_apart(edit, expected, new, silent, reason):
    found = asked(edited(edit), "delta")
    assert (found.answer, found.new, found.silent) == (expected, new, silent) and reason in found.reason


def test_what_the_interpreter_cannot_run_is_not_absent():
    def edit(x: Inputs, call) -> Outputs:
        require(x.settings.delta is None, "Triton's interpreter: no such thing")
        return call(x)

    assert asked(edited(edit), "delta").answer == "not run"


def test_a_setting_honoured_on_some_cases_alone_is_wrong():
    def edit(x: Inputs, call) -> Outputs:
        return without_delta(x, call) if example(loss_family("policy"), 0)["B"] == x.settings.B else call(x)

    pairs = Pairs("policy", probe("policy", "delta"), "cpu")
    found = answer(edited(edit), pairs, 2, nothing_known)
    assert found.answer == "wrong"
    assert {one.case.settings.get("B") for one in pairs.moving(0, "fp32")} == {3, None}


def test_a_pair_on_which_nothing_moves_is_no_answer(monkeypatch):
    monkeypatch.setattr("parity.tools.audit.MOVES", 0.0)
    pairs = Pairs("policy", dataclasses.replace(probe("policy", "temperature"), value=1.0), "cpu")
    found = answer(HONEST["policy"], pairs, 1, nothing_known)
    assert (found.answer, found.reason) == ("not run", "no case on which the definition moves")


def plain_loss(hidden, weight, ids, mask, advantages, old_logps=None):
    logps = torch.log_softmax(hidden @ weight.T, -1).gather(-1, ids.unsqueeze(-1)).squeeze(-1)
    ratio = (logps - (logps.detach() if old_logps is None else old_logps)).exp()
    loss = -torch.minimum(ratio * advantages[:, None], ratio.clamp(0.8, 1.2) * advantages[:, None])
    return ((loss * mask).sum(1) / mask.sum(1).clamp(min=1)).mean()


def test_a_function_without_the_parameter_is_absent_and_says_so():
    own = from_function(plain_loss, "own", [loss_family(name) for name in NAMES])
    found = asked(own, "delta")
    assert (found.answer, found.new) == ("absent", False)
    assert "no parameter delta" in found.reason
    assert asked(own, "old").answer == "honoured"
    assert asked(own, "lengths").answer == "honoured"


def test_what_the_ledger_covers_is_known_and_no_new_finding():
    found = asked(mutant("policy", "delta-forgotten"), "delta", lambda row, case: f"entry for {row.implementation}")
    assert found.answer == "ignored"
    assert found.known == ("entry for mutant.policy.delta-forgotten",)
    assert not found.new
    partly = asked(mutant("policy", "delta-forgotten"), "delta", lambda row, case: row.quantity == "loss" or None)
    assert partly.known == ()


def test_effects_are_ratios_to_the_definition():
    found = asked(mutant("policy", "accumulation-twice"), "accumulation=4 (dapo)")
    assert (found.loss, found.gradient) == (pytest.approx(0.25, rel=1e-5), pytest.approx(0.25, rel=1e-5))
    assert asked(HONEST["policy"], "accumulation=4").loss == pytest.approx(1.0, rel=1e-4)


@pytest.mark.parametrize("name", NAMES)
def test_every_probe_moves_the_definition_or_says_that_it_stays(name):
    for one in PROBES[name]:
        for base in range(len(one.bases)):
            found = next(Pairs(name, one, "cpu").moving(base, "fp32"), None)
            assert found is not None, (
                f"{one.label}: no case on which the definition {'stays' if one.stays else 'moves'}"
            )


@pytest.mark.parametrize("name", NAMES)
def test_labels_tell_probes_apart_and_name_settings_of_the_family(name):
    labels = [p.label for p in PROBES[name]]
    assert len(set(labels)) == len(labels)
    assert {p.setting for p in PROBES[name]} <= set(family(name).settings)


def test_both_sides_of_a_pair_share_every_tensor_but_the_settings_own():
    one = probe("policy", "temperature")
    made = pair("policy", one, {}, "fp32", 0)
    assert made.still.inputs.settings.temperature == 1.0
    assert made.moved.inputs.settings.temperature == 0.7
    assert all(made.still.inputs.tensors[n] is t for n, t in made.moved.inputs.tensors.items())
    dropped = pair("policy", probe("policy", "ratio=token"), {}, "fp32", 0)
    assert [n for n, t in dropped.moved.inputs.tensors.items() if dropped.still.inputs.tensors[n] is not t] == [
        "importance_sampling_ratio"
    ]
    assert example(loss_family("policy"), 0) != example(loss_family("policy"), 1)
    assert made.moved.exact["loss"] != made.still.exact["loss"]


def test_what_is_wrong_without_the_setting_is_not_blamed_on_it():
    found = asked(mutant("policy", "logps-scaled-1e-2"), "temperature")
    assert (found.answer, found.new) == ("not run", False)
    assert "without the setting" in found.reason

    def edit(x: Inputs, call) -> Outputs:
        out = call(x)
        return out | {"loss": out["loss"] * 1.1} if example(loss_family("policy"), 0)["B"] == x.settings.B else out

    assert asked(edited(edit), "temperature").answer == "honoured"


def test_damage_by_one_implementation_does_not_reach_the_next():
    pairs = Pairs("policy", probe("policy", "temperature"), "cpu")
    damaging = mutant("policy", "hidden-damaged")
    first, second = (answer(i, pairs, 1, nothing_known) for i in (damaging, HONEST["policy"]))
    assert (first.answer, second.answer) == ("honoured", "honoured")


def test_tables_and_exit_codes():
    found = asked(mutant("policy", "delta-forgotten"), "delta")
    fine = asked(HONEST["policy"], "delta")
    nothing = dataclasses.replace(fine, answer="not run", reason="not installed")
    assert exit_code([found, fine]) == NEW
    assert exit_code([fine]) == 0
    assert exit_code([nothing]) == NOTHING
    many = [dataclasses.replace(nothing, probe=dataclasses.replace(nothing.probe, value=n)) for n in range(7)]
    text = markdown([found, fine, *many], "torch 2")
    assert "Not run: not installed: 7 settings." in text
    crashed = dataclasses.replace(nothing, reason="a ValueError")
    assert "Not run: a ValueError: delta=1.8." in markdown([crashed], "torch 2")
    absent = [dataclasses.replace(fine, answer="absent", role=role, implementation=role) for role in ("reference", "b")]
    assert "Not in this release: delta=1.8." in markdown(absent, "").partition("b")[2]
    assert "| delta=1.8 |" in text
    assert "ignored" in text and "new" in text
    assert "Honoured: delta=1.8." in text


OWN = """
import torch
def loss(hidden, weight, ids, mask, advantages, old_logps=None, delta=None):
    logps = torch.log_softmax(hidden @ weight.T, -1).gather(-1, ids.unsqueeze(-1)).squeeze(-1)
    ratio = (logps - (logps.detach() if old_logps is None else old_logps)).exp()
    one = -torch.minimum(ratio * advantages[:, None], ratio.clamp(0.8, 1.2) * advantages[:, None])
    return ((one * mask).sum(1) / mask.sum(1).clamp(min=1)).mean()
"""


def test_the_command_on_a_users_own_function(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("own.py").write_text(OWN)
    monkeypatch.setattr("parity.registry.load", dict)
    words = ["audit", "--implementation", "own.py:loss", "--setting", "delta", "--setting", "old", "--cases", "1"]
    done = CliRunner().invoke(main, words)
    assert done.exit_code == 1, done.output
    assert "1 honoured" in done.output and "1 ignored" in done.output
    assert Path("reports/audit.md").read_text().startswith("# Settings audit\n\nWritten by `parity")
    (case,) = Path("reports/findings").glob("*.json")
    case, implementation = find(case.stem)
    assert (case.settings["delta"], implementation) == (1.8, "own.py:loss")
