"""What a collator made of sequences, held against the sequences themselves: where their loss ends, and what attention sees; and
against the rows that it was given."""

import math
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from parity.watching.taps import Taken

Fault = tuple[str, list[str]]
Tokens = list[tuple[int, int, bool]]
"""Ids of a row; whether each is in the loss, -1 where that is unknown; whether a sequence begins with it."""
SIDES = "chosen_ids", "rejected_ids", "completion_ids", "KL_completion_ids"
"""Columns of what follows a prompt."""
CUTS = "max_length", "max_seq_length", "max_prompt_length", "max_completion_length"
"""Settings that may make a sequence shorter."""


def faults(taken: Taken, mask: Tensor, tokenizer: Any, packed: bool = False) -> Iterator[Fault]:
    """All of one micro-batch whose loss is over `mask`, (B, T); of texts `packed` in rows no token is known to be padding."""
    eos, pad, unknown, bos = (getattr(tokenizer, f"{n}_token_id", None) for n in ("eos", "pad", "unk", "bos"))
    pad, absent = None if packed else pad, ~taken.attention.bool()
    lost = mask.bool() & (absent[:, 1:] & absent[:, :-1])[:, -mask.shape[1] :]  # predicted from padding, too
    if bool(lost.any()):
        yield "tokens of the loss are padding", [f"{int(lost.sum())} of {int(mask.sum())}"]
    found = unended(taken, mask, eos), beyond(taken, mask, eos, pad, (bos, unknown)), seen_padding(taken, pad, unknown)
    yield from filter(None, found)


def unscored(inputs: Mapping[str, Any], tokenizer: Any) -> Iterator[Fault]:
    """The same of a batch for a model's own loss, whose labels (B, T) are the ids, or -100. Rows may be texts, packed."""
    given: list[Any] = [inputs.get(name) for name in ("input_ids", "labels", "attention_mask")]
    shapes, masked = {getattr(x, "shape", ()) for x in given}, getattr(tokenizer, "mask_token_id", None) is not None
    if masked or "position_ids" in inputs or len(shapes) > 1 or len(*shapes) != 2:
        return
    ids, labels, there = given
    mask = (labels != -100)[:, 1:]
    if not bool(((labels != ids)[:, 1:] & mask).any()):
        pad, eos = (getattr(tokenizer, f"{n}_token_id", None) for n in ("pad", "eos"))
        taken = Taken(ids, there, ids.new_zeros(mask.shape), None, mask, True, None)
        yield from faults(
            taken, mask, tokenizer, pad == eos and several(ids, eos)
        )  # EOS after EOS may be an empty text


def several(ids: Tensor, eos: int | None) -> bool:
    """Whether an `eos` stands between other tokens of a row."""
    if eos is None:
        return False
    other = (ids != eos).int()
    return bool(((other == 0) & (other.cumsum(1) > 0) & (other.flip(1).cumsum(1).flip(1) > 0)).any())


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


def overwritten(made: Iterable[tuple[str, Tensor, Tensor]], batches: Iterable[Any]) -> Fault | None:
    """Where tensors of a step's `batches` are no longer what the collator made, name, tensor and copy of each: it has used their
    memory again."""
    given = {id(x) for batch in batches if isinstance(batch, Mapping) for x in batch.values()}
    # of other batches: a name comes once in each
    shared = Counter((n, x.untyped_storage().data_ptr()) for n, x, _ in made)
    other = [(n, x) for n, x, copy in made if id(x) in given and not torch.equal(x.nan_to_num(), copy.nan_to_num())]
    names = dict.fromkeys(n for n, x in other if shared[n, x.untyped_storage().data_ptr()] > 1)
    return ("the collator writes over a batch before the step has used it", [", ".join(names)]) if names else None


def collated(rows: Any, batch: Any, trainer: Any, pad: int | None) -> Iterator[tuple[Fault, bool]]:
    """Where a `batch` is not what the columns of its `rows` say, and whether that may be meant. The rows may be in another order,
    or all in one. Nothing of sequences with other tokens than a row's, or where these are as many others."""
    if not isinstance(batch, Mapping) or not all(isinstance(row, Mapping) for row in rows):
        return
    made, n, labels = _made(batch) + _made(batch, "KL_"), len(rows), [*batch.get("label", ())]
    told = [x for side in zip(*(_told(row, trainer) for row in rows), strict=False) for x in side]
    labelled = len(labels) == n and all("label" in row for row in rows)
    if len(made) == 1 < n == len(told):
        told, n = [[token for x in told for token in x]], 1
    holders = trainer.args, getattr(trainer, "data_collator", None)
    given = (getattr(of, name, None) for of in holders for name in CUTS)
    limit = min([x for x in given if isinstance(x, int)], default=math.inf)
    swaps = f"exchanges {'completions and those of the KL' if labels else 'chosen and rejected'}"
    counts = Counter[tuple[str, bool]]()

    def marks(row: Tokens, j: int, k: int) -> list[tuple[int, int]]:
        return [(x[1], y[1]) for x, y in zip(row[1:], told[j][k + 1 :], strict=False) if x[1] >= 0 and not y[2]]

    def turned(i: int, j: int) -> bool:
        return labelled and i < n and bool(labels[i]) != bool(rows[j % n]["label"])

    for i, row in enumerate(made if len(made) == len(told) else ()):
        near = sorted(range(len(told)), key=lambda j: (j // n != i // n, j != i))
        enough = [j for j in near if len(row) >= min(limit, len(told[j]))]
        found = [(j, k) for j in enough for k in _places(row, told[j])] or [(i, k) for k in _places(row, told[i])]
        if not found:
            continue
        # a text may stand twice in a sequence, or in two rows
        j, k = min(found, key=lambda at: (any(x > y for x, y in marks(row, *at)), turned(i, at[0])))
        here, out = told[j][k : k + len(row)], told[j][:k] + told[j][k + len(row) :]
        lost = [inside for token, inside, _ in out if j not in enough and token != pad]
        both, pairs = marks(row, j, k), zip(row[1:], here[1:], strict=True)
        beside = not {"cu_seq_lens_q", "seq_idx"} & {*batch} and any(y[2] > x[2] for x, y in pairs)
        spared = not all(inside or begins for _, inside, begins in told[j])
        does = {  # what it does, whether one of the user's own may mean it
            (swaps, False): j // n != i // n,
            ("turns labels", False): turned(i, j),
            ("drops tokens of the loss", False): any(lost),
            ("puts tokens into the loss that the columns leave out", False): any(x > y for x, y in both),
            ("drops tokens outside the loss", True): bool(lost) and not any(lost),
            ("leaves tokens of the loss out of it", True): spared and any(x < y for x, y in both),
            ("lets sequences of one row see each other", True): beside,
        }
        counts.update(key for key, one in does.items() if one)
    for (what, meant), count in counts.items():
        yield (f"the collator {what}", [f"in {count} of {len(made)} rows"]), meant


def _places(row: Tokens, whole: Tokens) -> list[int]:
    """Where in the `whole` the ids of the row are."""
    a, b = [x[0] for x in row], [x[0] for x in whole]
    return [k for k in range(len(b) - len(a) + 1) if b[k] == a[0] and b[k : k + len(a)] == a] if a else []


def _told(row: Mapping[str, Any], trainer: Any) -> list[Tokens]:
    """A row's sequence, or chosen and rejected, by its columns; none where it has other ones."""
    lists = {n: x.tolist() if hasattr(x, "tolist") else x for n, x in row.items()}
    given = {n: x for n, x in lists.items() if isinstance(x, list) and all(isinstance(one, int) for one in x)}
    prompt = given.get("prompt_ids", [])
    if sides := [n for n in SIDES if n in given]:
        return [[(t, i >= len(prompt), not i) for i, t in enumerate(prompt + given[n])] for n in sides]
    ids = given.get("input_ids", [])
    of_completion = getattr(trainer, "completion_only_loss", True) is not False and "labels" not in given
    marks = [given[n] for n in ("completion_mask",) * of_completion + ("assistant_masks",) if n in given]
    marks = [[label != -100 for label in given["labels"]]] if "labels" in given else marks
    starts, there = {*accumulate(given.get("seq_lengths", []), initial=0)}, given.get("attention_mask", [1] * len(ids))
    if any(len(x) != len(ids) for x in (there, *marks)):
        return []
    return [[(t, all(m[i] for m in marks) and i not in starts, i in starts) for i, t in enumerate(ids) if there[i]]]


def _made(batch: Any, of: str = "") -> list[Tokens]:
    """The rows of a batch (B, T) without their padding; none of another batch. `of`: begins the names of its tensors."""
    names = "input_ids", "attention_mask", "labels", "completion_mask", "position_ids"
    ids, there, labels, inside, places = (batch.get(f"{of}{n}") for n in names)
    if not torch.is_tensor(ids) or ids.dim() != 2 or (there is not None and getattr(there, "shape", ()) != ids.shape):
        return []
    inside = inside if labels is None else labels != -100
    inside = inside if getattr(inside, "shape", ()) == ids.shape else torch.full_like(ids, -1)
    begins = (places if getattr(places, "shape", ()) == ids.shape else torch.arange(ids.shape[1]).expand_as(ids)) == 0
    kept = torch.ones_like(ids).bool() if there is None else there.bool()
    columns = [[x[i][kept[i]].tolist() for x in (ids, inside.int(), begins)] for i in range(len(ids))]
    return [list(zip(*x, strict=True)) for x in columns]
