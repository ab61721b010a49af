"""Clean steps of many settings: no warning."""

import itertools

import pytest
import torch

from cases.selftest.slow import number
from cases.selftest.watching.runs import corrected, grpo, of, sampler, watched

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
def test_a_clean_run_is_silent(tmp_path, dtype, settings):
    name, wanted = settings
    wanted = {"max_steps": STEPS, "dtype": dtype, "num_train_epochs": 99, **wanted}
    made = {"grpo": grpo, "corrected": corrected}.get(name)
    trainer = of(name, **wanted) if made is None else made(sampler, **wanted)
    watch, lines = watched(trainer, tmp_path)
    assert not watch.findings and len(lines) == STEPS
