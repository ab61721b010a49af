"""Values of trainers' checks: others for each seed of a case, and those of seed 0 as they always were."""

import subprocess
import sys

import pytest
import torch

from parity.case.profiles import PROFILES
from parity.errors import Unsupported
from parity.trainers import catalogue
from parity.trainers.check import tells
from parity.trainers.rig import drawn, models, stored_window
from parity.trainers.specs import TRAINERS


def values(seed):
    with drawn.of_case(seed):
        weight = models.model("llama").get_output_embeddings().weight
        return stored_window.rows(4), stored_window.reward(["w3 w4"]), weight.detach()


def test_another_seed_moves_every_value():
    (rows, reward, weight), (others, another, moved) = values(0), values(7)
    assert rows == stored_window.rows(4) and torch.equal(weight, values(0)[2])
    assert [r.completion for r in rows] != [r.completion for r in others]
    assert reward != another and not torch.equal(weight, moved)
    lengths = [[len(r.completion.split()) for r in each] for each in (rows, others)]
    assert lengths[0] != lengths[1] and sorted(lengths[0]) == sorted(lengths[1])
    assert all(len({r.prompt for r in each}) == 4 for each in (rows, others))


def test_a_process_that_a_check_starts_has_the_same_values():
    line = "from parity.trainers.rig.drawn import normal; print(normal(1, 'x', (2,)).tolist())"
    with drawn.of_case(7):
        out = subprocess.run([sys.executable, "-c", line], capture_output=True, text=True, check=True).stdout
        assert out.strip() == str(drawn.normal(1, "x", (2,)).tolist())
    assert out.strip() != str(drawn.normal(1, "x", (2,)).tolist())


@pytest.mark.parametrize("profile", PROFILES)
def test_runs_of_another_seed_have_cases_of_it(profile):
    seeds = {case.seed for name in TRAINERS for case in catalogue.cases(name, profile, 31)}
    assert seeds <= ({0} if PROFILES[profile].derandomised else {31})


def test_a_case_is_run_with_its_own_seed(monkeypatch):
    seen = []
    monkeypatch.setattr(catalogue, "_rows", lambda *_, **__: seen.append(drawn.seed()) or ())
    case = catalogue.family("dpo-trainer").case(31, "fp32", {"check": "step-one"})
    assert not catalogue.rows_of(case, catalogue.implementations()["dpo-trainer.released"])
    assert seen == [31] and drawn.seed() == 0


def test_values_that_test_nothing_are_a_fault_under_seed_0_alone():
    """The fixed values were chosen to test something; under another seed the case is left out, with the reason."""
    for seed in (0, 7):
        with drawn.of_case(seed):
            assert catalogue.judge(tells("beyond", True, "both sides")).agrees
    assert not catalogue.judge(tells("beyond", False, "one side")).agrees
    with drawn.of_case(7), pytest.raises(Unsupported, match="one side: under this seed"):
        tells("beyond", False, "one side")
