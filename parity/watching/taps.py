"""Where a trainer hands out its log-probs: methods of TRL's trainers, or the fused LM head's output; seen, never changed."""

import dataclasses
import functools
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

SCORERS = "_get_per_token_logps_and_entropies", "_get_per_token_logps", "_forward"


@dataclasses.dataclass
class Taken:
    """One scoring of a micro-batch by the trainer."""

    ids: Tensor  # (B, P + T)
    attention: Tensor  # the same
    logps: Tensor  # (B, T), detached
    entropies: Tensor | None  # (B, T)
    mask: Tensor | None  # (B, T), the tokens in the loss, where the scoring says so
    trained: bool  # whether gradients were on
    model: Any  # that was given
    still: bool = False  # whether that was in evaluation mode
    slopes: Tensor | None = None  # what the backward pass brought to the log-probs, (B, T)
    positions: Tensor | None = None  # (B, P + T), where the trainer says so
    labels: Tensor | None = None  # (B, P + T), where those in the loss are not the ids
    # ids and positions (1, T) of the row that the sequences were packed into, and where in it each token is, (B, P + T)
    row: tuple[Tensor, Tensor, Tensor] | None = None


def trained(taken: Iterable[Taken], batch: Any) -> Taken | None:
    """The scoring with gradients, those of the same ids added up; of rows scored in turn all, if they are the `batch`'s ids."""
    found = [t for t in taken if t.trained]
    found = [t for t in found if t.slopes is not None] or found
    if not found or not torch.is_tensor(batch) or len(batch) == len(found[0].ids):
        slopes = [t.slopes for t in found if t.slopes is not None and torch.equal(t.ids, found[0].ids)]
        return dataclasses.replace(found[0], slopes=sum(slopes) if slopes else None) if found else None
    names = "ids", "attention", "logps", "entropies", "slopes", "positions", "labels"
    parts = {n: [x for t in found if torch.is_tensor(x := getattr(t, n))] for n in names}
    alike = len({t.ids.shape[1:] for t in found}) == len({t.logps.shape[1:] for t in found}) == 1
    if not alike or not torch.equal(torch.cat(parts["ids"])[:, -batch.shape[1] :], batch):
        return None
    whole: dict[str, Any] = {n: torch.cat(x) if len(x) == len(found) else None for n, x in parts.items()}
    return dataclasses.replace(found[0], **whole)


class Taps:
    """Wraps methods of one trainer; `undo` puts them back."""

    def __init__(self, trainer: Any):
        self.trainer, self._undo = trainer, list[Callable[[], Any]]()
        self._sees: Any = None
        self._hooks: list[Any] = []

    def around(self, name: str, wrapper: Callable[..., Any], of: Any = None) -> None:
        """Calls of the trainer's method `name`, or another object's, if it has one, go through
        `wrapper(original, *args, **kwargs)`."""
        of = self.trainer if of is None else of
        if not callable(original := getattr(of, name, None)):
            return
        before = vars(of).get(name)
        # of partials: a deep copy of the trainer has those of its own watch
        replaced = functools.wraps(original)(functools.partial(self._call, wrapper, original))
        setattr(of, name, replaced)
        self._undo.append(functools.partial(_back, of, name, replaced, before))

    def _call(self, wrapper: Any, original: Any, *args: Any, **kwargs: Any) -> Any:
        # a later hook may still hold one that is undone
        return wrapper(original, *args, **kwargs) if self._undo else original(*args, **kwargs)

    def scored(self, seen: Callable[[Callable[[], Taken | None]], None]) -> None:
        """`seen` gets a reader of each scoring, before its result goes on to the trainer."""
        if name := next((n for n in SCORERS if hasattr(self.trainer, n)), None):
            self.around(name, functools.partial(_called, seen, _online if name == "_forward" else _method))
        else:
            self._sees = seen
            self.hooked()

    def hooked(self) -> None:
        """The hooks on the models as they are now; of a trainer that has no method for it."""
        while self._hooks:
            self._hooks.pop().remove()
        found = (self.trainer.model, getattr(self.trainer, "ref_model", None)) if self._sees and self._undo else ()
        models = {id(m): m for m in found if m is not None}.values()  # one model may be both: it is seen once
        self._hooks += [m.register_forward_hook(_Hook(self._sees), with_kwargs=True) for m in models]

    def undo(self) -> None:
        """Everything as it was; a second call does nothing."""
        while self._undo:
            self._undo.pop()()
        self.hooked()


def _back(of: Any, name: str, replaced: Any, before: Any) -> None:
    if vars(of).get(name) is replaced:
        delattr(of, name) if before is None else setattr(of, name, before)


class _Hook:
    """Shows the fused LM head's output; that of a model which is copied or pickled shows nothing, and knows no trainer."""

    def __init__(self, seen: Any = None):
        self.seen = seen

    def __call__(self, model: Any, args: Any, kwargs: Any, out: Any) -> None:
        if self.seen is not None:
            self.seen(functools.partial(_fused, out, model, **kwargs))

    def __reduce__(self) -> Any:
        return _Hook, ()


def _called(seen: Any, read: Any, original: Any, *args: Any, **kwargs: Any) -> Any:
    out = original(*args, **kwargs)
    seen(functools.partial(read, out, *args, **kwargs))
    return out


def _taken(model: Any, logps: Tensor, of: Callable[[Tensor], Tensor] = lambda x: x, **fields: Any) -> Taken:
    """`of`: makes (B, T) of what has the shape of `logps`."""
    still = not getattr(model, "training", True)
    taken = Taken(logps=of(logps.detach()), trained=logps.requires_grad, model=model, still=still, **fields)
    if logps.requires_grad:
        logps.register_hook(lambda slopes: setattr(taken, "slopes", of(slopes)))
    return taken


def _method(out: Any, model: Any, input_ids: Tensor, attention_mask: Tensor, *_: Any, **kw: Any) -> Taken | None:
    if any(kw.get(name) is not None for name in ("pixel_values", "image_grid_thw")):
        return None
    if isinstance(out, dict):
        out = out["logps"], out.get("entropies")
    logps, *more = out if isinstance(out, tuple) else (out,)
    entropies = more[0].detach() if more and torch.is_tensor(more[0]) else None
    return _taken(model, logps, ids=input_ids, attention=attention_mask, entropies=entropies, mask=None)


def _online(out: Any, model: Any, prompt: Any, prompt_mask: Any, ids: Any, mask: Any, *images: Any) -> Taken | None:
    if any(x is not None for x in images):
        return None
    joined, attention = torch.cat([prompt, ids], 1), torch.cat([prompt_mask, mask], 1)
    return _taken(model, out, ids=joined, attention=attention, entropies=None, mask=mask)


def _fused(
    out: Any, model: Any, input_ids: Any = None, labels: Any = None, attention_mask: Any = None, **kw: Any
) -> Taken | None:
    logps = getattr(out, "log_probs", None)
    if logps is None or labels is None or input_ids is None or logps.shape[1] != input_ids.shape[1] - 1:
        return None
    positions = kw.get("position_ids")
    if kw.get("pixel_values") is not None or (positions is not None and positions.dim() != 2):
        return None
    places = torch.arange(input_ids.shape[1], device=input_ids.device)
    if attention_mask is None and positions is not None and bool((positions != places).any()):
        return _unpacked(logps, model, input_ids, labels, positions)
    if attention_mask is not None and attention_mask.shape != input_ids.shape:
        return None  # a 2-dim mask lets all tokens of a row see those before
    attention = torch.ones_like(input_ids) if attention_mask is None else attention_mask
    mask = labels[:, 1:] != -100
    other = labels if bool(((labels != input_ids)[:, 1:] & mask).any()) else None
    fields = {"attention": attention, "mask": mask, "positions": positions, "labels": other}
    return _taken(model, logps, ids=input_ids, entropies=None, **fields)


def _unpacked(logps: Tensor, model: Any, ids: Tensor, labels: Tensor, positions: Tensor) -> Taken | None:
    """Of sequences in one row, (1, T), whose positions begin at 0 anew: a row for each that is in the loss, padded on the right;
    of padding behind them each token is a sequence."""
    starts = (positions[0] == 0).nonzero()[:, 0]
    ends = torch.cat([starts[1:], starts.new_tensor([ids.shape[1]])])
    places = torch.arange(int((ends - starts).amax()) if len(starts) else 0, device=ids.device)
    columns, there = starts[:, None] + places, places < (ends - starts)[:, None]
    columns = columns.clamp(max=ids.shape[1] - 1)
    if len(ids) != 1 or ids.numel() != int(there.sum()) or bool(((positions[0, columns] != places) & there).any()):
        return None
    kept = (there[:, 1:] & (labels[0, columns[:, 1:]] != -100)).any(1)
    columns, there = columns[kept], there[kept]
    own, mask = labels[0, columns], there[:, 1:] & (labels[0, columns[:, 1:]] != -100)
    other = own if bool(((own != ids[0, columns])[:, 1:] & mask).any()) else None
    fields = {"attention": there.long(), "mask": mask, "labels": other, "row": (ids, positions, columns)}
    each = ids[0, columns] * there
    return _taken(model, logps, lambda x: x[0, columns[:, 1:] - 1] * mask, ids=each, entropies=None, **fields)
