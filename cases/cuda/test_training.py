"""A trainer and a loss on a real device: the watch is silent where all is right, a captured batch agrees on both devices."""

import functools

import pytest
import torch

import parity
from cases.selftest.tools.test_capture import batch, policy_loss, verdicts
from cases.selftest.watching.runs import DEVICE, grpo, of, sampler, watched
from parity.case.case import Case
from parity.registry import run_case, select
from parity.upstream import trl

pytestmark = [pytest.mark.cuda, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


PRECISIONS: dict[str, dict[str, bool]] = {"fp32": {}, "bf16": {"bf16": True}, "fp16": {"fp16": True}}
TWO = {name: PRECISIONS[name] for name in ("fp32", "bf16")}


@pytest.mark.parametrize("mixed", PRECISIONS.values(), ids=PRECISIONS)
@pytest.mark.parametrize("name", ["grpo", "rloo-trainer", "dpo-trainer", "kto-trainer", "sft-trainer"])
def test_a_clean_run_is_silent(name, mixed, tmp_path):
    wanted = {"max_steps": 6, **mixed}
    trainer = grpo(sampler, beta=0.04, **wanted) if name == "grpo" else of(name, **wanted)
    assert next(trainer.model.parameters()).device.type == DEVICE
    watch, lines = watched(trainer, tmp_path)
    assert not watch.findings and len(lines) == 6, [f.text for f in watch.findings]


@pytest.mark.parametrize("mixed", TWO.values(), ids=TWO)
def test_a_wrong_temperature_is_named(mixed, tmp_path):
    watch, _ = watched(grpo(functools.partial(sampler, temperature=0.9), temperature=0.7, **mixed), tmp_path)
    found = [cause for finding in watch.findings for cause in finding.causes]
    assert found and all("temperature 0.9 where the trainer's is 0.7" in cause for cause in found), found


@pytest.mark.parametrize("mixed", TWO.values(), ids=TWO)
def test_a_captured_batch_agrees_on_both_devices(mixed, tmp_path):
    trainer = grpo(sampler, beta=0.04, **mixed)
    with parity.capture(trainer, to=tmp_path / "case.json"), trl.quiet():
        trainer.train()
    case = Case.load(tmp_path / "case.json")
    for where, names in {"cpu": ["trl.GRPOTrainer"], "cuda": ["trl.*", "liger.*"]}.items():  # Triton compiles for CUDA
        chosen = [i for i in select(names) if i.family == case.family]
        rows = list(run_case(case, chosen, where, thorough=False))
        assert {r.verdict for r in rows if r.implementation == "trl.GRPOTrainer"} == {"agree"}
        assert not [r for r in rows if r.new]


def test_a_captured_loss_under_autocast(tmp_path):
    there = {n: x.detach().cuda().requires_grad_(x.requires_grad) for n, x in batch().items() if torch.is_tensor(x)}
    with parity.capture(policy_loss, to=tmp_path / "c.json") as loss, torch.autocast("cuda", torch.bfloat16):
        loss(**there, temperature=0.7).backward()
    case = Case.load(tmp_path / "c.json")
    assert case.settings["context"] == "autocast" and set(verdicts(case, policy_loss).values()) == {"agree"}
