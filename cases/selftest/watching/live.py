"""GRPOTrainer with a colocated vLLM, watched: `python -m cases.selftest.watching.live RUN FOLDER`; it prints what was found.

vLLM's engine lives in the process and cannot be started twice in it.
"""

import contextlib
import functools
import json
import sys
from pathlib import Path
from unittest import mock

import torch

from cases.selftest.watching.runs import grpo, watched
from parity.rollouts import engine_models, vllm_engine
from parity.trainers.rig import models


@contextlib.contextmanager
def runnable():
    """float32 without graph capture: TRL passes no dtype. On a CPU vLLM packs linear weights when a model is loaded, and a
    packed weight cannot be loaded again by a sync: so both ways of packing are off."""
    import trl.generation.vllm_generation as generation

    with contextlib.ExitStack() as undo:
        engine = functools.partial(generation.LLM, dtype="float32", enforce_eager=True)
        undo.enter_context(mock.patch.object(generation, "LLM", engine))
        if not torch.cuda.is_available():
            import vllm._custom_ops as ops

            undo.enter_context(mock.patch.object(torch.cpu, "_is_amx_tile_supported", return_value=False))
            undo.enter_context(mock.patch.object(ops, "_supports_onednn", False))
        yield


def main(run, folder):
    vllm_engine.prepare()
    models.tokenizer()
    policy = engine_models.loaded(engine_models.folder_of("tiny-llama"), torch.float32)
    wanted = {"use_vllm": True, "vllm_mode": "colocate", "vllm_max_model_length": 128, "max_steps": 3}
    wanted |= {"vllm_importance_sampling_mode": "token_truncate", "max_completion_length": 16, "temperature": 0.7}
    wanted |= {"learning_rate": 0.03, "loss_type": "grpo"}
    with runnable():
        trainer = grpo(policy=policy, use_cpu=not torch.cuda.is_available(), **wanted)
        if run == "stale":
            send, sent = trainer.vllm_generation.sync_weights, []
            trainer.vllm_generation.sync_weights = lambda: sent or sent.append(send())
        if run == "warm":
            trainer.vllm_generation.temperature = 1.0
        watch, lines = watched(trainer, Path(folder))
    print("FOUND", json.dumps({"looks": len(lines), "found": [(f.what, *f.causes) for f in watch.findings]}))


if __name__ == "__main__":
    main(*sys.argv[1:])
