"""`parity.fixes.check`: settings to findings to fixes, from a config, a script or a trainer, with nothing executed or changed."""

import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

from parity import data
from parity.errors import UsageError
from parity.fixes import check
from parity.results.ledger import Ledger
from parity.results.user import ForUser
from parity.tools import advice
from parity.tools.advice import LIBRARIES, Run, Unknown, holds
from parity.trainers.rig import drive, models

pytest.importorskip("trl")
pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.timeout(300)]


def found(source, **more):
    """Id -> finding, of all runs of a file."""
    return {f.entry.id: f for one in check(source, **more) for f in one.findings}


def config(tmp_path, text):
    path = tmp_path / "config.yaml"
    path.write_text(text)
    return path


def script(tmp_path, text):
    path = tmp_path / "train.py"
    path.write_text("raise SystemExit('executed')\n" + text)
    return path


def test_a_config_with_a_model_whose_softcap_is_left_out(tmp_path):
    text = "model_name_or_path: google/recurrentgemma-2b\nnum_generations: 8\ntop_entropy_quantile: 0.8\n"
    (one,) = check(config(tmp_path, text), trainer="GRPOTrainer")
    assert one
    assert one.findings[0].entry.id == "softcap-names"
    assert "fix: `apply`" in str(one)
    quantile = next(f for f in one.findings if f.entry.id == "trl-grpo-quantile-minus-inf")
    assert not quantile.certain
    assert "if a token is banned" in str(quantile)


def test_settings_with_nothing_wrong(tmp_path):
    text = "model_name_or_path: Qwen/Qwen2.5-0.5B\nnum_generations: 8\ngradient_checkpointing: false\n"
    (one,) = check(config(tmp_path, text), trainer="GRPOTrainer")
    assert not one
    assert not any(f.certain for f in one.findings)
    assert "softcap-names" not in found(config(tmp_path, text), trainer="GRPOTrainer")


def test_a_config_that_fits_several_trainers_says_so(tmp_path):
    path = config(tmp_path, "model_name_or_path: google/recurrentgemma-2b\nlearning_rate: 1.0e-6\n")
    assert "does not say which trainer" in found(path)["softcap-names"].unless_known
    assert not any(check(path))
    assert not found(path, trainer="GRPOTrainer")["softcap-names"].unless_known


def test_a_default_of_one_trainer_is_not_taken_for_that_of_another():
    user = ForUser(applies=({"trainer": ["DPOTrainer"], "beta": {"min": 0.05}},))  # GRPO's default is 0, DPO's 0.1
    entry = SimpleNamespace(user=user, severity="low", in_force=lambda: True)
    (met,) = advice._met(Run("x", ("GRPOTrainer", "DPOTrainer"), certain=False), [entry])
    assert met.unless_known == "the file does not say which trainer runs: DPOTrainer"


ONLINE = """
from trl.experimental.online_dpo import OnlineDPOConfig, OnlineDPOTrainer as Trained
STEPS = {steps}
Trained(model="Qwen/Qwen2.5-0.5B", args=OnlineDPOConfig(output_dir="x", gradient_accumulation_steps=STEPS)).train()
"""


@pytest.mark.parametrize(("steps", "applies"), [("4", True), ("1", False), ("int(argv[1])", None)])
def test_a_script_is_read_and_not_run(tmp_path, steps, applies):
    entry = next(e for e in Ledger.load(data.ledger_file()).entries if e.id == "trl-online-dpo-accumulation")
    if not entry.in_force():
        pytest.skip("the installed releases have it mended")
    finding = found(script(tmp_path, ONLINE.format(steps=steps))).get(entry.id)
    assert (finding is None) is (applies is False)
    if finding is not None:
        assert finding.certain is (applies is True)
        assert ("is not a literal" in finding.unless_known) is (applies is None)


def test_a_subclass_a_default_and_what_cannot_be_read(tmp_path):
    text = "from trl import DPOTrainer, DPOConfig\nclass Mine(DPOTrainer): pass\n"
    exact = text + "Mine('m', DPOConfig(f_divergence_type='alpha_divergence', f_alpha_divergence_coef={}))"
    assert "dpo-alpha-divergence" not in found(script(tmp_path, exact.format(0.5)))
    assert found(script(tmp_path, exact.format(0.3)))["dpo-alpha-divergence"].certain
    assert "dpo-alpha-divergence" not in found(script(tmp_path, text + "Mine('m', DPOConfig())"))
    assert (
        "gives **x" in found(script(tmp_path, text + "Mine('m', DPOConfig(**x))"))["dpo-alpha-divergence"].unless_known
    )


@pytest.mark.parametrize(
    "made",
    [
        "class DPOTrainer(trl.DPOTrainer): pass\nDPOTrainer",
        "class Log: pass\nclass Mine(Log, trl.DPOTrainer): pass\nMine",
        "class Trainer(trl.DPOTrainer): pass\nTrainer",
        "trl.DPOTrainer",
    ],
)
def test_a_class_of_the_script_and_the_model_as_its_first_argument(tmp_path, made):
    finding = found(script(tmp_path, f"import trl\n{made}('google/recurrentgemma-2b', args=trl.DPOConfig())"))
    assert finding["softcap-names"].certain


def test_words_are_read_as_the_parser_of_a_config_reads_them(tmp_path):
    online = found(config(tmp_path, 'gradient_accumulation_steps: "4"'), trainer="OnlineDPOTrainer")
    assert online["trl-online-dpo-accumulation"].certain
    weighted = "loss_type: hinge\nuse_weighting: 'yes'\nmodel_name_or_path: llama\n"
    assert found(config(tmp_path, weighted))["dpo-weighting-in-place"].certain
    assert "dpo-weighting-in-place" not in found(config(tmp_path, weighted.replace("yes", "no")))


def test_a_trainer_is_looked_at_and_left_as_it_is():
    args = drive.arguments(drive.config("GRPOTrainer"), "cpu", {"gradient_checkpointing": False})
    trainer = drive.build("GRPOTrainer", models.model("llama"), args)
    before = dict(vars(trainer.model)), torch.random.get_rng_state()
    assert "head-hook" not in found(trainer)
    assert dict(vars(trainer.model)) == before[0]
    assert torch.equal(torch.random.get_rng_state(), before[1])
    trainer.model.get_output_embeddings().register_forward_hook(lambda module, inputs, output: output)
    assert "head-hook" in found(trainer)


def test_every_condition_of_the_ledger_is_one_that_is_understood():
    words = {"trainer", "model", "imports", "uses", "liger", *LIBRARIES}
    from parity.upstream import trl

    names = ("GRPO", "DPO", "SFT", "GKD", "OnlineDPO")
    fields = {field for name in names for field in trl.fields(trl.class_named(f"{name}Config"))} | {"modules_to_save"}
    for entry in Ledger.load(data.ledger_file()).entries:
        for table in entry.user.applies:
            assert set(table) <= words | fields, entry.id
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
        ("x.yaml", "services: {web: 1}", "x.yaml: it names no trainer"),
        ("x.json", "{", "x.json: not a readable"),
        ("x.py", "def", "x.py: not a readable"),
        ("x.py", "import trl", "x.py: it names no trainer"),
        ("training_args.bin", "", "training_args.bin: expected settings in a .yaml or .json file"),
        ("", "", "no such file"),
    ],
)
def test_what_cannot_be_read_is_refused(tmp_path, name, text, told):
    path = tmp_path / (name or "missing.yaml")
    if name:
        path.write_text(text)
    with pytest.raises(UsageError, match=told):
        check(path)
    with pytest.raises(UsageError, match="trainer 'GRPO' is unknown"):
        check(path, trainer="GRPO")


def test_a_value_that_is_no_number_is_not_taken_for_a_match_or_for_none(tmp_path):
    text = "fp16: {}\ntemperature: {}\n"
    id = "trl-entropy-fp16-overflow"
    if id not in found(config(tmp_path, text.format("true", "0.05")), trainer="GRPOTrainer"):
        pytest.skip("the installed releases have it mended")
    assert (
        "temperature is 'cold'"
        in found(config(tmp_path, text.format("true", "cold")), trainer="GRPOTrainer")[id].unless_known
    )
    assert (
        "fp16 is 'maybe'"
        in found(config(tmp_path, text.format("maybe", "1e-2")), trainer="GRPOTrainer")[id].unless_known
    )
    assert id not in found(config(tmp_path, text.format("maybe", "0.7")), trainer="GRPOTrainer")


def test_what_a_script_says_twice_or_later_cannot_be_told(tmp_path):
    text = (
        "from trl import DPOConfig\nx = DPOConfig(f_divergence_type='alpha_divergence', f_alpha_divergence_coef=0.5)\n"
    )
    assert "dpo-alpha-divergence" not in found(script(tmp_path, text))
    later = found(script(tmp_path, text + "x.f_alpha_divergence_coef = 0.3\n"))["dpo-alpha-divergence"]
    assert "is assigned to" in later.unless_known
    twice = found(script(tmp_path, text + "y = DPOConfig()\n"))["dpo-alpha-divergence"]
    assert "calls DPOConfig 2 times" in twice.unless_known


@pytest.mark.parametrize("trainer", ["OnlineDPOTrainer", "GRPOTrainer", "DPOTrainer", "KTOTrainer"])
def test_the_arguments_that_a_trainer_saves(tmp_path, trainer):
    args = drive.arguments(drive.config(trainer), "cpu", {"gradient_accumulation_steps": 4})
    path = tmp_path / "args.json"
    path.write_text(args.to_json_string())
    online = found(path, trainer=None if trainer.startswith("Online") else trainer).get("trl-online-dpo-accumulation")
    assert (online is not None and online.certain) == trainer.startswith("Online")  # its fields are of no other trainer


def test_a_script_that_makes_arguments_alone(tmp_path):
    text = "import trl.experimental.online_dpo as o\nargs = o.OnlineDPOConfig('x', gradient_accumulation_steps=4)"
    assert found(script(tmp_path, text))["trl-online-dpo-accumulation"].certain


def test_the_command(tmp_path):
    def run(*arguments):
        command = [sys.executable, "-m", "parity.fixes", "check", *map(str, arguments)]
        return subprocess.run(command, capture_output=True, text=True, timeout=120)

    done = run(config(tmp_path, "model_name_or_path: google/recurrentgemma-2b\n"), "--trainer", "SFTTrainer")
    assert (done.returncode, "[high] softcap-names" in done.stdout) == (1, True)
    assert run(tmp_path / "missing.yaml").returncode == 2
