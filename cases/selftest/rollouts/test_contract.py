"""The contract of an engine: what a real vLLM was asked holds, and each line is broken by its fault alone."""

import dataclasses

import pytest
import torch

from cases.selftest.rollouts.controls import first
from parity import data, recording
from parity.rollouts import contract, engine_models, record, scoring
from parity.rollouts.engine_models import opened
from parity.rollouts.record import RecordingOptions

JUDGED = {"model": None, "adapter": None, "support": "truncated"}


def of(name, rows=2):
    return first(recording.load(data.rollouts_dir() / "contract" / f"llama-fp32-{name}"), rows)


def test_a_real_vllm_keeps_every_line():
    names = [p.stem.removeprefix("llama-fp32-") for p in (data.rollouts_dir() / "contract").glob("*.json")]
    found = [(r, contract.held(r, **JUDGED)[1]) for r in (of(name, 4) for name in names)]
    assert len(found) == 8 and all(r.facts["engine"].startswith("vllm") for r, _ in found)
    assert not any(broken for _, broken in found)
    table = contract.table(found)
    assert table.pop("push") == "not asked" and all(answer.startswith("holds") for answer in table.values())


def put(values, at, value):
    values = values.clone()
    values[at] = value
    return values


FAULTS = [
    ("processed", "t1-p1", lambda r: {"sampler_logps": r.sampler_logps - 0.01}),
    ("raw", "t0.7-p0.8", lambda r: {"raw_logps": r.sampler_logps}),
    ("temperature", "t0.7-p1", lambda r: {"sampler_logps": r.raw_logps}),
    ("temperature", "t0.7-p0.8", lambda r: {"sampler_logps": r.raw_logps}),
    ("top-p", "t1-p0.8", lambda r: {"sampler_logps": r.trainer_logps}),
    ("top-p", "t0.7-p0.8", lambda r: {"sampler_logps": r.trainer_logps}),
    ("top-k", "t1-p1-k5", lambda r: {"sampler_logps": r.trainer_logps}),
    ("place", "t1-p1", lambda r: {"sampler_logps": put(r.sampler_logps.roll(1, 1), (slice(None), 0), -1.0)}),
    ("missing", "t1-p1", lambda r: {"sampler_logps": put(r.sampler_logps, (1, 2), torch.nan)}),
    ("missing", "t1-p1", lambda r: {"sampler_logps": put(r.sampler_logps, (slice(None), slice(0, None, 3)), 0.0)}),
    ("order", "t1-p1-order", lambda r: {"sampler_logps": r.sampler_logps.roll(1, 0)}),
    ("batch size", "t1-p1-batch-size", lambda r: {"sampler_logps": r.sampler_logps + 1e-3}),
    ("prefix cache", "t1-p1-prefix-cache", lambda r: {"sampler_logps": put(r.sampler_logps, (0, 0), -0.5)}),
]


@pytest.mark.parametrize("line, name, fault", FAULTS)
def test_a_fault_breaks_its_line_alone(line, name, fault):
    found = of(name)
    _, broken = contract.held(dataclasses.replace(found, **fault(found)), **JUDGED)
    assert broken.keys() == {line}
    table = contract.table([(found, broken)])
    assert table[line] == broken[line] and sum(answer == broken[line] for answer in table.values()) == 1


def test_the_likeliest_tokens_in_place_of_the_sampled_ones():
    found = of("t1-p1")
    rows = scoring.rows_from(found.rows(), found.mask, "cpu")
    own = scoring.score(engine_models.loaded(engine_models.folder_of("tiny-llama"), torch.float32), rows, 1.0)
    likeliest = rows.back(own.logits.log_softmax(-1).amax(-1))
    _, broken = contract.held(dataclasses.replace(found, sampler_logps=likeliest), **JUDGED)
    assert broken == {"place": f"{found.name}: those of the likeliest token"}


def test_what_nothing_explains_blames_no_setting_and_every_recording_counts():
    found = of("t0.7-p0.8")
    moved = dataclasses.replace(found, sampler_logps=found.sampler_logps - 0.01)
    broken = contract.held(moved, **JUDGED)[1]
    assert broken.keys() == {"processed"}
    table = contract.table([(moved, broken)] * 3)
    assert table["processed"] == f"{broken['processed']}; 2 more recordings"
    assert not [line for line, answer in table.items() if answer.startswith("holds")]


def test_what_nothing_was_recorded_of_is_not_asked():
    table = contract.table([(of("t1-p1"), {})])
    assert [name for name, answer in table.items() if answer == "not asked"] == [
        *("temperature", "top-p", "top-k", "order", "batch size", "prefix cache", "push")
    ]
    uncached = dataclasses.replace(
        of("t1-p1-prefix-cache"), facts={**of("t1-p1-prefix-cache").facts, "cached_tokens": 0}
    )
    assert contract.table([(uncached, {})])["prefix cache"] == "not asked"


def by_length(sample):
    """Answers in the order in which they are done: the first prompts are in it already."""

    def wrong(request):
        found = sample(request)
        order = sorted(range(len(request.prompts)), key=lambda i: (len(request.prompts[i]), i))
        return dataclasses.replace(
            found, **{n: [getattr(found, n)[i] for i in order] for n in ("completions", "logps", "raw")}
        )

    return wrong


def slow_alone(sample):
    """Another kernel, a wrong one, for a batch of one."""

    def wrong(request):
        found = sample(request)
        return (
            found
            if len(request.prompts) > 1
            else dataclasses.replace(found, logps=[[x - 0.01 for x in found.logps[0]]])
        )

    return wrong


def mixed_up(sample):
    """A cache that knows prompts by their first block."""
    seen = {}

    def wrong(request):
        first = [seen.setdefault(tuple(p[:16]), p) if len(p) > 16 else p for p in request.prompts]
        return sample(dataclasses.replace(request, prompts=first))

    return wrong


@pytest.mark.parametrize(
    "fault, broken",
    [(lambda s: s, set()), (by_length, {"order", "raw"}), (slow_alone, {"batch size"})]
    + [(mixed_up, {"prefix cache", "raw"})],
)
def test_a_live_engine_is_asked_what_breaks_it(tmp_path, monkeypatch, fault, broken):
    monkeypatch.setattr(contract, "SHARED", 16)
    monkeypatch.setattr(record, "engine", lambda options, folder, longest: fault(opened(str(folder), "fp32", longest)))
    options = RecordingOptions("tiny-llama", "transformers", tmp_path, rows=2, max_tokens=4, contract=True)
    found = [(r, contract.held(r, **JUDGED)[1]) for r in map(recording.load, record.record(options))]
    table = contract.table(found)
    assert {name for name, answer in table.items() if not answer.startswith(("holds", "not asked"))} == broken
    assert table["temperature"] == "not asked" and len(found) == 5
