"""`parity list` and `doctor`: tables that fit a terminal, JSON in the documented structures, values for the shell."""

import json

import pytest
from click.shell_completion import ShellComplete
from click.testing import CliRunner

from parity.cli import commands
from parity.decoding import convert
from parity.results import json_output


def printed(*words, width="80"):
    return CliRunner(env={"COLUMNS": width}).invoke(commands.main, words)


def test_ids_are_whole_and_lines_fit():
    done = printed("list")
    lines = done.output.splitlines()
    assert done.exit_code == 0 and max(map(len, lines)) <= 80
    ids = [line.split()[0] for line in lines if line.startswith("  ") and line[2] != " "]
    assert ids == [i["id"] for i in json.loads(printed("list", "--json").output)] and len(ids) > 50


@pytest.mark.parametrize(
    ("words", "kind", "says"),
    [
        (["--family", "policy,logprobs"], json_output.ImplementationOut, "liger.cross_entropy"),
        (["--settings", "policy"], json_output.SettingOut, "grpo, bnpo"),
        (["--settings", "dpo-trainer"], json_output.SettingOut, "alpha_divergence"),
        (["--checks", "gkd-trainer"], json_output.CheckOut, "run as: released"),
        (["--profiles"], json_output.ProfileOut, "nightly"),
    ],
)
def test_each_section_as_a_table_and_as_json(words, kind, says):
    table = printed("list", *words)
    assert says in " ".join(table.output.split()) and max(map(len, table.output.splitlines())) <= 80
    found = json.loads(printed("list", *words, "--json").output)
    assert found and convert(list[kind], found, "list")


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--family", "polcy"], "did you mean policy?"),
        (["--settings", "divergenc"], "did you mean divergence?"),
        (["--checks", "dpo-trainr"], "did you mean dpo-trainer?"),
        (["--checks", "policy"], "trainer 'policy' is unknown"),
        (["--checks", "dpo-trainer", "--profiles"], "use one of"),
    ],
)
def test_a_slip_of_the_pen_is_named(words, says):
    done = printed("list", *words)
    assert done.exit_code == 2 and says in done.output


def test_doctor_as_json():
    found = convert(json_output.DoctorOut, json.loads(printed("doctor", "--json").output), "doctor")
    assert "trl.GRPOTrainer" in found.ready and "torch" in found.versions


@pytest.mark.parametrize(
    ("words", "word", "offers"),
    [
        (["run", "--family"], "logprobs,po", ["logprobs,policy"]),
        (["run", "--implementation"], "trl.self", ["trl.self_distillation"]),
        (["run", "--profile"], "n", ["nightly"]),
        (["run", "--dtype"], "fp32,b", ["fp32,bf16"]),
        (["run", "--device"], "cu", ["cuda"]),
        (["replay"], "liger-luspo", ["liger-luspo-padding"]),
        (["list", "--checks"], "gk", ["gkd-trainer"]),
    ],
)
def test_the_shell_completes_values(words, word, offers):
    found = ShellComplete(commands.main, {}, "parity", "_PARITY_COMPLETE").get_completions(words, word)
    assert [item.value for item in found] == offers
