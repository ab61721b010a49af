"""Recordings of a real vLLM against the trainer: the shipped ones, every fault put in on purpose, and the exact relations."""

import dataclasses

import pytest
import torch
from click.testing import CliRunner

from cases.selftest.rollouts.controls import CONTROLS
from parity import data, recording
from parity.case.case import normal
from parity.cli.commands import main
from parity.errors import UsageError
from parity.judge.recipe import DTYPES
from parity.rollouts import models, report
from parity.rollouts.judge import FULL, judge
from parity.rollouts.scoring import Scores, Trainer, kept_mass, score
from parity.rollouts.statistics import statistics


def trainer_of(found):
    return Trainer(models.folder_of(found.facts["model"]), DTYPES[found.facts["dtype"]])


def test_the_shipped_recordings():
    """Three models, two dtypes, two temperatures, two top-p, by a real vLLM, of the weights that are built here."""
    found = [recording.named(name) for name in recording.shipped()]
    assert len(found) == 24
    assert len({(r.facts["model"], r.facts["dtype"], r.facts["temperature"], r.facts["top_p"]) for r in found}) == 24
    assert all(r.facts["engine"].startswith("vllm") for r in found)
    assert sum(f.stat().st_size for f in data.rollouts_dir().rglob("*")) < 2e6
    for r in found:
        assert models.weights_hash(models.folder_of(r.facts["model"])) == r.facts["weights"]


@pytest.mark.parametrize("name", ["gemma2-fp32-t0.7-p1", "qwen2-bf16-t1-p1", "llama-fp32-t0.7-p0.8"])
def test_a_real_engine_agrees(name):
    found = recording.named(name)
    verdict = judge(found, trainer_of(found))
    assert verdict.agrees, report.text(found, verdict)
    assert verdict.found.tokens > 1000 and max(verdict.gates.values()) > 0.2  # the unit is of the right size


@pytest.mark.parametrize("control", CONTROLS.values(), ids=lambda c: c.name)
@pytest.mark.parametrize("name", ["gemma2-bf16-t0.7-p0.8"])
def test_every_control_is_red(control, name):
    found = recording.named(name)
    verdict = judge(*control.make(found, trainer_of(found)))
    assert not verdict.agrees
    expected = {
        "temperature_forgotten": "raw log-probs: the temperature is not in them",
        "truncation_forgotten": "those of the distribution that was sampled from",
        "shifted": "each belongs to the token before it",
    }
    assert verdict.explanation == expected.get(control.name)
    if control.name in ("stale_weights", "adapter_not_merged"):
        assert abs(verdict.found.mean_ratio - 1) < 0.02  # a gate on the mean ratio would have passed them


def test_small_updates_are_seen_in_float32():
    found = recording.named("llama-fp32-t0.7-p0.8")
    verdict = judge(*CONTROLS["stale_weights"].make(found, trainer_of(found)))
    assert not verdict.agrees and verdict.found.outside < 0.01  # weights 0.1 % apart: no ratio looks wrong


def test_the_ratio_to_the_whole_vocabulary_is_the_kept_mass():
    """full - truncated = log K at every token: the mean ratio of truncated sampling is the kept mass, not 1."""
    found = recording.named("llama-fp32-t0.7-p0.8")
    folder, f = models.folder_of(found.facts["model"]), found.facts
    model = models.loaded(folder, torch.float32)
    scores = score(model, found.rows(), 32, f["temperature"], f["top_p"])
    mask = found.mask & (scores.kept > 0)
    ratio = (scores.full - found.sampler_logps.double()).exp()
    assert torch.allclose(ratio[mask], scores.kept[mask], rtol=1e-4)
    assert float(ratio[mask].mean()) == pytest.approx(float(scores.kept[mask].mean()), rel=1e-5)
    assert 0.8 < float(scores.kept[mask].mean()) < 0.99
    assert torch.allclose((scores.full - scores.truncated)[mask], scores.kept[mask].log(), rtol=0, atol=1e-14)
    verdict = judge(found, trainer_of(found), FULL)
    assert not verdict.agrees and 0.8 < verdict.found.mean_ratio < 0.99


@pytest.mark.parametrize(("top_p", "top_k"), [(0.8, 0), (1.0, 5), (0.6, 7), (0.05, 0), (1.0, 0)])
def test_the_kept_tokens_are_those_of_transformers(top_p, top_k):
    from transformers import TopKLogitsWarper, TopPLogitsWarper

    logits = normal(7, "logits", (31, 41)) * 3
    warped = TopKLogitsWarper(top_k)(None, logits) if top_k else logits
    warped = TopPLogitsWarper(top_p)(None, warped) if top_p < 1 else warped
    truncated, full = warped.log_softmax(-1), logits.log_softmax(-1)
    for token in range(0, 41, 4):
        ids = torch.full((31,), token)
        scores = Scores(full[:, token], kept_mass(full, ids, top_p, top_k))
        assert torch.allclose(scores.truncated, truncated[:, token], rtol=0, atol=1e-12)


def test_statistics_by_hand():
    d = torch.tensor([[0.0, 0.2, float("nan")], [-0.2, -torch.inf, 9.0]], dtype=torch.float64)
    mask = torch.tensor([[True, True, True], [True, True, False]])
    s = statistics(d, mask, torch.full((2, 3), -0.5, dtype=torch.float64))
    assert (s.tokens, s.unscored, s.cut) == (3, 1, 1)
    assert s.mean == pytest.approx(0.0) and s.rms == pytest.approx((0.08 / 3) ** 0.5)
    assert s.outside == pytest.approx(2 / 3) and s.quantiles[-1] == pytest.approx(0.2)
    r = torch.tensor([0.0, 0.2, -0.2]).double().exp()
    assert s.ess == pytest.approx(float(r.sum() ** 2 / r.square().sum() / 3))


def test_the_command_reports_with_pictures(tmp_path):
    path = data.rollouts_dir() / "llama-fp32-t0.7-p0.8"
    done = CliRunner().invoke(main, ["rollouts", "judge", str(path), "--reports", str(tmp_path)])
    assert done.exit_code == 0 and "agrees" in done.output and "says nothing of its GPU kernels" in done.output
    page = (tmp_path / "rollouts.html").read_text()
    assert page.count("<svg") == 2 and page.count("<circle") > 1000
    done = CliRunner().invoke(main, ["rollouts", "judge", str(path), "--support", "full", "--reports", str(tmp_path)])
    assert done.exit_code == 1 and "those of the distribution that was sampled from" in done.output


def test_damaged_log_probs_are_red():
    found = recording.named("llama-fp32-t0.7-p0.8")
    wrong = dataclasses.replace(found, sampler_logps=found.sampler_logps + 1e-4)
    verdict = judge(wrong, trainer_of(found))
    assert verdict.gates["mean"] > 1


def test_another_function_is_no_noise(monkeypatch):
    """transformers 5.19 runs Gemma-2 with sdpa and drops the softcap on its attention scores."""
    found = recording.named("gemma2-fp32-t0.7-p1")
    trainer, load = trainer_of(found), models.loaded
    assert "sdpa attention" in trainer_of(recording.named("llama-fp32-t1-p1")).scorings(found.rows(), 32)

    def dropped(folder, dtype, attention="eager"):
        model = load(folder, dtype)
        if attention == "sdpa":
            for layer in model.model.layers:
                layer.self_attn.attn_logit_softcapping = None
        return model

    monkeypatch.setattr(models, "has_sdpa", lambda folder: True)
    monkeypatch.setattr(models, "loaded", dropped)
    assert "sdpa attention" not in trainer.scorings(found.rows(), 32)


def test_a_trainer_whose_logits_are_nan_is_an_error():
    found = recording.named("llama-fp32-t1-p1")

    def broken(model):
        model.get_output_embeddings().weight.data.fill_(torch.nan)
        return model

    with pytest.raises(UsageError, match="row 0: the trainer's logits are NaN"):
        judge(found, dataclasses.replace(trainer_of(found), change=broken))
