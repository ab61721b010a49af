"""A step of asynchronous GRPO, or distillation: stored rollouts from the queue, packed into a row.

GRPO's sequences share the tokens of a common prefix there. TRL's attention over such a tree is a kernel of a GPU; here it
is written out.
"""

import contextlib
import functools
import importlib
import importlib.util
import itertools
import queue
from collections.abc import Callable, Iterator, Mapping
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from parity.case.inputs import Setting
from parity.errors import Unsupported
from parity.families.divergence import divergence
from parity.families.policy_losses import divergence as k3
from parity.trainers.check import CheckCall, CheckCase, Quantity, check, holds, same, shared
from parity.trainers.checks.distillation import buckets, taught
from parity.trainers.definitions.formulas import Loss, advantages, clip_ratios
from parity.trainers.definitions.scored import Scored, entropies
from parity.trainers.definitions.training_step import exact_step, first_step, logged, measured
from parity.trainers.rig import drive, models, recorder, stored_window, twin_runs
from parity.trainers.rig.stored_window import Window
from parity.upstream import trl

Defined = tuple[Callable[[Any], Tensor], Callable[[Any], Mapping[str, Tensor]]]
"""The loss of a model, and the numbers that are logged of it."""
TRAINER, DISTILLATION = "async-grpo-trainer", "async-distillation-trainer"
STALE = 2
LOW, HIGH = 0.05, 0.1
"""Some of the window's ratios lie beyond each bound, with either sign of the advantage."""
TOP = 4
"""The teacher's likeliest tokens that a rollout brings, beside the one that is there."""
SETTINGS = {
    "model": Setting("llama", "tiny model", ("llama", "qwen2", "gemma2", "cohere")),
    "temperature": Setting(1.0, "of the sampler; distillation: of student and teacher", (1.0, 0.7)),
    "split": Setting("8x1", "batch x accumulation", ("8x1", "2x4")),
    "even": Setting(False, "completions of one length: a micro-batch's mean is that of all", (False, True)),
    "budget": Setting(False, "token_budget: that of the window's packed row; else a number of samples", (False, True)),
    "tools": Setting(False, "some completion tokens are a tool's", (False, True)),
    "beta": Setting(0.0, "distillation: the teacher's weight in the divergence, 0 forward KL", (0.0, 0.3, 1.0)),
}
CASES: list[CheckCase] = [
    *((t, {"model": name}) for t in (TRAINER, DISTILLATION) for name in SETTINGS["model"].choices or ()),
    (TRAINER, {"temperature": 0.7, "tools": True}),
    (DISTILLATION, {"temperature": 0.7, "tools": True, "beta": 0.3}),
    (DISTILLATION, {"beta": 1.0}),
    *((t, {"budget": True}) for t in (TRAINER, DISTILLATION)),
    *((t, {"split": "2x4", **more}) for t in (TRAINER, DISTILLATION) for more in ({}, {"even": True})),
]


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    queries: Tensor,
    keys: Tensor,
    most_queries: int,
    most_keys: int,
    **options: Any,
) -> Tensor:
    """softmax(softcap(scale·q·k))·v of each segment, (N, heads, D): the queries are the last tokens of its keys, and see none
    behind them, where it is causal, nor before the window. NaN for a segment that is longer than was said."""
    (left, _right), cap = options["window_size"], options.get("softcap", 0.0)
    shared_by = query.shape[1] // key.shape[1]
    out = []
    for (a, b), (c, d) in zip(itertools.pairwise(queries.tolist()), itertools.pairwise(keys.tolist()), strict=True):
        k, v = (x[c:d].repeat_interleave(shared_by, 1) for x in (key, value))
        z = torch.einsum("qhd,khd->hqk", query[a:b], k) * options["softmax_scale"]
        z = torch.tanh(z / cap) * cap if cap else z
        ahead = torch.arange(d - c) - torch.arange(d - c - (b - a), d - c).unsqueeze(1)
        seen = ((ahead <= 0) | (not options["causal"])) & ((ahead >= -left) | (left < 0))
        z = z if b - a <= most_queries and d - c <= most_keys else z * torch.nan
        out.append(torch.einsum("hqk,khd->qhd", z.masked_fill(~seen, -torch.inf).softmax(-1), v))
    return torch.cat(out)


@check("rollout-queue", (TRAINER, DISTILLATION), SETTINGS, lambda seed: CASES, pr=CASES)
def rollout_queue(call: CheckCall) -> Iterator[Quantity]:
    """One step on stored rollouts: loss and gradients are a mean over all of its tokens; what is logged of them is right (GRPO's
    ratio, KL, entropy, shares of clipped tokens; distillation's divergence and entropies); the server gets the weights."""
    s, rows = call.settings, Window.of("grpo-trainer").rows
    distils = call.case.family == DISTILLATION
    if s.beta and not distils:
        raise Unsupported("asynchronous GRPO has no beta")
    a = Loss(Window("grpo-trainer", stored_window.even(rows) if s.even else rows), s)
    window = a.window.sequences
    policy = functools.partial(stored_window.policy, s.model, torch.float64)
    with torch.no_grad():  # log-probs of the sampler, or of the teacher, as float32 has them
        older = models.model(taught(s.model), torch.float64) if distils else policy(stored_window.OLDER)
        scored = Scored(older, window, temperature=s.temperature)
        old = [x.float().double() for x in (scored.tables if distils else scored.tokens)]
    given = zip(window, old, advantages(window).tolist(), strict=True)
    samples = [_sample(*sequence, logps, a, advantage=sign) for sequence, logps, sign in given]
    # a token is shared where what follows it is shared too
    shared_by_prefix = {(i, *ids[: i + 2]) for ids, _ in window for i in range(len(ids))}
    room = sum(len(ids) for ids, _ in window) if distils else len(shared_by_prefix)
    steps, log, unsent = _run(call, a, samples, room)
    yield same([tokens for tokens, _ in recorder.sequences_of(steps.batches)], [tokens for tokens, _ in window])
    yield holds("weights", not unsent, f"the server has others: {', '.join(unsent)}")
    loss, numbers = (_distilled if distils else _defined)(a, old)
    yield from first_step(shared(call, "step", lambda: exact_step(policy(), loss)), steps)
    if s.even or s.split == "8x1":  # else a mean of the micro-batches' means is logged
        yield from logged(shared(call, "logged", lambda: measured(policy(), numbers)), log)


def _sample(ids: list[int], start: int, old: Tensor, a: Loss, **more: Any) -> Any:
    """A rollout as the queue has it, by the sampler's log-probs (T,), 0 where nothing is trained on, or the teacher's (T, V)."""
    own = a.counted(torch.tensor(ids[start:])).double()
    given = {"input_ids": np.array(ids), "completion_mask": pad(own, (start, 0)).numpy().astype("i8")}
    given |= (
        _answered(ids, start, old) if old.dim() > 1 else {"old_log_probs": pad(old * own, (start, 0)).float().numpy()}
    )
    about = {
        "group_id": tuple(ids[:start]),
        "model_version": 1 - STALE,
        "metrics": {"reward": 0.0},
        "enqueued_at": None,
        "teacher_id": "",
        "prompt_id": 0,
    }
    return SimpleNamespace(**{**given, **about, "advantage": 1.0, **more})


def _answered(ids: list[int], start: int, table: Tensor) -> dict[str, Any]:
    """What the teacher says of a sequence by its log-probs (T, V) of the completion: those of the likeliest `TOP` tokens, and of
    the token that is there where it is none of these; id -1 for no token."""
    top, tokens = table.topk(TOP).indices, torch.tensor(ids[start:]).unsqueeze(-1)
    found = torch.cat([top, tokens.masked_fill((top == tokens).any(-1, keepdim=True), -1)], -1)
    logps = table.gather(-1, found.clamp(min=0)).masked_fill(found < 0, -torch.inf)
    return {
        "teacher_topk_ids": pad(found, (0, 0, start, 0), value=-1).numpy(),
        "teacher_topk_logprobs": pad(logps, (0, 0, start, 0), value=-torch.inf).float().numpy(),
    }


def _run(call: CheckCall, a: Loss, samples: list[Any], room: int) -> tuple[recorder.Steps, dict[str, Any], list[str]]:
    """The trainer's first step on the samples, which fill a row of `room` tokens; what it logged of it; names of the weights
    that the server has not as they are. The first sync is version 1."""
    s = call.settings
    drive.needs(call.trainer, "token_budget")
    distils = call.case.family == DISTILLATION
    module = importlib.import_module(trl.class_named(call.trainer).__module__)
    name = f"{module.__name__.rpartition('.')[0]}.packing"
    if not distils and not importlib.util.find_spec(name):
        raise Unsupported(f"{call.trainer} of the installed version packs no tree of rollouts")
    ids, width = models.ids(23, "behind the window", room + 1), (models.VOCABULARY,) * distils
    no_row, other = (_sample(ids[:n], 4, torch.zeros(n - 4, *width), a, model_version=1) for n in (room + 1, room))
    full = vars(samples[-1])  # ending a token earlier it takes one token of a row
    over = {**full, **{name: x[:-1] for name, x in full.items() if isinstance(x, np.ndarray)}, "model_version": 1}
    too_old = _sample(ids[4:20], 4, torch.zeros(12, *width), a, model_version=-STALE)
    dropped = [too_old, no_row] if s.budget else [too_old]
    rollouts = iter([*samples[:4], *dropped, *samples[4:], SimpleNamespace(**over), *[other] * 64])
    buffer = SimpleNamespace(get=lambda timeout: next(rollouts), qsize=lambda: 1)
    worker, engine = mock.Mock(rollout_buffer=buffer, metrics_queue=queue.Queue()), mock.Mock()
    sent: list[dict[str, Tensor]] = [{}]
    engine.send_weights = lambda named: sent.append({name: x.detach().clone() for name, x in named})
    wanted = recorder.plain(s.split) | recorder.LOGGED | {"temperature": s.temperature, "token_budget": s.budget * room}
    wanted |= {"max_staleness": STALE, "epsilon": LOW, "epsilon_high": HIGH, "beta": s.beta}
    wanted |= {
        "teacher_temperature": s.temperature,
        "teacher_top_k": TOP,
        "teacher_server_urls": {"": "http://127.0.0.1"},
    }
    # attention that does not need a GPU
    wanted |= {"model_init_kwargs": {"attn_implementation": "eager"}} if distils else {}
    kernels, no_peak = (mock.Mock(return_value=x) for x in (SimpleNamespace(flash_attn_varlen_func=_attention), None))
    packed = contextlib.nullcontext() if distils else mock.patch(f"{name}._flash_attn", kernels)
    with (
        packed,
        mock.patch.object(module, "get_peak_flops_per_device", no_peak),  # of a GPU
        mock.patch.object(module, "threading", create=True),  # a thread that never ends
    ):
        given: dict[str, Any] = {"rollout_worker": worker, "weight_transfer": engine} | (
            {"train_dataset": a.window.dataset()} if distils else {"reward_funcs": stored_window.reward}
        )
        trainer = drive.build(call.trainer, str(models.saved(s.model)), wanted, **given)
        trainer.model.load_state_dict(stored_window.policy(s.model).state_dict())
        steps = twin_runs.train(trainer, call.path)
    weights, last = dict(trainer.model.named_parameters()), sent[-1]
    equal = {n for n in weights.keys() & last.keys() if torch.equal(weights[n], last[n])}
    unsent = sorted((weights.keys() | last.keys()) - equal)
    return steps, drive.logged(trainer), unsent


def _defined(a: Loss, old: list[Tensor]) -> Defined:
    """Of all N tokens that are trained on, ρ = π/π_old at the sampler's temperature: -Σ min(ρA, clip(ρ, 1 - ε, 1 + ε_high)A) / N
    (arXiv 2402.03300, 2503.14476), and the numbers that are logged."""
    s, window = a.s, a.window.sequences
    of_each = [a.counted(torch.tensor(ids[start:])) for ids, start in window]
    own, sizes = torch.cat(of_each), [len(x) for x in old]
    signs = advantages(window).repeat_interleave(torch.tensor(sizes))

    def ratio(scored: Scored) -> Tensor:
        return torch.cat(scored.tokens) - torch.cat(old)

    def loss(model: Any) -> Tensor:
        rho = ratio(Scored(model, window, temperature=s.temperature)).exp()
        return -torch.minimum(rho * signs, rho.clamp(1 - LOW, 1 + HIGH) * signs)[own].mean()

    def numbers(model: Any) -> Mapping[str, Tensor]:
        scored = Scored(model, window, temperature=s.temperature)
        d = ratio(scored)
        low, high = (d.expm1() < -LOW) & (signs < 0), (d.expm1() > HIGH) & (signs > 0)
        out = {"ratio": d[own].exp().mean(), "kl": k3(d, None)[own].mean()}
        out |= {"entropy": entropies(torch.cat(scored.tables))[own].mean()}
        beyond = (zip(side.split(sizes), of_each, strict=True) for side in (low, high))
        return out | clip_ratios(*([x[o].double() for x, o in side if o.any()] for side in beyond))

    return loss, numbers


def _distilled(a: Loss, answers: list[Tensor]) -> Defined:
    """The mean over all tokens that are trained on of the divergence to the teacher on few tokens; the numbers logged."""
    s, window = a.s, a.window.sequences
    tokens = [torch.tensor(ids[start:]) for ids, start in window]
    own = torch.cat([a.counted(x) for x in tokens])

    def numbers(model: Any) -> Mapping[str, Tensor]:
        tables = Scored(model, window, temperature=s.temperature).tables
        every = zip(tables, answers, tokens, strict=True)
        given = [buckets(p, q, x, s.beta, 1 if s.beta else TOP, there=True) for p, q, x in every]
        p, q, gone = (torch.cat(parts) for parts in zip(*given, strict=True))
        out = {"jsd": divergence(p, q, gone, gone, s.beta).sum(-1), "entropy": entropies(torch.cat(tables))}
        out |= {"teacher_entropy": -torch.where(gone, 0.0, q.exp() * q).sum(-1)}
        return {name: x[own].mean() for name, x in out.items()}

    return lambda model: numbers(model)["jsd"], numbers
