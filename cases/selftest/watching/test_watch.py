"""`parity.watch` in real trainers: silent where all is right, the cause by name where one is planted, and nothing changed."""

import functools
import itertools
import logging
import re
import subprocess
import sys

import pytest
import torch

import parity
from cases.selftest.slow import number
from cases.selftest.watching.runs import corrected, grpo, of, sampler, vllm, watched
from parity.trainers.rig import drive
from parity.upstream import trl
from parity.watching import definition


def causes(watch):
    return [cause for finding in watch.findings for cause in finding.causes]


def filled(logps):
    logps = logps.clone()
    logps[::3] = 0.0
    return logps


def early(logps):
    return torch.cat([logps[1:], logps[:1]])


def noisy(logps):
    """Ten times what bfloat16 would explain: its noise is 0.05 on an H100."""
    return logps + 0.5 * torch.randn(logps.shape, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("wanted", [{"temperature": 0.7, "beta": 0.04}, {"loss_type": "dapo", "num_iterations": 2}])
def test_a_clean_run_is_silent(tmp_path, dtype, wanted, said):
    watch, lines = watched(grpo(sampler, dtype=dtype, **wanted), tmp_path)
    assert not watch.findings and all("round away in bfloat16" in line for line in said)
    assert lines[0]["watch/trainer_units"] <= 3 and lines[0]["watch/sampler_units"] <= 3 and lines[0]["tokens"] > 20


@pytest.mark.parametrize("change, found", [(torch.clone, "no findings"), (torch.neg, "1 finding")])
def test_a_run_ends_with_where_it_was_looked_at_and_how_much_was_found(tmp_path, monkeypatch, change, found):
    lines = []
    monkeypatch.setattr(logging.getLogger("parity.watch"), "warning", lambda text, *given: lines.append(text % given))
    watched(grpo(functools.partial(sampler, change=change)), tmp_path)
    assert re.fullmatch(rf"watch: looked at step 1, 2 in [0-9.]+ s: {found}", lines[-1])


STEPS = number("CASES", 40)
"""Of each of the 2 x 27 runs, each step looked at: 2,160."""
DTYPES = torch.float32, torch.bfloat16
LOSSES = "grpo", "bnpo", "dr_grpo", "dapo", "cispo", "sapo", "luspo", "vespo"
SETTINGS = [
    *(("corrected", {"loss_type": loss, "beta": 0.04 * (n % 2)}) for n, loss in enumerate(LOSSES)),
    *(("grpo", {"model": model, "temperature": 0.7, "beta": 0.04}) for model in ("qwen2", "gemma2", "cohere")),
    ("grpo", {"num_iterations": 2, "loss_type": "dapo"}),
    ("grpo", {"importance_sampling_level": "sequence", "num_iterations": 2, "epsilon": 0.01}),
    ("grpo", {"gradient_accumulation_steps": 2, "per_device_train_batch_size": 4, "gradient_checkpointing": True}),
    ("rloo-trainer", {"beta": 0.05}),
    ("rloo-trainer", {"model": "gemma2", "num_iterations": 2}),
    *(("dpo-trainer", {"loss_type": [loss]}) for loss in ("sigmoid", "hinge", "ipo", "apo_down")),
    ("dpo-trainer", {"model": "gemma2", "gradient_accumulation_steps": 2}),
    ("kto-trainer", {"loss_type": "kto"}),
    ("kto-trainer", {"loss_type": "apo_zero_unpaired"}),
    ("sft-trainer", {"loss_type": "nll", "gradient_accumulation_steps": 2}),
    ("sft-trainer", {"loss_type": "dft"}),
    ("online-dpo-trainer", {}),
    ("distillation-trainer", {"model": "gemma2"}),
]


@pytest.mark.slow
@pytest.mark.parametrize("dtype, settings", itertools.product(DTYPES, SETTINGS))
def test_a_long_clean_run_is_silent(tmp_path, dtype, settings):
    name, wanted = settings
    wanted = {"max_steps": STEPS, "dtype": dtype, "num_train_epochs": 99, **wanted}
    made = {"grpo": grpo, "corrected": corrected}.get(name)
    trainer = of(name, **wanted) if made is None else made(sampler, **wanted)
    watch, lines = watched(trainer, tmp_path)
    assert not watch.findings and len(lines) == STEPS


@pytest.mark.parametrize(
    "dtype, planted, cause",
    [
        (torch.bfloat16, {"temperature": 0.9}, "temperature 0.9 where the trainer's is 0.7"),
        (torch.float32, {"raw": True}, "temperature 1 (raw log-probs: none is applied) where the trainer's is 0.7"),
        (torch.bfloat16, {"top_p": 0.8}, "(top-p 0.8: 0."),
        (torch.float32, {"top_k": 20}, "(top-k 20: "),  # a kept mass of 0.999 is within the noise of bf16
        (torch.float32, {"min_p": 0.1}, "min-p 0.1: 0."),
        (torch.float32, {"min_p": 0.07}, "min-p 0.07: 0."),  # no support that is listed
        (torch.float32, {"top_p": 0.62}, "(top-p 0.6"),
        (torch.float32, {"top_k": 7}, "(top-k 7: "),
        *((torch.bfloat16, kept, "of the tokens that it kept") for kept in ({"top_p": 0.62}, {"min_p": 0.07})),
        (torch.float32, {"sequence_bias": {(9,): 6.0}}, "the sampler adds 6 to the logit of token 9"),
        (torch.float32, {"suppress_tokens": [28]}, "the sampler bans token 28"),
        (torch.bfloat16, {"change": early}, "each log-prob belongs to the token after it"),
        (torch.float32, {"change": filled}, "log-probs are 0: missing ones were filled"),
        (torch.float32, {"change": torch.neg}, "their sign is turned"),
        (torch.float32, {"change": torch.zeros_like}, "all log-probs are 0"),
    ],
)
def test_a_wrong_sampler_is_named(tmp_path, dtype, planted, cause):
    watch, _ = watched(grpo(functools.partial(sampler, **planted), dtype=dtype, temperature=0.7), tmp_path)
    assert {f.what for f in watch.findings} == {"sampler"}
    assert causes(watch) and all(cause in c for c in causes(watch)), causes(watch)


@pytest.mark.parametrize("change", [noisy, lambda logps: logps - 0.1])
def test_a_difference_of_no_known_cause_shows_its_tokens(tmp_path, change):
    watch, _ = watched(grpo(functools.partial(sampler, change=change), temperature=0.7), tmp_path)
    assert watch.findings and not causes(watch)
    first = watch.findings[0]
    assert "no known cause" in first.text and len(first.tokens) == 5
    assert first.tokens[0]["token"].startswith(("w", "<")) and first.tokens[0]["units"] >= first.tokens[1]["units"]


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_recorded_vllm_rollouts_and_a_wrong_temperature(tmp_path, dtype, said):
    clean, _ = watched(vllm(f"llama-{dtype}-t0.7-p1", temperature=0.7), tmp_path)
    assert not clean.findings and not said
    wrong, _ = watched(vllm(f"llama-{dtype}-t0.7-p1", temperature=1.0), tmp_path)
    assert len(said) == 1 and "where the trainer's is 1" in said[0]
    (cause,) = causes(wrong)
    assert float(cause.split()[1]) == pytest.approx(0.7, abs=1e-5 if dtype == "fp32" else 0.02)


def test_a_warning_is_said_once(tmp_path, said):
    watch, _ = watched(grpo(functools.partial(sampler, raw=True), temperature=0.7), tmp_path)
    assert len(watch.findings) == 2 and len(said) == 1


def trained(watch, tmp_path, lora=False, **wanted):
    wanted |= {"peft": trl.lora(lora_dropout=0.1)} if lora else {}
    wanted |= {"max_steps": 3, "per_device_train_batch_size": 4, "gradient_accumulation_steps": 2}
    trainer = grpo(sampler, disable_dropout=not lora, **wanted)
    made = parity.watch(trainer, every=1, to=tmp_path / "watch.ndjson") if watch else None
    with drive.seeded(), trl.quiet():
        trainer.train()
        state = torch.get_rng_state()
    assert made is None or (made.seconds > 0 and not made.findings)
    timed = ("time", "_per_second")
    log = [{k: v for k, v in e.items() if not any(t in k for t in timed)} for e in trainer.state.log_history]
    return trainer, state, log


@pytest.mark.parametrize(
    "wanted",
    [
        {"lora": True},
        {"peft": trl.lora(), "beta": 0.04},
        {"gradient_checkpointing": True, "beta": 0.04},
        {"neftune_noise_alpha": 5.0},
    ],
)
def test_a_watched_run_ends_in_the_same_bits(tmp_path, wanted):
    bare, state, log = trained(False, tmp_path, **wanted)
    seen, same_state, same_log = trained(True, tmp_path, **wanted)
    for (name, a), (_, b) in zip(bare.model.named_parameters(), seen.model.named_parameters(), strict=True):
        assert torch.equal(a, b), name
    assert torch.equal(state, same_state)
    assert [m.training for m in bare.model.modules()] == [m.training for m in seen.model.modules()]
    assert "watch/noise" in same_log[0] and "sampling/k3" in same_log[0]
    assert log == [{k: v for k, v in e.items() if k in log[i]} for i, e in enumerate(same_log)]


def test_an_error_of_its_own_is_said_and_ends_no_run(tmp_path, monkeypatch, said):
    def broken(*args):
        raise RuntimeError("a fault of the watch")

    monkeypatch.setattr(definition, "faults", broken)
    trainer = grpo(sampler)
    watched(trainer, tmp_path)
    assert said == ["watch: RuntimeError: a fault of the watch; the run goes on unwatched"]
    assert trainer.state.global_step == 2
    assert not {"training_step", "log", "_prepare_inputs"} & vars(trainer).keys()


def test_undo_leaves_the_trainer_as_it_was(tmp_path):
    trainer = grpo()
    before, callbacks = dict(vars(trainer)), list(trainer.callback_handler.callbacks)
    watch = parity.watch(trainer, to=tmp_path / "watch.ndjson")
    assert vars(trainer).keys() != before.keys()
    watch.undo()
    watch.undo()
    assert vars(trainer).keys() == before.keys() and trainer.callback_handler.callbacks == callbacks


@pytest.mark.parametrize(
    "options, message", [({"every": 0}, "every=0"), ({"on_mismatch": "stop"}, "'warn' or 'raise'")]
)
def test_options_out_of_range_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        parity.watch(grpo(), **options)
    with pytest.raises(TypeError, match="no trainer"):
        parity.watch(torch.nn.Linear(1, 1))


def test_it_imports_without_what_the_command_line_needs():
    names = "hypothesis msgspec click rich jinja2 psutil allpairspy pytest liger_kernel"
    code = f"import sys; sys.modules.update(dict.fromkeys({names.split()})); import parity.watching.watch"
    subprocess.run([sys.executable, "-c", code], check=True)
