"""What a collator made of sequences, held against the sequences themselves: where their loss ends, and what attention sees."""

from collections.abc import Collection, Iterator, Mapping
from typing import Any

from torch import Tensor

from parity.watching.taps import Taken

Fault = tuple[str, list[str]]


def faults(taken: Taken, mask: Tensor, tokenizer: Any) -> Iterator[Fault]:
    """All of one micro-batch whose loss is over `mask`, (B, T)."""
    eos, pad, unknown, bos = (getattr(tokenizer, f"{n}_token_id", None) for n in ("eos", "pad", "unk", "bos"))
    absent = ~taken.attention.bool()
    lost = mask.bool() & (absent[:, 1:] & absent[:, :-1])[:, -mask.shape[1] :]  # predicted from padding, too
    if bool(lost.any()):
        yield "tokens of the loss are padding", [f"{int(lost.sum())} of {int(mask.sum())}"]
    found = unended(taken, mask, eos), beyond(taken, mask, eos, pad, (bos, unknown)), seen_padding(taken, pad, unknown)
    yield from filter(None, found)


def unscored(inputs: Mapping[str, Any], tokenizer: Any) -> Iterator[Fault]:
    """The same of a batch for a model's own loss, whose labels (B, T) are the ids, or -100, and that no row has more than one
    sequence of."""
    given: list[Any] = [inputs.get(name) for name in ("input_ids", "labels", "attention_mask")]
    shapes, masked = {getattr(x, "shape", ()) for x in given}, getattr(tokenizer, "mask_token_id", None) is not None
    if masked or "position_ids" in inputs or len(shapes) > 1 or len(*shapes) != 2:
        return
    ids, labels, there = given
    mask = (labels != -100)[:, 1:]
    if not bool(((labels != ids)[:, 1:] & mask).any()):
        yield from faults(Taken(ids, there, ids.new_zeros(mask.shape), None, mask, True, None), mask, tokenizer)


def unended(taken: Taken, mask: Tensor, eos: int | None) -> Fault | None:
    """Where no `eos` is in the loss, `mask` (B, T), though it follows the last token that is: a model never learns to stop."""
    if eos is None or taken.labels is not None:
        return None
    inside, width = mask.bool(), mask.shape[1]
    ends, there = taken.ids[:, -width:] == eos, taken.attention[:, -width:].bool()
    last = inside & (inside.flip(1).cumsum(1).flip(1) == 1)
    lost = last[:, :-1] & (there & ends)[:, 1:]
    if bool((inside & ends).any()) or not bool(lost.any()):
        return None
    return "the loss ends before the sequence does", [f"the EOS token follows in {int(lost.sum())} of {len(mask)} rows"]


def beyond(
    taken: Taken, mask: Tensor, eos: int | None, pad: int | None, others: Collection[int | None]
) -> Fault | None:
    """Where padding that attention sees too is in the loss, `mask` (B, T): from a token behind an `eos` on a row has nothing but
    `pad`; where that is a token of texts too, `eos` or one of the `others`, more than one."""
    if eos is None or pad is None:
        return None
    ids, there = (x[:, -mask.shape[1] :] for x in (taken.ids, taken.attention.bool()))
    inside, padded = mask.bool() & there, ((ids == pad) | ~there).int().flip(1).cumprod(1).flip(1).bool()
    over = inside[:, 1:] & inside[:, :-1] & padded[:, 1:] & (ids[:, :-1] == eos)
    if pad == eos or pad in others:
        over = over[:, :-1] & inside[:, 2:]
    if not bool(over.any()):
        return None
    return "the loss goes on behind the EOS token", [f"in {int(over.any(1).sum())} of {len(ids)} rows"]


def seen_padding(taken: Taken, pad: int | None, unknown: int | None) -> Fault | None:
    """Where rows that attention sees begin with `pad` tokens, two or more beyond those of the row that has fewest, if any. An
    `unknown` word may be the first."""
    if pad in (None, unknown):
        return None
    there = taken.attention.bool()
    begun = (~there | (taken.ids == pad)).int().cumprod(1).bool()
    runs = (begun & there).sum(1)
    runs = runs - runs.amin()
    if int(runs.amax()) < 2:
        return None
    text = f"{int(runs.amax())} tokens before a sequence, in {int((runs > 0).sum())} of {len(runs)} rows"
    return "attention sees padding", [text]
