"""What a run judged, by setting, config field and logged key: counted from its rows, what was never judged first."""

import re

import msgspec
import pytest
from click.testing import CliRunner

from parity.cli.commands import main
from parity.errors import Unsupported
from parity.registry import run_case, select
from parity.results.header import About, Header
from parity.results.row import Row
from parity.tools.covered import covered
from parity.trainers import catalogue
from parity.trainers.rig import drive
from parity.trainers.specs import TRAINERS
from parity.upstream import trl
from parity.upstream.trl_configs import own_fields


def row(case, implementation="liger.cross_entropy", family="logprobs", verdict="agree", **more):
    given = {"case": case, "implementation": implementation, "family": family, "verdict": verdict, "dtype": "fp32"}
    return Row(**{"device": "cpu", "quantity": "loss", "settings": {"V": 3}, **given, **more})


def counts(rows):
    return {(c.of, c.kind, c.name): (c.judged, c.declined, c.why) for c in covered(rows)}


def test_settings_of_a_loss():
    found = counts(
        [
            row("a", settings={"V": 3, "temperature": 0.7}),
            row("a", settings={"V": 3, "temperature": 0.7}, quantity="grad_weight"),
            row("b", settings={"V": 3, "softcap": 30.0}, verdict="unsupported", quantity=None, message="no softcap"),
        ]
    )
    assert found["liger.cross_entropy", "setting", "temperature"] == (1, 0, ""), "two rows of one case count once"
    assert found["liger.cross_entropy", "setting", "softcap"] == (0, 1, "no softcap")
    assert found["liger.cross_entropy", "setting", "logit_scale"] == (0, 0, "no case of this run moves it")
    assert ("liger.cross_entropy", "setting", "V") not in found, "a size is no setting"


def test_what_was_never_judged_comes_first_then_what_is_excused():
    features = {"config": ["beta", "vllm_mode"], "logged": ["kl", "entropy", "epoch"]}
    of = {"implementation": "grpo-trainer.released", "family": "grpo-trainer", "settings": {"check": "twins"}}
    found = covered([row("a", features=features, quantity="kl", **of), row("a", quantity="gradient", **of)])
    told = {(c.kind, c.name): c for c in found}
    assert (told["logged", "kl"].judged, told["logged", "entropy"].judged) == (1, 0)
    assert told["logged", "entropy"].why == "no check has a definition of it"
    assert told["config", "beta"].judged == 1 and told["config", "delta"].why == "no case of this run moves it"
    assert ("logged", "epoch") not in told
    places = [found.index(told[key]) for key in (("config", "delta"), ("config", "top_k"), ("config", "beta"))]
    assert places == sorted(places) and told["config", "top_k"].why.startswith("how completions are sampled")


def test_the_rows_of_a_trainer_say_what_its_cell_moved_and_logged(tmp_path):
    case = catalogue.family("sft-trainer").case(0, "fp32", {"check": "losses", "loss": "nll", "smoothing": 0.1})
    rows = list(run_case(case, [i for i in select(()) if i.id == "sft-trainer.released"]))
    found = counts(rows)
    assert found["sft-trainer", "config", "label_smoothing_factor"][0] == 1
    assert found["sft-trainer", "config", "assistant_only_loss"][0] == 0
    file = tmp_path / "results.ndjson"
    header = Header(run="x", header=About(profile="pr"))
    file.write_bytes(b"\n".join(msgspec.json.encode(line.to_json()) for line in (header, *rows)) + b"\n")
    table = CliRunner().invoke(main, ["list", "--coverage", str(file)])
    assert table.exit_code == 0 and "no case of this run moves it" in " ".join(table.output.split())
    assert re.search(r"label_smoothing_factor +1 ", table.output)


@pytest.mark.parametrize("trainer", TRAINERS.values())
def test_the_fields_read_from_files_are_those_that_the_config_has(trainer):
    from transformers import TrainingArguments

    name = f"{trainer.removesuffix('Trainer')}Config"
    try:
        known = trl.fields(drive.config(trainer))
    except Unsupported:
        pytest.skip(f"the installed TRL has no {name}, or cannot import it here")
    assert set(own_fields(name)) == set(known) - set(TrainingArguments.__dataclass_fields__)
