"""One forward and backward of a registered implementation on inputs of a given size."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import torch

from parity.case.case import Case
from parity.case.inputs import Inputs
from parity.errors import Unsupported
from parity.fixes import selective_log_probs
from parity.implementations.implementation import Implementation
from parity.judge.recipe import DTYPES
from parity.judging.oracle import exact
from parity.protocol import call
from parity.registry import family, loss_family

Pass = Callable[[], dict[str, torch.Tensor]]


@dataclass(frozen=True)
class Size:
    """Sequences, tokens a sequence, hidden size, vocabulary."""

    B: int
    T: int
    H: int
    V: int

    def __str__(self) -> str:
        return f"{self.B * self.T:,} x {self.H:,} x {self.V:,}"


SIZES = {
    "cpu": (Size(2, 64, 256, 8192), Size(4, 128, 512, 32768), Size(8, 256, 1024, 32768)),
    "cuda": (Size(8, 512, 2048, 128256), Size(16, 1024, 4096, 151936), Size(16, 1024, 4096, 262144)),
}
LOGPROBS = """
trl.selective_log_softmax trl.ChunkedLogProbFunction liger.chunked_selective_logprob cce.torch_compile
torch.linear_cross_entropy cce.unfiltered cce.default fixes.selective_log_probs fixes.selective_log_probs.kept
""".split()
POLICY = """
trl.GRPOTrainer liger.FusedLinearGRPOLoss liger.FusedLinearGRPOLoss.compiled liger.triton_grpo_loss
fixes.FusedLinearGRPOLoss fixes.FusedLinearGRPOLoss.kept
""".split()


def inputs(name: str, size: Size, dtype: str, device: str, **settings: object) -> Inputs:
    """Inputs of family `name`: logits of standard deviation 3, old log-probs within 0.1 of the policy's."""
    case = Case(name, 0, dtype, settings)
    full = family(name).full_settings(case)
    vars(full).update(vars(size))  # larger than a case may be
    empty = Inputs(case, full, dict.fromkeys(_ABSENT), (), {})
    g = torch.Generator(device).manual_seed(0)
    hidden = torch.randn(size.B, size.T, size.H, generator=g, device=device).to(DTYPES[dtype])
    weight = torch.randn(size.V, size.H, generator=g, device=device).mul_(3 / size.H**0.5).to(DTYPES[dtype])
    ids = torch.randint(size.V, (size.B, size.T), generator=g, device=device)
    leaves, tensors = ("hidden", "weight"), {**empty.tensors, "hidden": hidden, "weight": weight, "ids": ids}
    if name == "logprobs":
        cotangents = {"logps": torch.randn(size.B, size.T, generator=g, device=device)}
        return Inputs(empty.case, empty.settings, tensors, leaves, cotangents)
    with torch.no_grad():
        logps = selective_log_probs(hidden, weight, ids, temperature=empty.settings.temperature)
    assert isinstance(logps, torch.Tensor)
    mask = torch.ones_like(ids)
    tensors |= {"mask": mask, "completion_mask": mask, "num_items_in_batch": mask.sum()}
    tensors["old_logps"] = logps + 0.1 * torch.randn(logps.shape, generator=g, device=device)
    tensors["advantages"] = torch.randn(size.B, generator=g, device=device)
    return Inputs(empty.case, empty.settings, tensors, leaves, {"loss": torch.ones((), device=device)})


_ABSENT = (
    "bias ignore_index tool_mask old_logps ref_logps sampling_logps importance_sampling_ratio top_entropy_quantile "
    "lora_a lora_b"
).split()


def prepared(implementation: Implementation, given: Inputs) -> Pass:
    """A function that runs forward and backward once; what a trainer builds only once is built here.

    Raises:
        Unsupported: where the implementation cannot be timed on this device.
    """
    device = given.hidden.device.type
    if implementation.interpreted and device == "cpu":
        raise Unsupported("Triton: interpreted on the CPU, so not timed")
    if implementation.id == "trl.GRPOTrainer":
        return _trainer(given)

    def both() -> dict[str, torch.Tensor]:
        x = call.fresh(given)
        with implementation.around():
            outputs = call.forward(implementation, x)
            call.backward(x, outputs)
        return _finished(outputs, x)

    return both


def reference(given: Inputs, logits: int) -> dict[str, torch.Tensor]:
    """The float64 results of `inputs`, of as many sequences at once as have at most so many logits, at least one.

    Of B sequences the loss is the mean over sequences (loss type grpo): b of them count b/B.
    """
    B, T, V = (getattr(given.settings, name) for name in "BTV")
    step = max(1, logits // (T * V))
    out: dict[str, torch.Tensor] = {}
    for start in range(0, B, step):
        part = _exact(given, slice(start, start + step), B)
        for name in {"logps", "loss", "grad_hidden", "grad_weight"} & set(part):
            if name not in out:
                out[name] = part[name]
            elif name in ("loss", "grad_weight"):
                out[name] += part[name]
            else:
                out[name] = torch.cat([out[name], part[name]])
    return out


def _exact(given: Inputs, rows: slice, B: int) -> dict[str, torch.Tensor]:
    """What some of the sequences add to the results of all."""
    of_sequences = {n: t[rows] for n, t in given.tensors.items() if t is not None and n != "weight" and t.dim()}
    count = len(of_sequences["ids"])
    case = replace(given.case, settings={**given.case.settings, "B": count})
    cotangents = {n: c[rows] if c.dim() else c.double() * count / B for n, c in given.cotangents.items()}
    settings = family(case.family).full_settings(case)
    some = replace(given.replace(**of_sequences), case=case, settings=settings, cotangents=cotangents)
    found = exact(loss_family(case.family), some)
    return found | ({"loss": found["loss"] * count / B} if "loss" in found else {})


def errors(found: Mapping[str, torch.Tensor], right: Mapping[str, torch.Tensor]) -> dict[str, float]:
    """||found - right|| / ||right|| of the value (log-probs or loss), and the larger one of the two gradients."""
    apart = {
        name: float((found[name].cpu().double() - right[name]).norm() / right[name].norm())
        for name in ("logps", "loss", "grad_hidden", "grad_weight")
        if name in found and name in right
    }
    values = [error for name, error in apart.items() if not name.startswith("grad_")]
    return {"value": max(values), "gradient": max(apart["grad_hidden"], apart["grad_weight"])}


def _trainer(given: Inputs) -> Pass:
    from parity.implementations import trl_trainer

    x = call.fresh(given)
    trainer = trl_trainer.trainer(x)
    batch = trl_trainer.batch(x, trainer)

    def both() -> dict[str, torch.Tensor]:
        for name in x.leaves:
            x.tensors[name].grad = None  # type: ignore[union-attr]
        loss = trainer.compute_loss(trainer.model, batch)
        loss.backward(retain_graph=True)  # the replay model keeps the hidden states' graph
        return _finished({"loss": loss}, x)

    return both


def _finished(outputs: dict[str, torch.Tensor], x: Inputs) -> dict[str, torch.Tensor]:
    if x.hidden.is_cuda:
        torch.cuda.synchronize()
    grads = {name: gradient for name, gradient in call.gradients(x).items() if gradient is not None}
    return {name: value.detach() for name, value in outputs.items()} | grads
