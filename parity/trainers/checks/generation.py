"""What completions are drawn from: the distribution of each token as it reaches the draw, in the trainer's own generation.

Everywhere else completions are stored ones. Here the model generates, with its cache and prompts padded on the left.
"""

import contextlib
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from parity.case.inputs import Setting
from parity.errors import Unsupported
from parity.trainers.check import CheckCall, CheckCase, Entry, Quantity, check, holds
from parity.trainers.definitions import decoder
from parity.trainers.definitions.training_step import measured
from parity.trainers.rig import drive, models, recorder, stored_window
from parity.trainers.rig.stored_window import Sample

TRAINERS = ("grpo-trainer", "rloo-trainer", "online-dpo-trainer")
PROMPTS = (62, 3, 9, 60)
"""Tokens of each prompt: the longest and its completion are longer than a sliding window of 64."""
LIMIT, EVEN = 8, 40
SETTINGS = {
    "model": Setting("llama", "tiny model", tuple(models.ARCHITECTURES)),
    "even": Setting(False, f"prompts of {EVEN} tokens each: none is padded", (False, True)),
    "temperature": Setting(1.0, "divides the logits", (1.0, 1.4)),
    "top_k": Setting(0, "the likeliest k, 0 for all", (0, 7)),
    "top_p": Setting(1.0, "the fewest tokens whose probability reaches p", (1.0, 0.95)),
    "min_p": Setting(None, "those with a share of the likeliest one's probability", (None, 0.02)),
    "repetition_penalty": Setting(1.0, "divides a seen token's logit above 0, multiplies it below", (1.0, 1.3)),
}
Generated = tuple[Tensor, Tensor, Tensor, list[tuple[Tensor, Tensor]]]
"""A call of `generate`: prompts and their mask (N, T), what it returned, and of each draw what from, (N, V), and which."""
FILTERS = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
PR: list[CheckCase] = [
    ("grpo-trainer", {"temperature": 1.4}),
    ("grpo-trainer", {"model": "gemma3", "temperature": 1.4, "top_k": 7, "top_p": 0.95, "min_p": 0.02}),
    ("grpo-trainer", {"model": "modernbert_decoder", "repetition_penalty": 1.3}),
    ("online-dpo-trainer", {"temperature": 1.4}),
    ("rloo-trainer", {}),
]


def cases(seed: int) -> Iterator[CheckCase]:
    """Every value of every setting by itself, and every model, per trainer."""
    yield from PR
    for trainer in TRAINERS:
        for name, setting in SETTINGS.items():
            yield from ((trainer, {name: value}) for value in setting.choices or ())
        yield trainer, {"model": "recurrent_gemma", "even": True}  # which padding changes


@check("generation", TRAINERS, SETTINGS, cases, pr=PR, paths=("released",))
def generation(call: CheckCall) -> Iterator[Quantity]:
    """Each token is drawn from the softmax of the model's logits behind prompt and completion, as the settings change it."""
    s = call.settings
    settings = {name: getattr(s, name) for name in FILTERS}
    moved = {name for name, value in settings.items() if value != SETTINGS[name].default}
    drive.needs(call.trainer, *({"top_k"} | moved))  # TRL before 0.23 has online DPO draw from the likeliest 50
    rows = [
        Sample(models.words(13, f"prompt {n}", n) + " ", "", "", label=True)
        for n in ([EVEN] * len(PROMPTS) if s.even else PROMPTS)
    ]
    wanted = recorder.plain(f"{len(rows)}x1") | settings | {"max_new_tokens": LIMIT, "max_completion_length": LIMIT}
    wanted |= {"per_device_train_batch_size": 2 * len(rows)} if call.spec.grouped else {}
    data = stored_window.dataset(rows, "prompts")
    trainer = drive.build(call.trainer, models.model(s.model), wanted, train_dataset=data)
    with drive.seeded(), _watched(trainer.model) as calls:
        trained = recorder.train(trainer)
    if len(calls) != 1:
        raise Unsupported("the trainer of the installed version draws its tokens elsewhere")
    ids, mask, out, draws = calls[0]
    if not draws:
        yield holds("tokens", False, "no token is drawn", "exact")
        return
    prompts = [row[there.bool()].tolist() for row, there in zip(ids, mask, strict=True)]
    drawn = [_ended([int(chosen[b]) for _, chosen in draws]) for b in range(len(ids))]
    returned = [_ended(row[ids.shape[1] :].tolist()) for row in out]
    sequences = [(prompt + tokens, len(prompt)) for prompt, tokens in zip(prompts, drawn, strict=True)]
    yield holds("tokens", returned == drawn, "what is returned is not what was drawn", "exact")
    kept = sorted(recorder.sequences_of(trained.batches)) == sorted(sequences)
    yield holds("sequences", kept, "what reaches the loss is not what was drawn", "exact")
    short = [len(tokens) for tokens in drawn if tokens[-1] != models.EOS]
    message = f"completions without <eos> have {short} tokens instead of {LIMIT}"
    yield holds("length", set(short) <= {LIMIT}, message, "exact")
    found = torch.stack([p[b] for b, tokens in enumerate(drawn) for p, _ in draws[: len(tokens)]])

    met = torch.zeros(len(found), models.VOCABULARY, dtype=torch.bool)
    before = [tokens[:i] for tokens, start in sequences for i in range(start, len(tokens))]
    for row, tokens in zip(met, before, strict=True):
        row[tokens] = True

    def define(model: Any) -> dict[str, Tensor]:
        z = decoder.logits(model, s.model, [tokens for tokens, _ in sequences])
        behind = [own[start - 1 : -1] for own, (_, start) in zip(z, sequences, strict=True)]
        return {"probabilities": drawn_from(torch.cat(behind), met, s)}

    oracle = measured(models.model(s.model, torch.float64), define)
    message = f"of {len(found)} tokens of {len(sequences)} sequences"
    yield Quantity("probabilities", found, Entry(oracle, "probabilities"), message)


def drawn_from(z: Tensor, met: Tensor, s: SimpleNamespace) -> Tensor:
    """Probabilities (N, V) of the next token, from its logits and whether each stands before. In turn: the penalty (arXiv
    1909.05858, section 4.1), the temperature, the largest k, nucleus (arXiv 1904.09751), and min-p (arXiv 2407.01082)."""
    if s.repetition_penalty != 1.0:
        z = torch.where(met, torch.where(z < 0, z * s.repetition_penalty, z / s.repetition_penalty), z)
    p = torch.softmax(z / s.temperature, -1)
    if s.top_k:
        p = _kept(p, p >= p.topk(s.top_k, -1).values[:, -1:])
    if s.top_p < 1:
        ordered, order = p.sort(-1, descending=True)
        likelier = (ordered.cumsum(-1) - ordered).gather(-1, order.argsort(-1))
        p = _kept(p, likelier < s.top_p)
    return p if s.min_p is None else _kept(p, p >= s.min_p * p.amax(-1, keepdim=True))


def _kept(p: Tensor, kept: Tensor) -> Tensor:
    p = torch.where(kept, p, 0.0)
    return p / p.sum(-1, keepdim=True)


def _ended(tokens: list[int]) -> list[int]:
    """Up to the first <eos>."""
    return tokens[: tokens.index(models.EOS) + 1 if models.EOS in tokens else None]


@contextlib.contextmanager
def _watched(model: Any) -> Iterator[list[Generated]]:
    """Every call of `model.generate` while it lasts."""
    original, draw = model.generate, torch.multinomial
    calls: list[Generated] = []

    def generate(input_ids: Tensor, attention_mask: Tensor, **more: Any) -> Any:
        draws: list[tuple[Tensor, Tensor]] = []

        def drawing(p: Tensor, *given: Any, **options: Any) -> Tensor:
            chosen = draw(p, *given, **options)
            draws.append((p.detach().clone(), chosen.detach().clone()))
            return chosen

        with mock.patch.object(torch, "multinomial", drawing):
            out = original(input_ids=input_ids, attention_mask=attention_mask, **more)
        calls.append((input_ids, attention_mask, out, draws))
        return out

    with mock.patch.object(model, "generate", generate):
        yield calls
