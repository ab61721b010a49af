"""One of two processes that train together, bare and watched: `python -m cases.selftest.watching.rank SHARDING FOLDER`."""

import contextlib
import functools
import hashlib
import json
import os
import sys
from pathlib import Path

from parity.process import prepare

RUNS = "bare", "watched", "raised", "broken"


def moved(sides):
    return {name: None if v is None else v + 1 for name, v in sides().items()}


def uneven():
    """Texts that fill a row each, and those of which a row has four."""
    import datasets

    words = [f"w{i}" for i in range(10, 50)]
    texts = [" ".join(words[i : i + 23]) for i in range(6)]
    texts += [" ".join(words[i : i + 5]) for i in range(24)]
    return datasets.Dataset.from_dict({"text": texts})


def trained(run, trainer, folder, rank):
    """What a run of three steps ended in: a hash of the weights, findings, the exception; the second rank alone has a fault."""
    import torch

    import parity
    from parity.rollouts import scoring

    original_noise, noisy = scoring.noise, []
    scoring.noise = lambda *args: noisy.append(run) or original_noise(*args)
    planted = run in ("raised", "broken") and rank == 1
    watch = None
    if run != "bare":
        act = {"on_mismatch": "raise", "capture": True} if run == "raised" else {}
        watch = parity.watch(trainer, every=1, to=folder / f"{run}.ndjson", **act)
    if planted and run == "raised":  # its sampler's, or its reference's, log-probs are not those of the model
        original = watch._ready

        def ready():
            for look in (found := original()):
                look._sides = functools.partial(moved, look._sides)
            return found

        watch._ready = ready
    if planted and run == "broken":
        watch._ready = functools.partial(int, "a fault of the watch")
    ended = ""
    try:
        trainer.train()
    except AssertionError as error:
        ended = f"{type(error).__name__}: {error}"
    found = hashlib.sha256()
    for _, p in sorted(trainer.model.named_parameters()):
        whole = p.full_tensor() if hasattr(p, "full_tensor") else p
        found.update(whole.detach().contiguous().view(torch.uint8).numpy().tobytes())
    scoring.noise = original_noise
    out = {"noisy": len(noisy), "weights": found.hexdigest(), "step": trainer.state.global_step, "ended": ended}
    return out | (
        {"findings": [f.what for f in watch.findings], "looks": len(watch._looked)} if watch is not None else {}
    )


def main(sharding, folder):
    """Every run, one after the other."""
    prepare("cpu")
    from parity.trainers.rig import models, ranks

    joining = {name: os.environ.pop(name) for name in ranks.JOINING}  # as in `ranks.main`
    models.saved("llama")
    os.environ.update(joining)
    rank = int(os.environ["RANK"])
    from cases.selftest.watching.runs import grpo, of, sampler
    from parity.trainers.rig import drive
    from parity.upstream import trl

    sharded = sharding != "none"
    with ranks.sharding_on_any_device() if sharded else contextlib.nullcontext():
        out = {}
        for run in RUNS:
            shared = {"max_steps": 3, "per_device_train_batch_size": 4, "gradient_accumulation_steps": 2}
            if sharding == "packed":
                more = {"packing": True, "max_length": 24, "per_device_train_batch_size": 1, "max_steps": 3}
                trainer = of("sft-trainer", data=uneven(), **more, **ranks.FULL_SHARD)
            elif sharded:
                trainer = of("dpo-trainer", **shared | {"gradient_accumulation_steps": 1}, **ranks.FULL_SHARD)
            else:
                trainer = grpo(sampler, **shared)
            with drive.seeded(), trl.quiet():
                out[run] = trained(run, trainer, Path(folder), rank)
    Path(folder, f"{rank}.json").write_text(json.dumps(out))
    ranks.leave()


if __name__ == "__main__":
    main(*sys.argv[1:])
