"""What a user does with a trainer or a loss on a GPU, on the pretended device: watch, capture, replay, the fixes."""

import json

import pytest
import torch

import parity
from cases.cuda import test_training as on_a_device
from fixtures.pretended_cuda import pretended
from parity.case.case import Case
from parity.fixes import apply
from parity.judge.products import products
from parity.registry import run_case, select
from parity.rollouts.scoring import undisturbed
from parity.trainers.rig import drive, models
from parity.upstream import trl

BF16 = {"bf16": True, "beta": 0.04, "max_steps": 2, "gradient_checkpointing": False}


@pytest.fixture
def device():
    models.model("llama")  # made of real tensors
    with pretended():
        yield


@pytest.fixture
def tf32():
    """As transformers' `tf32=True` allows it: beside this torch's older switches raise."""
    before = torch.backends.fp32_precision, torch.backends.cuda.matmul.fp32_precision
    torch.backends.fp32_precision = torch.backends.cuda.matmul.fp32_precision = "tf32"
    yield
    torch.backends.fp32_precision, torch.backends.cuda.matmul.fp32_precision = before


def trained(tmp_path, watched):
    """Weights and random states after two steps; their lines of the watch, and the case of the first step."""
    trainer = drive.build("GRPOTrainer", models.model("llama"), BF16, "cuda")
    assert all(p.device.type == "cuda" for p in trainer.model.parameters())
    torch.manual_seed(0)
    if watched:
        watch = parity.watch(trainer, to=tmp_path / "w.ndjson", every=1)
        with parity.capture(trainer, to=tmp_path / "case.json"), trl.quiet():
            trainer.train()
        # the pretended device's tensors are not shaken: noise is left out, and what is judged by it
        assert "loss" not in {finding.what for finding in watch.findings}
    else:
        with trl.quiet():
            trainer.train()
    return [*(p.detach().cpu() for p in trainer.model.parameters()), torch.get_rng_state(), torch.cuda.get_rng_state()]


def test_a_watched_run_of_a_trainer(tmp_path, device):
    alone, watched = trained(tmp_path, False), trained(tmp_path, True)
    assert all(torch.equal(a, b) for a, b in zip(alone, watched, strict=True))
    lines = [json.loads(line) for line in (tmp_path / "w.ndjson").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2] and lines[0]["tokens"] > 20
    case = Case.load(tmp_path / "case.json")
    assert case.settings["context"] == "autocast"
    for where in ("cpu", "cuda"):
        rows = list(run_case(case, select(["trl.GRPOTrainer"]), where, thorough=False))
        assert {r.verdict for r in rows if r.implementation == "trl.GRPOTrainer"} == {"agree"}


def test_the_fixes_of_a_trainer(device, tf32):
    trainer = drive.build("GRPOTrainer", models.model("llama"), BF16, "cuda")
    with apply(trainer) as done:
        assert "computes the logits" in done["use_model_logits"].reason
        with trl.quiet():
            trainer.train()


def test_a_loss_under_autocast(tmp_path, device):
    on_a_device.test_a_captured_loss_under_autocast(tmp_path)


def test_the_probe_of_products_where_tf32_is_allowed_by_the_newer_switch(device, tf32):
    assert products.__wrapped__("cuda").tf32 == "ieee"  # not cached
    assert torch.backends.cuda.matmul.fp32_precision == "tf32"


@pytest.mark.parametrize("within", [drive.seeded, lambda: undisturbed(torch.nn.Linear(1, 1))])
def test_random_states_of_all_gpus_are_put_back(within, device, monkeypatch):
    states = [torch.cuda.get_rng_state().clone() for _ in range(2)]
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_rng_state", lambda gpu: states[gpu].clone())
    monkeypatch.setattr(torch.cuda, "set_rng_state", lambda state, gpu: states.__setitem__(gpu, state))
    before = [state.clone() for state in states]
    with within():
        for state in states:
            state[:8] += 1
    assert all(map(torch.equal, states, before))
