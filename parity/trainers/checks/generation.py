"""What completions are drawn from: the distribution of each token as it reaches the draw, in the trainer's own generation.

Everywhere else completions are stored ones. Here the model generates, with its cache and prompts padded on the left. And what
generation leaves as it was.
"""

import contextlib
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from parity.case.inputs import Setting
from parity.errors import Unsupported
from parity.trainers.check import CheckCall, CheckCase, Quantity, check, entry, holds, pairwise, tells
from parity.trainers.checks.plain_trainer import exchanged, liger
from parity.trainers.definitions import decoder
from parity.trainers.definitions.training_step import measured
from parity.trainers.rig import drive, models, recorder, stored_window
from parity.trainers.rig.stored_window import Sample
from parity.upstream import trl

TRAINERS = ("grpo-trainer", "rloo-trainer", "online-dpo-trainer")
PROMPTS = (62, 3, 9, 60)
"""Tokens of each prompt: the longest and its completion are longer than a sliding window of 64."""
LIMIT, EVEN, SHORT = 8, 40, (3, 9)
ENDS = (models.EOS, *range(40, models.VOCABULARY))
"""So many that some completion ends before the limit."""
KWARGS, LIGER = "generation_kwargs", "use_liger_kernel"
SETTINGS = {
    "model": Setting("llama", "tiny model", (*models.ARCHITECTURES, *models.VISION)),
    "even": Setting(False, f"prompts of {EVEN} tokens each: none is padded", (False, True)),
    LIGER: Setting(
        False, f"Liger's layers in the model, which may run in an interpreter: prompts of {SHORT} tokens", (False, True)
    ),
    "temperature": Setting(1.0, "divides the logits", (1.0, 1.4)),
    "top_k": Setting(0, "the likeliest k, 0 for all", (0, 7)),
    "top_p": Setting(1.0, "the fewest tokens whose probability reaches p", (1.0, 0.95)),
    "min_p": Setting(None, "those with a share of the likeliest one's probability", (None, 0.02)),
    "repetition_penalty": Setting(1.0, "divides a seen token's logit above 0, multiplies it below", (1.0, 1.3)),
    "ends": Setting(False, f"{len(ENDS)} tokens end a completion, by the model's generation config", (False, True)),
    KWARGS: Setting(False, "all these by generation_kwargs, which override fields and the model", (False, True)),
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
    ("grpo-trainer", {"ends": True}),
    *((trainer, {KWARGS: True, "ends": True}) for trainer in ("grpo-trainer", "rloo-trainer")),
    ("grpo-trainer", {LIGER: True}),
    ("grpo-trainer", {KWARGS: True, "temperature": 1.4}),
]


def cases(seed: int) -> Iterator[CheckCase]:
    """Every value of every setting by itself, and every model, per trainer."""
    yield from PR
    for trainer in TRAINERS:
        for name, setting in SETTINGS.items():
            yield from ((trainer, {name: value}) for value in setting.choices or ())
        yield trainer, {"model": "recurrent_gemma", "even": True}  # which padding changes
        yield from ((trainer, {"model": model, LIGER: True}) for model in models.ARCHITECTURES)
        for name in (*FILTERS, "ends"):
            yield from ((trainer, {KWARGS: True, name: value}) for value in SETTINGS[name].choices or ())


@check("generation", TRAINERS, SETTINGS, cases, pr=PR, paths=("released",))
def generation(call: CheckCall) -> Iterator[Quantity]:
    """Each token is drawn from the softmax of the model's logits behind prompt and completion, as the settings change it."""
    s = call.settings
    settings = {name: getattr(s, name) for name in FILTERS}
    moved = {name for name, value in settings.items() if value != SETTINGS[name].default}
    drive.needs(call.trainer, *({"top_k"} | moved))  # TRL before 0.23 has online DPO draw from the likeliest 50
    rows = [
        Sample(models.words(13, f"prompt {n}", n) + " ", "", "", label=True)
        for n in ([EVEN] * len(PROMPTS) if s.even else SHORT if getattr(s, LIGER) else PROMPTS)
    ]
    policy, ends = models.model(s.model), list(ENDS) if s.ends else [models.EOS]
    if getattr(s, KWARGS):
        drive.needs(call.trainer, KWARGS)
        given = {name: settings[name] for name in moved} | ({"eos_token_id": ends} if s.ends else {})
        settings = {name: SETTINGS[name].default for name in FILTERS} | {KWARGS: given}
    elif s.ends:
        policy.generation_config.eos_token_id = ends
    wanted = recorder.plain(f"{len(rows)}x1") | settings | {"max_new_tokens": LIMIT, "max_completion_length": LIMIT}
    wanted |= {"per_device_train_batch_size": 2 * len(rows)} if call.spec.grouped else {}
    data = stored_window.dataset(rows, "prompts")
    wanted |= liger(s.model, call.device) if getattr(s, LIGER) else {}
    with exchanged(getattr(s, LIGER)):
        trainer, scored = drive.build(call.trainer, policy, wanted, train_dataset=data), list[Tensor]()
        if s.ends and not getattr(s, KWARGS) and not hasattr(trainer, "eos_token_ids"):
            raise Unsupported(f"{call.trainer} of the installed version knows the tokenizer's <eos> alone")

        def scoring(args: Any, out: Any) -> Any:
            scored.append(drive.scores(out)[0].detach())
            return out

        if call.spec.scored:
            drive.changed(trainer, drive.scorer(trainer), scoring)
        with drive.seeded(), _watched(trainer.model) as calls:
            trained = recorder.train(trainer)
    if len(calls) != 1:
        raise Unsupported("the trainer of the installed version draws its tokens elsewhere")
    ids, mask, out, draws = calls[0]
    if not draws:
        yield holds("tokens", False, "no token is drawn")
        return
    prompts = [row[there.bool()].tolist() for row, there in zip(ids, mask, strict=True)]
    drawn = [_ended([int(chosen[b]) for _, chosen in draws], ends) for b in range(len(ids))]
    returned = [_ended(row[ids.shape[1] :].tolist(), ends) for row in out]
    sequences = [(prompt + tokens, len(prompt)) for prompt, tokens in zip(prompts, drawn, strict=True)]
    yield holds("tokens", returned == drawn, "what is returned is not what was drawn")
    kept = sorted(recorder.sequences_of(trained.batches)) == sorted(sequences)
    yield holds("sequences", kept, "what reaches the loss is not what was drawn")
    short = [len(tokens) for tokens in drawn if tokens[-1] not in ends]
    message = f"completions without an end have {short} tokens instead of {LIMIT}"
    yield holds("length", set(short) <= {LIMIT}, message)
    if s.ends:
        yield tells("ended", any(tokens[-1] != models.EOS for tokens in drawn if tokens[-1] in ends), "none ends so")
    found = torch.stack([p[b] for b, tokens in enumerate(drawn) for p, _ in draws[: len(tokens)]])

    met = torch.zeros(len(found), models.VOCABULARY, dtype=torch.bool)
    before = [tokens[:i] for tokens, start in sequences for i in range(start, len(tokens))]
    for row, tokens in zip(met, before, strict=True):
        row[tokens] = True

    def define(model: Any) -> dict[str, Tensor]:
        z = decoder.logits(model, s.model, [tokens for tokens, _ in sequences])
        behind = [own[start - 1 : -1] for own, (_, start) in zip(z, sequences, strict=True)]
        by = torch.cat([torch.log_softmax(own / s.temperature, -1) for own in behind])
        tokens = torch.tensor([token for ids, start in sequences for token in ids[start:]])
        logps = by.gather(-1, tokens.unsqueeze(-1)).squeeze(-1)
        return {"probabilities": drawn_from(torch.cat(behind), met, s), "logps": logps}

    oracle = measured(models.model(s.model, torch.float64), define)
    message = f"of {len(found)} tokens of {len(sequences)} sequences"
    yield entry("probabilities", found, oracle, message)
    if kept and scored and getattr(s, KWARGS):  # check `step-one` has the others; the loss's are the last
        rows_of = zip(*recorder.parts(trained.batches[0])[0], scored[-1], strict=True)
        by = {tuple(t[there.bool()].tolist()): own[loss[-len(own) :].bool()] for t, there, loss, own in rows_of}
        logps = torch.cat([by[tuple(tokens)] for tokens, _ in sequences])
        yield entry("logps", logps, oracle, "in the loss, at the temperature of the draws")


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


def _ended(tokens: list[int], ends: Sequence[int]) -> list[int]:
    """Up to the first end."""
    return tokens[: next((i + 1 for i, token in enumerate(tokens) if token in ends), None)]


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


BATCHED = "use_transformers_continuous_batching"
SMALL = {"num_blocks": 16, "page_size": 16, "max_batch_tokens": 64}
"""Its default takes half of the memory."""
GROUPED = ("grpo-trainer", "rloo-trainer")
EVALUATED = 2 * stored_window.GENERATIONS
"""Completions of a prompt in evaluation."""
AROUND = {
    BATCHED: Setting(False, "generate_batch in place of generate", (False, True)),
    "precision": Setting("fp32", "float32, or autocast to bfloat16", ("fp32", "autocast")),
}
AROUND_PR: list[CheckCase] = [(trainer, {BATCHED: True, "precision": "autocast"}) for trainer in GROUPED]
AROUND_PR += [("grpo-trainer", {"precision": "autocast"})]


def around_cases(seed: int) -> Iterator[CheckCase]:
    yield from ((trainer, settings) for trainer in GROUPED for settings in pairwise(AROUND, seed))


@check("around-generation", GROUPED, AROUND, around_cases, pr=AROUND_PR, paths=("released",))
def around_generation(call: CheckCall) -> Iterator[Quantity]:
    """Generation leaves weights and mode as they are: a step at rate 0, an evaluation, both of their own prompts."""
    given: dict[str, Any] = {}
    if getattr(call.settings, BATCHED):
        given = {BATCHED: True, "transformers_continuous_batching_config": SMALL}
    drive.needs(call.trainer, *given)
    given |= {"bf16": call.settings.precision == "autocast", "steps_per_generation": 2}
    wanted = recorder.plain("4x1") | {"per_device_eval_batch_size": 4, "num_generations_eval": EVALUATED} | given
    rows = stored_window.brief()
    data, other = (stored_window.dataset(part, "prompts") for part in (rows[:4], rows[4:]))
    trainer = drive.build(call.trainer, models.model("llama"), wanted, train_dataset=data, eval_dataset=other)
    before = {name: p.detach().clone() for name, p in trainer.model.named_parameters()}
    seen: list[tuple[list[int], bool]] = []

    def watched(args: tuple[Any, ...], out: Any) -> Any:
        seen.extend((tokens[:start], args[0].training) for tokens, start in recorder.sequences_of([args[1]]))
        return out

    drive.changed(trainer, "compute_loss", watched)
    with drive.seeded():
        recorder.train(trainer)
        after, steps = dict(trainer.model.named_parameters()), len(seen)
        with trl.quiet():
            trainer.evaluate()
    off = [f"{n}, {after[n].dtype}" for n, p in before.items() if p.dtype != after[n].dtype or not p.equal(after[n])]
    yield holds("weights", not off, f"{len(off)} are not what they were, first {off[:1]}")
    modes = [{training for _, training in part} for part in (seen[:steps], seen[steps:])]
    yield holds("mode", modes == [{True}, {False}], f"training in a step, then in evaluation: {modes}")
    own = sorted(stored_window.ids(row.prompt) for row in rows[4:] for _ in range(EVALUATED))
    found = sorted(prompt for prompt, _ in seen[steps:])
    others = sum(prompt not in own for prompt in found)
    yield holds("prompts", found == own, f"{others} of the evaluation's {len(found)} are not its own")
