"""`compare_heads`: says where policy and reference make different logits of the same hidden states."""

import contextlib
import warnings
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from parity.fixes.logits import probe, undisturbed
from parity.fixes.patch import Patch

NAME = "compare_heads"


def compare_heads(trainer: Any) -> Patch:
    """Warns where the policy's head is not the reference's: step-1 KL is not 0 then, and no patch can know which is meant.

    The same random last hidden states are put behind the backbone of both, and each model's own forward makes logits of
    them. They may be

        ||difference|| <= 4 u ||logits||

    apart, u the unit roundoff of the coarser of their dtypes (0 where weights and dtype are the same, but for the order
    of sums). Changes nothing. A reference that is the policy without its adapter has its head and is not compared, nor
    is a model that ZeRO-3 has partitioned: it computes nothing before training.
    """
    policy, reference = (_unwrapped(getattr(trainer, name, None)) for name in ("model", "ref_model"))
    if not isinstance(policy, nn.Module) or not isinstance(reference, nn.Module):
        return Patch(NAME, reason="the trainer has no reference model beside its policy")
    autocast = getattr(getattr(trainer, "accelerator", None), "autocast", contextlib.nullcontext)
    try:  # accelerate puts autocast around the reference at once, around the policy when training starts
        with torch.no_grad(), undisturbed(policy), undisturbed(reference), autocast():
            ours, theirs = _logits(policy), _logits(reference)
    except Exception as error:
        return Patch(NAME, reason=f"the heads could not be compared ({type(error).__name__}: {error})")
    differ = ours.shape != theirs.shape
    apart = "of unlike shapes"
    if not differ:
        u = max(torch.finfo(logits.dtype).eps / 2 for logits in (ours, theirs))
        off, size = float((ours.double() - theirs.double()).norm()), float(theirs.double().norm())
        differ = not off <= 4 * u * size
        apart = f"{100 * off / size if size else 100:.2g} % apart"
    if not differ:
        return Patch(NAME, reason="policy and reference make the same logits of the same hidden states")
    why = _why(policy, reference) or "heads and weights look alike, what the models do around them differs"
    message = f"policy and reference make logits {apart} of the same hidden states: {why}"
    warning = f"{message}. Their step-1 KL is not 0; give both the same head first, if that is not meant"
    warnings.warn(f"{NAME}: {warning}", UserWarning, stacklevel=2)
    return Patch(NAME, warning=warning)


def _unwrapped(model: Any) -> Any:
    """The transformers model under PEFT and wrappers."""
    while isinstance(getattr(model, "module", None), nn.Module):
        model = model.module
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def _logits(model: Any) -> Tensor:
    """(4, 9, V): what the model's own forward makes of fixed last hidden states."""
    with _hidden_states(model) as seen:
        logits: Tensor = model(**probe(model), use_cache=False).logits
    if not seen:
        raise RuntimeError(f"the forward of {type(model).__name__} does not call its backbone")
    return logits.cpu()


@contextlib.contextmanager
def _hidden_states(model: Any) -> Iterator[list[Any]]:
    """Behind the backbone stand hidden states that depend on nothing but their shape; gives the shapes seen."""
    seen: list[Any] = []

    def replaced(module: object, inputs: object, output: Any) -> Any:
        given = output.last_hidden_state
        seen.append(given.shape)
        generator = torch.Generator().manual_seed(0)
        output.last_hidden_state = torch.randn(given.shape, generator=generator).to(given)
        return output

    hook = model.base_model.register_forward_hook(replaced)
    try:
        yield seen
    finally:
        hook.remove()


def _why(policy: Any, reference: Any) -> str:
    """What can be seen of the difference, in words; empty where nothing can."""
    ours, theirs = (model.get_output_embeddings() for model in (policy, reference))
    found = []
    kinds = [next(k for k in type(head).__mro__ if not _shards(k)) for head in (ours, theirs)]
    if kinds[0] is not kinds[1]:
        found.append(f"the policy's head is a {kinds[0].__name__}, the reference's a {kinds[1].__name__}")
    hooks = [_hooks(head) for head in (ours, theirs)]
    if hooks[0] != hooks[1]:
        found.append(f"the policy's head has {hooks[0]}, the reference's {hooks[1]}")
    if _apart(*(getattr(head, "weight", None) for head in (ours, theirs))):
        found.append("their weights differ")
    return "; ".join(found)


def _shards(of: Any) -> bool:
    """Whether a class or a hook is one with which FSDP2 gathers and releases shards."""
    return str(getattr(of, "__module__", "")).startswith("torch.distributed.")


def _hooks(head: Any) -> str:
    hooks = [*head._forward_hooks.values(), *head._forward_pre_hooks.values()]
    count = sum(not _shards(hook) for hook in hooks)
    return "none" if not count else f"{count} forward hook{'s' if count > 1 else ''}"


def _apart(ours: Any, theirs: Any) -> bool:
    """Whether two weights are seen to differ."""
    if not all(isinstance(w, Tensor) for w in (ours, theirs)):
        return False
    if ours.shape != theirs.shape:
        return True
    a, b = (w.full_tensor() if hasattr(w, "full_tensor") else w for w in (ours, theirs))
    return not torch.equal(a.detach().cpu(), b.detach().cpu())
