"""Where a trainer hands out its log-probs: methods of TRL's trainers, or the fused LM head's output; seen, never changed."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

SCORERS = "_get_per_token_logps_and_entropies", "_get_per_token_logps"


@dataclasses.dataclass
class Taken:
    """One scoring of a micro-batch by the trainer.

    Attributes:
        model: that scored.
        ids, attention: (B, P + T).
        logps: (B, T), detached; entropies: (B, T) or None.
        mask: (B, T), the tokens in the loss, where the scoring says so.
        trained: whether gradients were on.
        slopes: what the backward pass brought to the log-probs, (B, T).
    """

    model: Any
    ids: Tensor
    attention: Tensor
    logps: Tensor
    entropies: Tensor | None
    mask: Tensor | None
    trained: bool
    slopes: Tensor | None = None


class Taps:
    """Wraps methods of one trainer; `undo` puts them back."""

    def __init__(self, trainer: Any):
        self.trainer, self._undo = trainer, list[Callable[[], Any]]()

    def around(self, name: str, wrapper: Callable[..., Any]) -> None:
        """Calls of the trainer's method `name` go through `wrapper(original, *args, **kwargs)`."""
        holder, original = self.trainer, getattr(self.trainer, name)
        replaced = functools.wraps(original)(functools.partial(wrapper, original))
        before = vars(holder).get(name)
        setattr(holder, name, replaced)

        def back() -> None:
            if vars(holder).get(name) is replaced:
                delattr(holder, name) if before is None else setattr(holder, name, before)

        self._undo.append(back)

    def scored(self, seen: Callable[[Taken], None]) -> None:
        """`seen` is told of each scoring, before its result goes on to the trainer."""
        trainer = self.trainer
        if name := next((n for n in SCORERS if hasattr(trainer, n)), None):
            self.around(name, functools.partial(_method, seen))
        elif hasattr(trainer, "_forward"):
            self.around("_forward", functools.partial(_online, seen))
        else:
            for model in filter(None, (trainer.model, getattr(trainer, "ref_model", None))):
                hook = model.register_forward_hook(functools.partial(_fused, seen), with_kwargs=True)
                self._undo.append(hook.remove)

    def undo(self) -> None:
        """Everything as it was; a second call does nothing."""
        while self._undo:
            self._undo.pop()()


def _told(seen: Callable[[Taken], None], logps: Tensor, **fields: Any) -> None:
    taken = Taken(logps=logps.detach(), trained=logps.requires_grad, **fields)
    if logps.requires_grad:
        logps.register_hook(functools.partial(setattr, taken, "slopes"))
    seen(taken)


def _method(
    seen: Any, original: Any, model: Any, input_ids: Tensor, attention_mask: Tensor, *args: Any, **kw: Any
) -> Any:
    out = original(model, input_ids, attention_mask, *args, **kw)
    logps, *more = (
        (out["logps"], out.get("entropies")) if isinstance(out, dict) else out if isinstance(out, tuple) else (out,)
    )
    entropies = more[0].detach() if more and torch.is_tensor(more[0]) else None
    images = any(kw.get(name) is not None for name in ("pixel_values", "image_grid_thw"))
    if not images:
        _told(seen, logps, model=model, ids=input_ids, attention=attention_mask, entropies=entropies, mask=None)
    return out


def _online(
    seen: Any, original: Any, model: Any, prompt: Tensor, prompt_mask: Tensor, ids: Tensor, mask: Tensor, *more: Any
) -> Any:
    out = original(model, prompt, prompt_mask, ids, mask, *more)
    if not any(x is not None for x in more):
        joined = torch.cat([prompt, ids], 1), torch.cat([prompt_mask, mask], 1)
        _told(seen, out, model=model, ids=joined[0], attention=joined[1], entropies=None, mask=mask)
    return out


def _fused(seen: Any, model: Any, args: Any, kwargs: Any, out: Any) -> None:
    logps, labels, ids = getattr(out, "log_probs", None), kwargs.get("labels"), kwargs.get("input_ids")
    if logps is None or labels is None or ids is None or logps.shape[1] != ids.shape[1] - 1:
        return
    if kwargs.get("pixel_values") is not None or kwargs.get("position_ids") is not None:
        return  # images; sequences packed into one row
    attention = kwargs.get("attention_mask")
    attention = torch.ones_like(ids) if attention is None else attention
    _told(seen, logps, model=model, ids=ids, attention=attention, entropies=None, mask=labels[:, 1:] != -100)
