"""One whole GRPO step, generation left out: old, reference and new log-probs, backward, optimizer, each on its own clock."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from cases.bench import losses
from cases.bench.measure import phase
from parity.case.inputs import Inputs
from parity.errors import Unsupported
from parity.fixes import policy
from parity.registry import load

PHASES = ("old", "reference", "forward", "backward", "optimizer")
ITERATIONS = 4


@dataclass(frozen=True)
class Shape:
    """Batch, prompt and completion length, hidden size, layers and vocabulary of the model."""

    batch: int
    prompt: int
    completion: int
    hidden: int
    layers: int
    vocab: int

    def __str__(self) -> str:
        return f"batch {self.batch}, {self.prompt} + {self.completion} tokens, V {self.vocab:,}"


SHAPES = {
    "cpu": (Shape(8, 32, 64, 256, 2, 32768), Shape(16, 32, 64, 256, 2, 32768)),
    "cuda": (Shape(8, 512, 1024, 2048, 16, 128256), Shape(16, 512, 1024, 2048, 16, 128256)),
}
PARTIES = {
    "plain logits": ("trl.selective_log_softmax", None),
    "TRL chunked": ("trl.ChunkedLogProbFunction", None),
    "cce (torch_compile)": ("cce.torch_compile", None),
    "cce, unfiltered": ("cce.unfiltered", None),
    "cce, filtered": ("cce.default", None),
    "Liger": ("trl.selective_log_softmax", "liger.FusedLinearGRPOLoss"),
    "ours": ("fixes.selective_log_probs", "fixes.FusedLinearGRPOLoss"),
}
"""Name -> log-probs and, where the party has one, fused loss. Liger's trainers took old and reference from full logits."""


class TimedStep:
    """A model, its reference and its optimizer; calling it makes one step and returns the seconds of each phase.

    Loss: dapo with beta 0.04; `ITERATIONS` updates share the old and reference log-probs, as with num_iterations.
    """

    def __init__(self, party: str, shape: Shape, dtype: str, device: str):
        known = load()
        score, fused = PARTIES[party]
        if device == "cpu" and known[score].interpreted:
            raise Unsupported("Triton: interpreted on the CPU, so not timed")
        self.score, self.fused = known[score], None if fused is None else known[fused]
        self.device, self.shape = device, shape
        self.model, self.reference = (_model(shape, dtype, device) for _ in range(2))
        self.reference.requires_grad_(False)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-5)
        g = torch.Generator(device).manual_seed(0)
        length = shape.prompt + shape.completion
        self.ids = torch.randint(shape.vocab, (shape.batch, length), generator=g, device=device)
        self.advantages = torch.randn(shape.batch, generator=g, device=device)
        size = losses.Size(shape.batch, shape.completion, shape.hidden, shape.vocab)
        self.scored = losses.shell("logprobs", size, dtype)
        self.judged = losses.shell("policy", size, dtype, beta=0.04, loss_type="dapo")

    def to(self, device: str) -> None:
        """Move models and optimizer state: one party at a time is on the GPU, 12 GB each."""
        for model in (self.model, self.reference):
            model.to(device)
        for state in self.optimizer.state.values():
            for name, value in state.items():
                if isinstance(value, Tensor) and value.dim() > 0:
                    state[name] = value.to(device)

    @staticmethod
    def alone(parties: Mapping[str, TimedStep | None], name: str, device: str) -> None:
        """Only the party of that name stays on the device, the others wait on the CPU."""
        for other, party in parties.items():
            if party is not None:
                party.to(device if other == name else "cpu")

    def __call__(self) -> dict[str, float]:
        seconds = dict.fromkeys(PHASES, 0.0)

        def timed(name: str, work: Callable[[], Any]) -> Any:
            begun = self._clock()
            with phase(name):
                result = work()
            seconds[name] += self._clock() - begun
            return result

        with torch.no_grad():
            old = timed("old", lambda: self._logps(self.model))
            reference = timed("reference", lambda: self._logps(self.reference))
        for _ in range(ITERATIONS):
            loss = timed("forward", lambda: self._loss(old, reference))
            timed("backward", loss.backward)
            timed("optimizer", self._update)
        return seconds

    def _clock(self) -> float:
        if self.device == "cuda":
            torch.cuda.synchronize()
            return time.perf_counter()
        return time.process_time()

    def _states(self, model: Any) -> Tensor:
        hidden: Tensor = model.model(input_ids=self.ids).last_hidden_state
        return hidden[:, self.shape.prompt - 1 : -1]

    def _inputs(self, shell: Inputs, model: Any, **tensors: Tensor) -> Inputs:
        ids = self.ids[:, self.shape.prompt :]
        return shell.replace(hidden=self._states(model), weight=model.lm_head.weight, ids=ids, **tensors)

    def _logps(self, model: Any) -> Tensor:
        with self.score.around():
            return self.score.call(self._inputs(self.scored, model))["logps"]

    def _loss(self, old: Tensor, reference: Tensor) -> Tensor:
        if self.fused is None:
            logps = self._logps(self.model)
            ratio = torch.exp(logps - old)
            loss = policy.clipped_surrogate(ratio, self.advantages.unsqueeze(1), 0.2, 0.2, None)
            return (loss + 0.04 * policy.k3(reference, logps)).mean()
        mask = torch.ones_like(old, dtype=torch.long)
        tensors = {"mask": mask, "completion_mask": mask, "num_items_in_batch": mask.sum()}
        tensors |= {"advantages": self.advantages, "old_logps": old, "ref_logps": reference}
        return self.fused.call(self._inputs(self.judged, self.model, **tensors))["loss"]

    def _update(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)


def _model(shape: Shape, dtype: str, device: str) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    from parity.judge.recipe import DTYPES

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=shape.vocab,
        hidden_size=shape.hidden,
        intermediate_size=4 * shape.hidden,
        num_hidden_layers=shape.layers,
        num_attention_heads=max(shape.hidden // 64, 1),
        num_key_value_heads=max(shape.hidden // 128, 1),
        max_position_embeddings=shape.prompt + shape.completion,
    )
    return LlamaForCausalLM(config).to(device=device, dtype=DTYPES[dtype]).train()
