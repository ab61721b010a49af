"""TRL's GRPOTrainer with a real vLLM: three steps, each step's rollouts judged against the parameters that sampled them."""

import contextlib
import dataclasses
import functools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from parity.case.case import hashes
from parity.recording import Recording
from parity.rollouts import models, vllm_engine
from parity.rollouts.judge import Verdict, judge
from parity.rollouts.record import padded
from parity.rollouts.scoring import Trainer
from parity.trainers.rig import drive, recorder

STEPS, PROMPTS, GENERATIONS, COMPLETION = 3, 8, 4, 16
TEMPERATURE = 0.7
RATE = 0.03


@dataclasses.dataclass(frozen=True)
class SyncStep:
    """An optimizer step of the live run.

    Attributes:
        verdict: of the sampler's log-probs against the parameters that the step began with.
        furthest: largest |log π - log π_sampler| of a token, nats, as the trainer itself scored it.
        ratios: smallest and largest importance ratio that went into the loss.
        fused: difference of the loss relative to the size of its terms, and of the gradient, |g - g'| / |g|, to
            `parity.fixes.FusedLinearGRPOLoss` on the same batch and parameters.
    """

    verdict: Verdict
    furthest: float
    ratios: tuple[float, float]
    fused: tuple[float, float]

    def line(self) -> str:
        v, worst = self.verdict, max(self.verdict.gates, key=lambda name: self.verdict.gates[name])
        return (
            f"{'agrees' if v.agrees else 'DISAGREES'}, {v.gates[worst]:.2g} of what {worst} allows; |log-ratio| at most "
            f"{self.furthest:.1e}, ratios {self.ratios[0]:.6f} to {self.ratios[1]:.6f}, their mean {v.found.mean_ratio:.6f}; "
            f"fused against plain: loss {self.fused[0]:.1e}, gradient {self.fused[1]:.1e}"
        )


@contextlib.contextmanager
def runnable() -> Iterator[list[str]]:
    """TRL's colocated engine in float32, without graph capture; on a CPU also with what its weight sync needs there.

    Yields what was changed, in words. On a CPU vLLM packs linear weights for oneDNN or AMX when the model is loaded, and a
    packed weight cannot be loaded again: TRL's first sync fails. So both are switched off.
    """
    vllm_engine.prepare()
    import trl.generation.vllm_generation as generation

    changed = [
        "LLM(dtype='float32', enforce_eager=True): TRL passes no dtype, and 'auto' makes float32 weights bfloat16"
    ]
    with contextlib.ExitStack() as undo:
        engine = functools.partial(generation.LLM, dtype="float32", enforce_eager=True)
        undo.enter_context(_replaced(generation, "LLM", engine))
        if not torch.cuda.is_available():
            import vllm._custom_ops as ops

            undo.enter_context(_replaced(torch.cpu, "_is_amx_tile_supported", lambda: False))
            undo.enter_context(_replaced(ops, "_supports_onednn", False))
            changed.append("torch.cpu._is_amx_tile_supported and vllm._custom_ops._supports_onednn: off")
        yield changed


@contextlib.contextmanager
def _replaced(holder: Any, name: str, value: Any) -> Iterator[None]:
    before = getattr(holder, name)
    setattr(holder, name, value)
    try:
        yield
    finally:
        setattr(holder, name, before)


def built(folder: Path, steps: int = STEPS, **more: Any) -> Any:
    """A GRPOTrainer on the model in `folder` that generates with vLLM; `more` goes to its config."""
    wanted = {
        "use_vllm": True,
        "per_device_train_batch_size": PROMPTS * GENERATIONS,
        "num_generations": GENERATIONS,
        "max_completion_length": COMPLETION,
        "max_steps": steps,
        "learning_rate": RATE,
        "temperature": TEMPERATURE,
        "loss_type": "grpo",
        "beta": 0.0,
        "vllm_importance_sampling_mode": "token_truncate",
        "vllm_max_model_length": 128,
        "gradient_checkpointing": False,
        "use_cpu": not torch.cuda.is_available(),
    }
    config = drive.config("GRPOTrainer")
    args = drive.arguments(config, "cpu", wanted | more, ("use_vllm", "vllm_importance_sampling_mode"))
    import datasets

    rows = [
        {"prompt": " ".join(f"w{3 + int(h % 50)}" for h in hashes(5, f"live {i}", (4 + i % 5,)))}
        for i in range(PROMPTS * STEPS)
    ]
    policy = models.loaded(folder, torch.float32)
    return drive.build(
        "GRPOTrainer", policy, args, train_dataset=datasets.Dataset.from_list(rows), reward_funcs=drive.reward_by_place
    )


@contextlib.contextmanager
def without_communicator() -> Iterator[list[str]]:
    """TRL's server mode without a weight sync, which needs NCCL between CUDA devices: generation alone goes over HTTP.

    Yields what was changed, in words.
    """
    vllm_engine.prepare()
    import trl.generation.vllm_client as client
    import trl.generation.vllm_generation as generation

    with contextlib.ExitStack() as undo:
        undo.enter_context(_replaced(client.VLLMClient, "init_communicator", lambda *args, **kwargs: None))
        undo.enter_context(_replaced(generation.VLLMGeneration, "sync_weights", lambda self: None))
        yield ["VLLMClient.init_communicator and VLLMGeneration.sync_weights: off, they need NCCL and a CUDA device"]


def forget_to_sync(trainer: Any) -> None:
    """The control: after the first time, weights are no longer sent to the engine."""
    send = trainer.vllm_generation.sync_weights
    sent: list[Any] = []

    def sync() -> None:
        if not sent:
            sent.append(send())

    trainer.vllm_generation.sync_weights = sync


def run(trainer: Any, folder: Path) -> list[SyncStep]:
    """Trains, and judges every step."""
    steps = recorder.train(trainer)
    return [_judged(trainer, folder, steps, k) for k in range(len(steps.gradients))]


def _judged(trainer: Any, folder: Path, steps: recorder.Steps, k: int) -> SyncStep:
    (batch,) = steps.window(k)
    parameters, mask = steps.parameters[k], batch["completion_mask"].bool()

    def at_the_step(model: Any) -> Any:
        # the model may be in float64; loading copies into its dtype
        model.load_state_dict({n: v for n, v in parameters.items() if n in model.state_dict()}, strict=False)
        return model

    recording = _recording(batch)
    verdict = judge(recording, Trainer(folder, torch.float32, at_the_step))
    d = (batch["old_per_token_logps"] - batch["sampling_per_token_logps"])[mask]
    ratios = batch["importance_sampling_ratio"][mask]
    fused = _fused(folder, parameters, batch, steps.gradients[k], steps.losses[k])
    return SyncStep(verdict, float(d.abs().max()), (float(ratios.min()), float(ratios.max())), fused)


def _recording(batch: Any) -> Recording:
    prompts = [p[m.bool()].tolist() for p, m in zip(batch["prompt_ids"], batch["prompt_mask"], strict=True)]
    lengths = batch["completion_mask"].sum(-1)
    completions = [c[: int(n)].tolist() for c, n in zip(batch["completion_ids"], lengths, strict=True)]
    width = int(lengths.max())
    facts = {"temperature": TEMPERATURE, "top_p": 1.0, "top_k": 0}
    return Recording(
        "live",
        facts,
        padded(prompts, torch.int32),
        torch.tensor([len(p) for p in prompts], dtype=torch.int32),
        padded(completions, torch.int32, width),
        lengths.to(torch.int32),
        batch["sampling_per_token_logps"][:, :width].float().cpu(),
    )


def _fused(folder: Path, parameters: Any, batch: Any, gradients: Any, loss: float) -> tuple[float, float]:
    """Loss and gradient by the fused fix at the step's parameters, relative to those of the trainer."""
    from parity.fixes import FusedLinearGRPOLoss

    model = models.loaded(folder, torch.float32).train()
    model.load_state_dict({n: v for n, v in parameters.items() if n in model.state_dict()}, strict=False)
    ids = torch.cat([batch["prompt_ids"], batch["completion_ids"]], -1)
    mask = torch.cat([batch["prompt_mask"], batch["completion_mask"]], -1)
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    hidden = model.get_decoder()(input_ids=ids, attention_mask=mask, position_ids=positions).last_hidden_state
    width = batch["completion_ids"].shape[1]
    function = FusedLinearGRPOLoss(
        beta=0.0, use_ref_model=False, loss_type="grpo", temperature=TEMPERATURE, epsilon_low=0.2, epsilon_high=0.2
    )
    found, _ = function(
        hidden[:, -width - 1 : -1],
        model.get_output_embeddings().weight,
        batch["completion_ids"],
        batch["completion_mask"],
        batch["advantages"],
        old_per_token_logps=batch.get("old_per_token_logps"),
        vllm_is_ratio=batch["importance_sampling_ratio"],
        num_items_in_batch=batch.get("num_items_in_batch"),
    )
    found.backward()
    mine: dict[str, Tensor] = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    pairs = [(mine[n].double(), g.double()) for n, g in gradients.items() if g is not None]
    apart = sum(float((a - b).square().sum()) for a, b in pairs) ** 0.5
    size = sum(float(b.square().sum()) for _, b in pairs) ** 0.5
    # advantages of a group add up to 0, and so does the loss of a first step: its terms are what it rounds
    terms = float((batch["advantages"].abs() * batch["importance_sampling_ratio"].mean(-1)).mean())
    return abs(float(found.detach()) - loss) / terms, apart / size
