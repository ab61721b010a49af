"""`parity findings --config`: settings to findings to fixes."""

import re

import pytest
from click.testing import CliRunner

from cases.selftest.results.runs import in_order
from parity import data
from parity.cli.commands import main
from parity.errors import UsageError
from parity.results.ledger import Ledger
from parity.results.report.stack import Stack
from parity.tools import settings_check
from parity.tools.settings_check import LIBRARIES, Run, Unknown, advice, holds, run_of
from parity.trainers.rig import drive
from parity.upstream import trl

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.timeout(300)]


def checked(path, trainer=None):
    ledger = Ledger.load(data.ledger_file())
    return advice(run_of(path, trainer, ledger), ledger)


def found(path, trainer=None):
    """Id -> on what besides the settings it depends whether it applies."""
    return checked(path, trainer).conditions


def config(tmp_path, text):
    path = tmp_path / "config.yaml"
    path.write_text(text)
    return path


def test_a_config_with_a_model_whose_softcap_is_left_out(tmp_path):
    text = "model_name_or_path: google/recurrentgemma-2b\nnum_generations: 8\ntop_entropy_quantile: 0.8\n"
    one = checked(config(tmp_path, text), trainer="GRPOTrainer")
    assert one
    assert one.stack.entries[0].id == "softcap-names"
    assert one.conditions["trl-grpo-quantile-minus-inf"]


def test_a_trainer_in_the_file_is_the_runs(tmp_path):
    one = checked(config(tmp_path, "trainer: RLOOTrainer\nlearning_rate: 1.0e-6\nnum_generations: 8\n"))
    assert one.run.trainers == ("RLOOTrainer",) and one.run.unread == ()
    assert checked(config(tmp_path, "trainer: GRPOTrainer\n"), "SFTTrainer").run.trainers == ("SFTTrainer",)


def test_of_no_known_defects_none_is_counted_as_certain(tmp_path):
    one = checked(config(tmp_path, "learning_rate: 1.0e-6\n"), "GRPOTrainer")
    counted = sum(e.severity != "convention" for e in one.stack.entries)
    assert ("for certain" in one.title) is bool(counted)
    assert not settings_check.Advice(one.run, Stack({}, ()), {}, {}).title.endswith("for certain")


def test_settings_with_nothing_wrong(tmp_path):
    text = "model_name_or_path: Qwen/Qwen2.5-0.5B\nnum_generations: 8\ngradient_checkpointing: false\n"
    one = checked(config(tmp_path, text), trainer="GRPOTrainer")
    assert not one
    assert all(one.conditions.values())
    assert "softcap-names" not in found(config(tmp_path, text), trainer="GRPOTrainer")


@pytest.mark.parametrize(
    ("text", "unknown"),
    [
        (f"model_name_or_path: /{'a' * 3000}", "no readable config.json"),
        ("model_name_or_path: {here}", "no readable config.json"),
        (f"gradient_accumulation_steps: {10**400}", "gradient_accumulation_steps is 1000"),
    ],
    ids=["long", "no table", "huge"],
)
def test_values_that_say_nothing_are_unknown(tmp_path, text, unknown):
    (tmp_path / "config.json").write_text("[]")
    said = found(config(tmp_path, text.replace("{here}", str(tmp_path))), "OnlineDPOTrainer").values()
    assert any(unknown in condition and len(condition) < 200 for condition in said)


@pytest.mark.parametrize(
    ("text", "trainer", "id"),
    [
        ("packing: true\nmodel_name_or_path: openai/gpt-oss-20b", "SFTTrainer", "sft-packed-leak"),
        ("padding_free: true\nmodel_name_or_path: Qwen/Qwen2.5-VL-3B-Instruct", "SFTTrainer", "sft-packed-leak"),
        ("padding_free: true\nmodel_name_or_path: zai-org/GLM-4.1V-9B-Thinking", "SFTTrainer", "sft-packed-leak"),
    ],
)
def test_a_model_is_known_by_its_name_on_the_hub(tmp_path, text, trainer, id):
    assert id in found(config(tmp_path, text), trainer=trainer)
    other = re.sub("model_name_or_path: .*", "model_name_or_path: Qwen/Qwen3-0.6B", text)
    assert id not in found(config(tmp_path, other), trainer=trainer)


def test_names_that_are_no_settings_are_told(tmp_path, monkeypatch):
    text = "gradient_accumulation_stepss: 8\nmodel_name_or_path: gpt2\ndataset_name: x\ntraining: {beta: 0.1}\n"
    assert checked(config(tmp_path, text), "OnlineDPOTrainer").run.unread == (
        "gradient_accumulation_stepss",
        "training",
    )
    saved = trl.configured(drive.config("GRPOTrainer"), "cpu", {}).to_json_string()
    (tmp_path / "args.json").write_text(saved)
    assert checked(tmp_path / "args.json", "GRPOTrainer").run.unread == ()
    monkeypatch.setattr(settings_check, "_fields_of", lambda config: {})  # a release without them
    assert checked(config(tmp_path, text), "OnlineDPOTrainer").run.unread == ()


def test_words_are_read_as_the_parser_of_a_config_reads_them(tmp_path):
    online = found(config(tmp_path, 'gradient_accumulation_steps: "4"'), trainer="OnlineDPOTrainer")
    assert not online["trl-online-dpo-accumulation"]
    weighted = "loss_type: hinge\nuse_weighting: 'yes'\nmodel_name_or_path: llama\n"
    assert not found(config(tmp_path, weighted))["dpo-weighting-in-place"]
    assert "dpo-weighting-in-place" not in found(config(tmp_path, weighted.replace("yes", "no")))


def test_every_condition_of_the_ledger_is_one_that_is_understood():
    words = {"trainer", "model", "uses", "liger", "modules_to_save", *LIBRARIES}
    tables = [(entry.id, table) for entry in Ledger.load(data.ledger_file()).entries for table in entry.user.applies]
    everyone = {name for _, table in tables for name in table.get("trainer", ())}
    for id, table in tables:
        fields = {field for name in table.get("trainer", everyone) for field in settings_check._fields(name)}
        assert set(table) <= words | fields or not fields, id
        for wanted in table.values():
            assert not isinstance(wanted, dict) or set(wanted) <= {"min", "max", "not"}


def test_three_answers():
    run = Run("x", ("GRPOTrainer",), args={"beta": 0.5, "epsilon": Unknown("why")}, models=(Unknown("a variable"),))
    assert holds(run, "beta", {"min": 0.1}) is True
    assert holds(run, "beta", {"max": 0.1}) is False
    assert holds(run, "epsilon", {"max": 0.1}) == Unknown("why")
    assert holds(run, "temperature", {"min": 1.0}) is True  # TRL's default
    assert holds(run, "no_such_setting", True) is False
    assert holds(run, "model", ["llama"]) == Unknown("a variable")
    assert holds(run, "trl", ">=0") is True
    assert holds(run, "trl", "<0.1") is False


@pytest.mark.parametrize(
    ("name", "text", "told"),
    [
        ("x.yaml", "a: [1", "x.yaml: not a readable"),
        ("x.yaml", "3", "x.yaml: expected a table"),
        ("x.yaml", "services: {web: 1}", "x.yaml: its settings are none of a trainer"),
        ("x.yaml", "learning_rate: 1.0e-6", "x.yaml: its settings fit .*, GRPOTrainer.*say which runs it"),
        ("x.json", "{", "x.json: not a readable"),
        ("x.py", "import trl", "x.py: expected settings in a .yaml or .json file"),
        ("training_args.bin", "", "training_args.bin: expected settings in a .yaml or .json file"),
        ("", "", "cannot be read: No such file"),
    ],
)
def test_what_cannot_be_read_is_refused(tmp_path, name, text, told):
    path = tmp_path / (name or "missing.yaml")
    if name:
        path.write_text(text)
    with pytest.raises(UsageError, match=told):
        checked(path)
    with pytest.raises(UsageError, match="trainer 'GRPO' is unknown"):
        checked(path, trainer="GRPO")


def test_a_file_whose_settings_fit_several_trainers_is_of_the_one_that_its_name_has(tmp_path):
    path = tmp_path / "my-grpo_7b.yaml"
    path.write_text("learning_rate: 1.0e-6")
    assert "my-grpo_7b.yaml: GRPOTrainer;" in checked(path).title


def test_a_value_that_is_no_number_is_not_taken_for_a_match_or_for_none(tmp_path):
    text = "fp16: {}\ntemperature: {}\n"
    id = "trl-entropy-fp16-overflow"
    for fp16, temperature, said in (("true", "cold", "temperature is 'cold'"), ("maybe", "1e-2", "fp16 is 'maybe'")):
        path = config(tmp_path, text.format(fp16, temperature))
        assert said in found(path, trainer="GRPOTrainer")[id]
    assert id not in found(config(tmp_path, text.format("maybe", "0.7")), trainer="GRPOTrainer")


def test_arguments_do_not_say_whether_a_lora_is_trained(tmp_path):
    """TrainingArguments have neither a model nor a `peft_config`; a file for `trl grpo --config` names the model."""
    server = "use_vllm: true\nvllm_mode: server\n"
    absent = checked(config(tmp_path, server), "GRPOTrainer").absent
    assert "vllm-server-unmerged" in absent["use_peft"] and "softcap-names" in absent["model_name_or_path"]
    named = server + "model_name_or_path: Qwen/Qwen3-0.6B\n"
    assert "vllm-server-unmerged" not in found(config(tmp_path, named), "GRPOTrainer")
    lora = named + "use_peft: true\n"
    assert found(config(tmp_path, lora), "GRPOTrainer")["vllm-server-unmerged"] == ""
    assert "vllm-server-unmerged" not in found(config(tmp_path, lora.replace("server", "colocate")), "GRPOTrainer")


@pytest.mark.parametrize("trainer", ["OnlineDPOTrainer", "GRPOTrainer", "DPOTrainer", "KTOTrainer"])
def test_the_arguments_that_a_trainer_saves(tmp_path, trainer):
    args = trl.configured(drive.config(trainer), "cpu", {"gradient_accumulation_steps": 4})
    path = tmp_path / "args.json"
    path.write_text(args.to_json_string())
    online = found(path, trainer=None if trainer.startswith("Online") else trainer).get("trl-online-dpo-accumulation")
    assert (online == "") == trainer.startswith("Online")  # its fields are of no other trainer


def test_the_command(tmp_path):
    def run(*arguments):
        return CliRunner().invoke(main, ["findings", "--config", *map(str, arguments)])

    done = run(config(tmp_path, "model_name_or_path: google/recurrentgemma-2b\n"), "--trainer", "SFTTrainer")
    in_order(done.output, "SFTTrainer; trl ", " 1 high", "high: default", "DPO, GRPO, KTO,", "softcap-names")
    assert done.exit_code == 1
    fine = "model_name_or_path: Qwen/Qwen2.5-0.5B\ngradient_checkpointing: false\n"
    assert run(config(tmp_path, fine), "--trainer", "SFTTrainer").exit_code == 0
    assert run(tmp_path / "missing.yaml").exit_code == 2
