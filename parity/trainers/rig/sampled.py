"""Tokens that a release's GRPO trainer samples from a tiny model at a fixed seed, for `parity compare`.

Nothing is judged: no definition says which tokens a seed gives. Tokens move when defaults of sampling, the warpers of
generation, or the number of random numbers that it draws do.
"""

import dataclasses
from typing import Any

from parity.errors import Unsupported
from parity.trainers.rig import drive, models
from parity.upstream import trl

SAMPLING = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
PROMPTS, EACH = 2, 4


def tokens() -> list[list[int]]:
    """Completions as token ids: `EACH` for each of `PROMPTS` prompts, at most `drive.COMPLETION` tokens, seed 3407.

    Sampling has the release's own defaults, generation is `_generate_and_score_completions` as it is called in training.

    Raises:
        Unsupported: when the installed version has no such trainer or method.
    """
    config = drive.trl_class("GRPOConfig")
    known = {k: v for k, v in trl.fields(config).items() if v is not dataclasses.MISSING}
    wanted: dict[str, Any] = {name: known[name] for name in SAMPLING if name in known}
    wanted |= {"beta": 0.0, "num_generations": EACH, "per_device_train_batch_size": PROMPTS * EACH}
    trainer = drive.build("GRPOTrainer", models.model("llama"), drive.arguments(config, "cpu", wanted))
    generate = getattr(trainer, "_generate_and_score_completions", None)
    if generate is None:
        raise Unsupported("GRPOTrainer of the installed version generates inside its training step")
    prompts = drive.prompts()[:PROMPTS]["prompt"]
    with trl.quiet(), drive.seeded():
        out = generate([{"prompt": prompt} for prompt in prompts for _ in range(EACH)])
    pairs = zip(out["completion_ids"].tolist(), out["completion_mask"].bool().tolist(), strict=True)
    return [[token for token, kept in zip(ids, mask, strict=True) if kept] for ids, mask in pairs]
