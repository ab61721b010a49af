"""Batches of real steps as cases: captured, read with their hash, judged, minimised; refused where they contradict themselves."""

import inspect
import json
import shutil

import pytest
import torch
from click.testing import CliRunner

import parity
from parity.case.case import Case
from parity.cli.commands import main
from parity.errors import UsageError
from parity.implementations.user import from_function
from parity.judging.assess import CaseOracle
from parity.registry import family, loss_families, loss_family, run_case
from parity.tools.minimise import minimise


def policy_loss(hidden, weight, ids, mask, advantages, temperature=1.0, old_logps=None, epsilon=0.2):
    """GRPO, written out."""
    logps = torch.log_softmax(hidden.float() @ weight.float().T / temperature, -1)
    logps = logps.gather(-1, ids.long()[..., None])[..., 0]
    ratio = torch.exp(logps - (logps.detach() if old_logps is None else old_logps))
    a = advantages[:, None]
    terms = -torch.minimum(ratio * a, ratio.clamp(1 - epsilon, 1 + epsilon) * a) * mask
    return (terms.sum(-1) / mask.sum(-1).clamp(min=1)).mean()


def five_percent_in_the_last_row(hidden, weight, ids, mask, advantages, temperature=1.0, old_logps=None, epsilon=0.2):
    scale = torch.ones(len(advantages))
    scale[-1] = 1.05 if len(advantages) else 1.0
    return policy_loss(hidden, weight, ids, mask, advantages * scale, temperature, old_logps, epsilon)


def of_few_settings(hidden, weight, ids, mask, advantages):
    return policy_loss(hidden, weight, ids, mask, advantages)


def batch(dtype=torch.float32, **more):
    torch.manual_seed(3)
    mask = torch.ones(3, 5, dtype=torch.long)
    mask[0, 4:] = mask[1, 1] = 0
    return {
        "hidden": torch.randn(3, 5, 8).to(dtype).requires_grad_(),
        "weight": torch.nn.Parameter((torch.randn(11, 8) * 0.3).to(dtype)),
        "ids": torch.randint(0, 11, (3, 5)),
        "mask": mask,
        "advantages": torch.tensor([1.0, -1.0, 0.5]),
        "temperature": 0.7,
        **more,
    }


@pytest.fixture
def captured(tmp_path):
    """A batch of a user's own loss, scaled by 3 before backward."""
    with parity.capture(policy_loss, to=tmp_path / "case.json") as loss:
        (3 * loss(**batch())).backward()
    return tmp_path / "case.json"


def implementation(function):
    return from_function(function, f"my.py:{function.__name__}", [loss_family(n) for n in loss_families()])


def verdicts(case, function):
    return {r.quantity: r.verdict for r in run_case(case, [implementation(function)])}


def test_the_batch_of_a_call_is_a_case_that_is_judged(captured):
    case = Case.load(captured)
    x = family("policy").build(case)
    given = batch()
    for name in ("hidden", "weight", "ids", "mask", "advantages"):
        assert torch.equal(x.tensors[name], given[name]), name
    assert float(x.cotangents["loss"]) == 3.0  # what reached the loss in the real backward
    assert x.settings.temperature == 0.7 and x.settings.holes and x.settings.lengths == [4, 5, 5]
    right = verdicts(case, policy_loss)
    assert set(right.values()) == {"agree"} and "grad_weight" in right
    assert verdicts(case, five_percent_in_the_last_row)["loss"] == "disagree"


def test_only_the_call_that_is_asked_for(tmp_path):
    with parity.capture(policy_loss, to=tmp_path / "c.json", step=2, rows=2) as loss:
        for factor in (1.0, 0.5, 2.0):
            loss(**batch(advantages=torch.tensor([factor, -1.0, 0.5])))
    x = family("policy").build(Case.load(tmp_path / "c.json"))
    assert x.advantages.tolist() == [0.5, -1.0] and x.hidden.shape[0] == 2
    said = "called 1 times, so there is no step 2"
    with pytest.raises(UsageError, match=said), parity.capture(policy_loss, to=tmp_path / "none.json", step=2) as loss:
        loss(**batch())
    assert not (tmp_path / "none.json").exists()


@pytest.mark.parametrize(
    ("dtype", "context"), [(torch.bfloat16, "autocast"), (torch.float16, "autocast_fp16")], ids=str
)
def test_autocast_is_captured(tmp_path, dtype, context):
    with parity.capture(policy_loss, to=tmp_path / "c.json") as loss, torch.autocast("cpu", dtype):
        loss(**batch())
    case = Case.load(tmp_path / "c.json")
    assert case.settings["context"] == context and set(verdicts(case, policy_loss).values()) == {"agree"}


@pytest.mark.parametrize("name", ["GRPOTrainer", "SFTTrainer"])
def test_a_step_of_a_real_trainer(tmp_path, name):
    """The definition gives the loss that the trainer logged, and TRL's own code agrees on the batch."""
    from parity.trainers.rig import drive, models

    wanted = {"max_steps": 2, "temperature": 0.9, "beta": 0.04} if name == "GRPOTrainer" else {"max_steps": 2}
    trainer = drive.build(name, models.model("llama"), wanted)
    with parity.capture(trainer, to=tmp_path / "case.json", step=2):
        trainer.train()
    assert "compute_loss" not in vars(trainer)
    told = json.loads((tmp_path / "case.json").read_text())
    case = Case.load(tmp_path / "case.json")
    oracle = CaseOracle.of(family(case.family), case)
    exact = oracle.exact.get("loss")
    if name == "SFTTrainer":
        exact = (oracle.exact["logps"] * oracle.inputs.cotangents["logps"]).sum()
    assert float(exact) == pytest.approx(told["captured"]["loss"], rel=1e-5, abs=1e-7)
    if name == "GRPOTrainer":
        from parity.registry import select

        rows = list(run_case(case, select(["trl.GRPOTrainer"]), thorough=False))
        judged = [r for r in rows if r.implementation == "trl.GRPOTrainer"]
        assert {r.verdict for r in judged} == {"agree"}
        assert {"loss", "kl", "grad_weight"} <= {r.quantity for r in judged}


def test_what_is_near_a_threshold_is_undecided(tmp_path):
    """A ratio of exactly 1 + ε: rounding alone decides, so the token is masked out and counted."""
    given = batch()
    with torch.no_grad():
        table = torch.log_softmax(given["hidden"] @ given["weight"].T / 0.7, -1)
    old = table.gather(-1, given["ids"][..., None])[..., 0].clone()
    old[2, 3] -= torch.tensor(1.2).log()
    with parity.capture(policy_loss, to=tmp_path / "case.json") as loss:
        loss(**given, old_logps=old)
    x = family("policy").build(Case.load(tmp_path / "case.json"))
    assert x.undecided == 1 and not x.mask[2, 3] and int(x.mask.sum()) == int(given["mask"].sum()) - 1


def test_the_smallest_part_keeps_all_that_failed(captured, tmp_path):
    small = minimise(Case.load(captured), implementation(five_percent_in_the_last_row), tmp_path / "small.json")
    again = Case.load(tmp_path / "small.json")
    assert again == small and again.id == small.id
    sizes = [family("policy").full_settings(again).__dict__[n] for n in "BTVH"]
    assert sizes == [1, 1, 2, 1]
    failing = {q for q, v in verdicts(again, five_percent_in_the_last_row).items() if v == "disagree"}
    assert failing == {"loss", "grad_hidden", "grad_weight"}
    with pytest.raises(UsageError, match="agrees, so there is nothing to minimise"):
        minimise(Case.load(captured), implementation(policy_loss), tmp_path / "none.json")
    with pytest.raises(UsageError, match="is not judged: .* has no parameter"):
        minimise(Case.load(captured), implementation(of_few_settings), tmp_path / "none.json")


def test_replay_minimises_and_says_how_far(captured, tmp_path):
    own = tmp_path / "own.py"
    own.write_text("\n\n".join(["import torch", *map(inspect.getsource, (policy_loss, five_percent_in_the_last_row))]))
    words = ["replay", str(captured), "--minimise", str(tmp_path / "small.json"), "--implementation"]
    done = CliRunner().invoke(main, [*words, f"{own}:five_percent_in_the_last_row"])
    assert done.exit_code == 1 and "B=1 T=1 V=2 H=1 of B=3 T=5 V=11 H=8" in " ".join(done.output.split()), done.output
    assert f"parity replay {tmp_path / 'small.json'}" in "".join(done.output.split("\n"))
    done = CliRunner().invoke(main, [*words, f"{own}:policy_loss"])
    assert done.exit_code == 125 and "agrees, so there is nothing to minimise" in done.output
    done = CliRunner().invoke(main, ["replay", "one-token", "--minimise", "x.json", "--implementation", "trl.*"])
    assert done.exit_code == 125 and "--minimise needs one --implementation" in done.output


def edited(path, **fields):
    data = json.loads(path.read_text())
    data["case"] |= fields
    path.write_text(json.dumps(data))
    return path


def test_what_does_not_fit_is_refused_in_one_line(captured, tmp_path):
    case = Case.load(captured)
    policy = family("policy")
    tensors = captured.with_suffix(".safetensors")
    moved = tmp_path / "elsewhere"
    moved.mkdir()
    shutil.copy(captured, moved)
    with pytest.raises(UsageError, match="are not there"):
        policy.build(Case.load(moved / "case.json"))
    content = bytearray(tensors.read_bytes())
    content[-1] ^= 1
    (moved / tensors.name).write_bytes(content)
    with pytest.raises(UsageError, match="SHA-256"):
        policy.build(Case.load(moved / "case.json"))
    shutil.copy(tensors, moved)
    assert Case.load(moved / "case.json").id == case.id  # what is in it counts, not where it lies
    for settings, said in (({"B": 2}, "B is 3 in these"), (dict(case.settings) | {"old": "mixed"}, "old is")):
        with pytest.raises(UsageError, match=said):
            policy.build(Case.load(edited(moved / "case.json", settings=settings)))
    with pytest.raises(UsageError, match="belong together"):
        Case.load(edited(moved / "case.json", sha256=None))
    with pytest.raises(UsageError, match="beside the case"):
        Case.load(edited(captured, tensors="../case.safetensors"))


def test_a_trainer_that_is_not_known_and_a_batch_without_value_are_refused(tmp_path):
    class Other:
        accelerator = None

        def compute_loss(self):
            """Never called."""

    with pytest.raises(UsageError, match="Other is no GRPOTrainer"), parity.capture(Other(), to=tmp_path / "a.json"):
        pass
    given = batch()
    given["hidden"] = torch.full_like(given["hidden"], torch.nan)
    with pytest.raises(UsageError, match="not finite"), parity.capture(policy_loss, to=tmp_path / "a.json") as loss:
        loss(**given)
    assert list(tmp_path.iterdir()) == []
