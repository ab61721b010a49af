"""TRL's GRPOTrainer with a real vLLM: each step's rollouts judged against the parameters that sampled them.

vLLM's engine lives in the process and cannot be started twice in it.
"""

import contextlib
import functools
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from parity.case.case import hashes
from parity.recording import Recording
from parity.rollouts import engine_models, vllm_engine
from parity.rollouts.judge import Verdict, judge
from parity.rollouts.record import padded
from parity.rollouts.trainer_scores import Trainer
from parity.trainers.rig import drive, recorder

MODEL = "tiny-llama"
STEPS, PROMPTS, GENERATIONS, COMPLETION = 3, 8, 4, 16
TEMPERATURE = 0.7
RATE = 0.03


def run(synced: bool) -> Iterator[tuple[bool, str]]:
    """Trains with `vllm_mode` colocate; of each step whether it agrees, and a line.

    Without `synced` the weights are no longer sent to the engine after the first step.
    """
    vllm_engine.prepare()
    folder = engine_models.folder_of(MODEL)
    with _runnable():
        trainer = _built(folder)
        if not synced:  # only the first call sends anything
            trainer.vllm_generation.sync_weights = functools.cache(trainer.vllm_generation.sync_weights)
        steps = recorder.train(trainer)
    for k in range(len(steps.gradients)):
        (batch,) = steps.window(k)
        yield _judged(folder, batch, steps.parameters[k])


@contextlib.contextmanager
def _runnable() -> Iterator[None]:
    """TRL's colocated engine in float32, without graph capture; on a CPU also with what its weight sync needs there.

    TRL passes no dtype, and vLLM's "auto" makes float32 weights bfloat16. On a CPU vLLM packs linear weights for oneDNN or
    AMX when the model is loaded, and a packed weight cannot be loaded again: TRL's first sync fails. So both are off.
    """
    import trl.generation.vllm_generation as generation

    with contextlib.ExitStack() as undo:
        engine = functools.partial(generation.LLM, dtype="float32", enforce_eager=True)
        undo.enter_context(mock.patch.object(generation, "LLM", engine))
        if not torch.cuda.is_available():
            import vllm._custom_ops as ops

            undo.enter_context(mock.patch.object(torch.cpu, "_is_amx_tile_supported", return_value=False))
            undo.enter_context(mock.patch.object(ops, "_supports_onednn", False))
        yield


def _built(folder: Path) -> Any:
    """A GRPOTrainer on the model in `folder` that generates with vLLM."""
    import datasets

    wanted = {
        "use_vllm": True,
        "vllm_mode": "colocate",
        "per_device_train_batch_size": PROMPTS * GENERATIONS,
        "num_generations": GENERATIONS,
        "max_completion_length": COMPLETION,
        "max_steps": STEPS,
        "learning_rate": RATE,
        "temperature": TEMPERATURE,
        "loss_type": "grpo",
        "beta": 0.0,
        "vllm_importance_sampling_mode": "token_truncate",
        "vllm_max_model_length": 128,
        "gradient_checkpointing": False,
        "use_cpu": not torch.cuda.is_available(),
    }
    needed = ("use_vllm", "vllm_importance_sampling_mode")
    rows = [
        {"prompt": " ".join(f"w{3 + int(h % 50)}" for h in hashes(5, f"live {i}", (4 + i % 5,)))}
        for i in range(PROMPTS * STEPS)
    ]
    policy = engine_models.loaded(folder, torch.float32)
    return drive.build("GRPOTrainer", policy, wanted, needed, train_dataset=datasets.Dataset.from_list(rows))


def _judged(folder: Path, batch: Any, parameters: Any) -> tuple[bool, str]:
    def at_the_step(model: Any) -> Any:
        model.load_state_dict({n: v for n, v in parameters.items() if n in model.state_dict()}, strict=False)
        return model

    v: Verdict = judge(_recording(batch), Trainer(folder, torch.float32, at_the_step))
    mask = batch["completion_mask"].bool()
    d = (batch["old_per_token_logps"] - batch["sampling_per_token_logps"])[mask]
    ratios = batch["importance_sampling_ratio"][mask]
    return v.agrees, (
        f"{'agrees' if v.agrees else 'DISAGREES'}, {v.judgements[v.worst].headroom:.2g} of what {v.worst} allows; "
        f"|log-ratio| at most {float(d.abs().max()):.1e}, ratios {float(ratios.min()):.6f} to {float(ratios.max()):.6f}, "
        f"their mean {float(ratios.mean()):.6f}"
    )


def _recording(batch: Any) -> Recording:
    prompts = [p[m.bool()].tolist() for p, m in zip(batch["prompt_ids"], batch["prompt_mask"], strict=True)]
    lengths = batch["completion_mask"].sum(-1)
    completions = [c[: int(n)].tolist() for c, n in zip(batch["completion_ids"], lengths, strict=True)]
    width = int(lengths.max())
    return Recording(
        "live",
        {"temperature": TEMPERATURE, "top_p": 1.0, "top_k": 0},
        padded(prompts, torch.int32),
        torch.tensor([len(p) for p in prompts], dtype=torch.int32),
        padded(completions, torch.int32, width),
        lengths.to(torch.int32),
        batch["sampling_per_token_logps"][:, :width].float().cpu(),
    )
