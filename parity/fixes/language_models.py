"""The language models that a patch is for, a change of each, and how a model is tried."""

import contextlib
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from parity.fixes.patch import ALREADY, Change, Patch

_ROWS, _LENGTH = 4, 9


def change_each(
    name: str,
    trainer_or_model: Any,
    there: Callable[[Any], Change | None],
    why_not: Callable[[Any], str | None],
    make: Callable[[Any], tuple[Change, str]],
) -> Patch:
    """The patch `name` of every language model: `there` is its change in force, `why_not` says why none is needed, `make`
    changes and names it."""
    changed: list[str] = []
    reasons: list[str] = []
    undo: list[Callable[[], object]] = []
    for model in language_models(trainer_or_model):
        kind, change = type(model).__name__, there(model)
        if change is not None:
            reasons.append(ALREADY)
        elif (why := why_not(model)) is not None:
            reasons.append(f"{kind}: {why}")
            continue
        else:
            change, words = make(model)
            changed.append(f"{kind} ({words})")
        undo += change.hold(trainer_or_model)
    reason = None if changed else "; ".join(dict.fromkeys(reasons)) or "there is no transformers model"
    return Patch(name, tuple(changed), reason=reason, _undo=undo)


def modules_of(trainer_or_model: Any) -> list[nn.Module]:
    """All modules of a model, or of a trainer's policy and reference, once each."""
    models = [trainer_or_model]
    if not isinstance(trainer_or_model, nn.Module):
        models = [getattr(trainer_or_model, name, None) for name in ("model", "ref_model")]
    inside = [m for model in models if isinstance(model, nn.Module) for m in model.modules()]
    return list({id(m): m for m in inside}.values())


def language_models(trainer_or_model: Any) -> list[Any]:
    """The language models, of a trainer policy and reference, whatever has wrapped them."""
    from transformers import PreTrainedModel

    inside = modules_of(trainer_or_model)
    return [m for m in inside if isinstance(m, PreTrainedModel) and m.get_output_embeddings() is not None]


def in_shards(model: Any) -> bool:
    """Whether ZeRO-3 has partitioned parameters of the model: an empty tensor stands for each."""
    return any(hasattr(p, "ds_id") for p in model.parameters())


def probe(model: Any) -> dict[str, Tensor]:
    """Rows of unlike tokens, none of them a placeholder of an image or a sound."""
    config = model.config.get_text_config()
    nested = [vars(c) for c in (model.config, config)]
    placeholders = {v for c in nested for k, v in c.items() if k.endswith(("_token_id", "_token_index"))}
    free = [i for i in range(min(config.vocab_size, 512)) if i not in {v for v in placeholders if isinstance(v, int)}]
    places = torch.arange(_ROWS * _LENGTH).mul(7).remainder(len(free)).view(_ROWS, _LENGTH)
    ids = torch.tensor(free)[places].to(model.get_input_embeddings().weight.device)
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


@contextlib.contextmanager
def undisturbed(model: nn.Module) -> Iterator[None]:
    """Every module's mode, every buffer (observers move when they look) and random numbers as before afterwards."""
    training = [(m, m.training) for m in model.modules()]
    kept = [(b, b.clone()) for b in model.buffers()]
    with torch.random.fork_rng(range(torch.cuda.device_count())), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            yield
        finally:
            for module, mode in training:
                module.training = mode
            for buffer, value in kept:
                if buffer.shape == value.shape:
                    buffer.data.copy_(value)
