"""Asynchronous GRPO without a GPU: stored rollouts in the queue, and written-out attention for its one CUDA kernel.

The queue and the transfer of weights are the trainer's own parameters. Its packing attends with FlashAttention 3, which
has no CPU build, so `attention` stands in; packing, loss, accumulation and logging are the trainer's.
"""

import contextlib
import importlib
import queue
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from parity.errors import Unsupported
from parity.trainers.rig import drive, models, recorder, stored_window
from parity.trainers.rig.stored_window import Sequences
from parity.upstream import trl

NAME = "AsyncGRPOTrainer"


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
) -> Tensor:
    """flash_attn_varlen_func: softmax(s·qkᵀ)·v in each segment, (tokens, heads, d); the last query sees the last key.

    Raises:
        Unsupported: for what no tiny model of ours asks for: no mask, or a sliding window.
    """
    if not causal or window_size != (-1, -1):
        raise Unsupported("the attention that stands in for FlashAttention 3 is causal, without a window")
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    out = []
    for i in range(len(cu_seqlens_q) - 1):
        a = q[cu_seqlens_q[i] : cu_seqlens_q[i + 1]].transpose(0, 1)
        b, c = (x[cu_seqlens_k[i] : cu_seqlens_k[i + 1]].transpose(0, 1) for x in (k, v))
        b, c = (x.repeat_interleave(len(a) // len(x), 0) for x in (b, c))
        z = a @ b.transpose(1, 2) * scale
        z = softcap * torch.tanh(z / softcap) if softcap else z
        hidden = torch.ones(z.shape[-2:], dtype=torch.bool).triu(z.shape[-1] - z.shape[-2] + 1)
        out.append((torch.softmax(z.masked_fill(hidden, -torch.inf), -1) @ c).transpose(0, 1))
    return torch.cat(out)


class Worker:
    """A rollout worker that has its rollouts already; what a trainer asks of one besides does nothing."""

    def __init__(self, samples: Sequence[Any]):
        self.rollout_buffer: queue.Queue[Any] = queue.Queue()
        self.metrics_queue: queue.Queue[Any] = queue.Queue()
        for sample in [*samples, *samples]:  # the loader reads one micro-batch ahead
            self.rollout_buffer.put(sample)

    def start(self) -> None: ...
    def stop(self) -> None: ...
    def update_model_version(self, model_version: int) -> None: ...
    def check_health(self, stale_after_s: float) -> None:
        raise RuntimeError("the trainer asks for more rollouts than a window and the micro-batch after it")


class Transfer:
    """A transfer of weights to nowhere."""

    def init_weight_transfer(self) -> None: ...
    def pause(self) -> None: ...
    def send_weights(self, iterator: Any) -> None: ...
    def resume(self) -> None: ...
    def destroy(self) -> None: ...


def _home(kind: type) -> str:
    """The module of TRL that defines the trainer, of a user's too."""
    return next(b.__module__ for b in kind.__mro__ if b.__module__.startswith("trl."))


@contextlib.contextmanager
def _without_throughput(kind: type) -> Iterator[None]:
    """Within it the trainer knows of no peak throughput; it asks CUDA for the device's name."""
    name = "get_peak_flops_per_device"
    module = importlib.import_module(_home(kind))
    kept = getattr(module, name, None)
    if kept is None:
        yield
        return
    setattr(module, name, lambda *_: None)
    try:
        yield
    finally:
        setattr(module, name, kept)


def build(
    model: str, window: Sequences, kept: Sequence[Tensor], old: Sequence[Tensor], advantages: Tensor, **config: Any
) -> Any:
    """The trainer over the tiny model, with the window in its queue, in order.

    `kept`: for each completion (T_i,) 1 where a token is the model's own; `old`: (T_i,) the generator's log-probs.

    Raises:
        Unsupported: for releases that attend or queue in another way than 1.16.
    """
    kind = drive.trl_class(NAME)
    package = _home(kind).rpartition(".")[0]
    try:
        packing = importlib.import_module(f"{package}.packing")
        sample = importlib.import_module(f"{package}.async_rollout_worker").RolloutSample
    except (ImportError, AttributeError) as error:
        raise Unsupported(f"{NAME} of the installed version does not pack prefixes: {error}") from error
    if not hasattr(packing, "_flash_attn") or not all(
        trl.accepts(kind, n) for n in ("rollout_worker", "weight_transfer")
    ):
        raise Unsupported(f"{NAME} of the installed version takes no rollout worker, or attends otherwise")
    samples = []
    for i, (tokens, start) in enumerate(window):
        mask, logps = np.zeros(len(tokens), dtype=np.int64), np.zeros(len(tokens), dtype=np.float32)
        mask[start:], logps[start:] = kept[i].numpy(), old[i].float().numpy()
        samples.append(
            sample(
                prompt=[],
                completion=[],
                input_ids=np.array(tokens),
                completion_mask=mask,
                old_log_probs=logps,
                advantage=float(advantages[i]),
                model_version=1,
                group_id=i // stored_window.GENERATIONS,
                metrics={},
            )
        )
    args = drive.arguments(
        drive.config(NAME), "cpu", recorder.PLAIN | {"token_budget": 0, "temperature": 1.0, **config}
    )
    given = {"rollout_worker": Worker(samples), "weight_transfer": Transfer(), "train_dataset": drive.prompts()}
    with _without_throughput(kind):
        trainer = drive.build(NAME, str(models.saved(model)), args, **given)
    trainer.model.load_state_dict(stored_window.policy(model).state_dict())
    if hasattr(trainer.model, "set_experts_implementation"):
        trainer.model.set_experts_implementation("eager")
    packing._flash_attn = lambda: SimpleNamespace(flash_attn_varlen_func=attention)  # type: ignore[attr-defined]
    return trainer
