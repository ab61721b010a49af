"""Checks of distillation: a teacher on a server, and GKD, GOLD, IW-OPD with a local teacher as the control.

A server returns log-probs of few tokens; TRL pads ragged completions with -inf and must keep that out of the loss. In
trl 1.1.0 to 1.3.0 it did not: the loss is finite, every gradient NaN at the first step (reverse KL, beta 1).
"""

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from parity.case.inputs import Setting
from parity.errors import Unsupported
from parity.families.divergence import completed, divergence
from parity.judge.oracle import Oracle
from parity.trainers.check import CheckCall, CheckCase, Quantity, check, holds, pairwise
from parity.trainers.definitions.formulas import jsd
from parity.trainers.definitions.scored import Scored
from parity.trainers.definitions.training_step import exact_step, first_step
from parity.trainers.rig import drive, models, recorder, stored_window, twin_runs
from parity.trainers.rig.recorder import Sequences
from parity.trainers.rig.stored_window import Sample, Window
from parity.trainers.rig.twin_runs import Run
from parity.trainers.specs import SPECS

ARCHITECTURE, TEACHER = "llama", "qwen2"
COMMON = {"lmbda": 0.0, "max_length": 32, "num_generations": 1}
SAMPLES = {"ragged": ((2, 5), (4, 2)), "equal": ((3, 5), (3, 2)), "even": ((3, 4), (3, 4))}
"""Tokens of prompt and completion, by what the prompts are; ragged ones shift the offsets within a batch; even: both alike."""
SETTINGS = {
    "beta": Setting(1.0, "teacher's weight in the divergence: 0 forward KL, 1 reverse KL", (0.0, 0.3, 0.5, 1.0)),
    "split": Setting("2x1", "batch x accumulation", ("1x2", "2x1")),
    "temperature": Setting(1.0, "of student and teacher; GKD: of sampling alone", (1.0, 0.7)),
}
SERVED = SETTINGS | {
    "top": Setting(1, "loss_top_k, the tokens that the divergence is restricted to", (1, 4)),
    "vllm": Setting(
        False, "the server scores the tokens of a prompt at temperature 1, as vLLM does up to 0.33", (False, True)
    ),
}
RAGGED = SETTINGS | {
    "prompts": Setting("equal", "lengths of the prompts", ("ragged", "equal")),
    "sampler": Setting("none", "who writes the completions, in place of the dataset's", ("none", "student", "teacher")),
    "ends": Setting(False, "two tokens end what the student generates"),
    "empty": Setting(False, "the student ends one completion at once"),
    "longer": Setting(False, "they are longer than the dataset's", (False, True)),
    "alone": Setting(False, "IW-OPD: the dataset has prompts alone"),
    "objective": Setting("jsd", "IW-OPD: jsd or iw_opd"),
    "uld": Setting("", "GOLD: use_uld_loss, and its uld_token_merge_strategy", ("", "observed", "bayesian")),
    "top": Setting(0, "IW-OPD: loss_top_k, the tokens that jsd is restricted to beside a tail bucket; 0: all"),
}
LEAKED = {"beta": 1.0, "split": "1x2"}
"""Where the padding leaked: accumulated."""
SERVER, IW_OPD, IW, GAMMA = "server-distillation-trainer", "iw-opd-trainer", "iw_opd", 0.8
GOLD = "gold-trainer"
WARMER = 1.5
"""GOLD's uld_teacher_temperature over the student's."""
LOCAL = ("gkd-trainer", GOLD, IW_OPD)
MIXTURE = {"beta": 0.3, "temperature": 0.7}
VLLM = {"temperature": 0.7, "vllm": True}
SHORT: list[CheckCase] = [(t, s) for t in (SERVER, IW_OPD) for s in (MIXTURE, LEAKED, {"beta": 0.0, "top": 4}, VLLM)]
SHORT_LOCAL: list[CheckCase] = [
    *((t, s | {"split": "1x2", "prompts": "ragged"}) for t in LOCAL for s in (LEAKED, MIXTURE)),
    *((t, {"sampler": s, "prompts": "ragged"}) for t in LOCAL for s in ("student", "teacher")[: 1 + (t != IW_OPD)]),
    *((t, {"sampler": "student", "longer": True}) for t in LOCAL),
    *((t, {"sampler": "student", "ends": True, "prompts": "ragged"}) for t in LOCAL),
    (IW_OPD, {"sampler": "student", "alone": True}),
    (IW_OPD, {"sampler": "student", "objective": IW, "prompts": "ragged", "temperature": 0.7}),
    (IW_OPD, {"sampler": "student", "objective": IW, "prompts": "ragged", "split": "1x2", "alone": True}),
    (GOLD, {"uld": "observed", "split": "1x2"}),
    (GOLD, {"uld": "bayesian", "prompts": "ragged", "sampler": "student", "temperature": 0.7}),
    (GOLD, {"uld": "bayesian", "sampler": "student", "empty": True}),
    *((IW_OPD, {"top": k, "beta": beta, "temperature": 0.7}) for k, beta in ((1, 0.3), (2, 0.3), (2, 0.0), (1, 1.0))),
]


def _paired(settings: Mapping[str, Setting], short: list[CheckCase]) -> dict[str, Any]:
    """A check's trainers, settings and cases: the short ones, and every pair of values."""
    trainers = tuple(dict.fromkeys(trainer for trainer, _ in short))

    def cases(seed: int) -> list[CheckCase]:
        own = {t: {n: s for n, s in settings.items() if n != "uld" or t == GOLD} for t in trainers}
        return [*short, *((t, s) for t in trainers for s in pairwise(own[t], seed))]

    return {"trainers": trainers, "settings": settings, "quick": short, "pr": short, "cases": cases}


@check("teacher-server", **_paired(SERVED, SHORT))
def teacher_server(call: CheckCall) -> Iterator[Quantity]:
    """Distillation from a teacher on a server on ragged completions: finite, and by the definition."""
    s = call.settings
    trainer, teacher = call.case.family, Teacher(models.model(TEACHER).eval(), s.temperature, s.vllm)
    if s.top > 1 and s.beta:
        raise Unsupported("more than one token of a server are taken with beta 0 alone")
    steps = twin_runs.train(served(trainer, teacher, s), call.path)
    window = recorder.sequences_of(steps.batches)
    yield holds("sequences", sorted(len(tokens) for tokens, _ in window) == [6, 7], f"the window holds {window}")

    def terms(model: Any, batch: Sequences) -> list[Tensor]:
        pairs = zip(Scored(model, batch, temperature=s.temperature).tables, batch, strict=True)
        return [
            sparse(logps, teacher.answers[tuple(ids)], torch.tensor(ids[n:]), s.beta, s.top)
            for logps, (ids, n) in pairs
        ]

    batches = [recorder.sequences_of([batch]) for batch in steps.batches]
    yield from first_step(by_definition(terms, batches, local=True), steps)  # the server path's own normaliser


def by_definition(
    terms: Callable[[Any, Sequences], list[Tensor]], window: list[Sequences], local: bool, model: str = ARCHITECTURE
) -> Oracle:
    """The mean of `terms` over the completion tokens of the window; `local`: of each micro-batch, then over those."""

    def averaged(model: Any) -> Tensor:
        parts = [torch.cat(terms(model, batch)) for batch in window]
        return torch.stack([p.mean() for p in parts]).mean() if local else torch.cat(parts).mean()

    return exact_step(models.model(model, torch.float64).train(), averaged)


def sparse(logps: Tensor, answer: Tensor, tokens: Tensor, beta: float, k: int) -> Tensor:
    """The divergence at each token on its `buckets`, (T,)."""
    p, q, gone = buckets(logps, answer, tokens, beta, k)
    return divergence(p, q, gone, gone, beta).sum(-1)


def buckets(
    logps: Tensor, answer: Tensor, tokens: Tensor, beta: float, k: int, there: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    """Log-probs of student and teacher at each token on k of its tokens, completed by a tail bucket, and which are left out.
    beta 0: the teacher's likeliest; 1: the student's, of one the token that is there; between: both, once where they are the
    same. `there`: the token that is there in place of the student's, and with beta 0 too."""
    top = answer.topk(k).indices
    own = logps.topk(k).indices if k > 1 and not there else tokens.unsqueeze(-1)
    both = beta < 1.0 and (there or beta > 0.0)
    support = torch.cat([top, own], -1) if both else top if beta == 0.0 else own
    gone = torch.zeros_like(support, dtype=torch.bool)
    if both:
        gone[:, k:] = (own.unsqueeze(-1) == top.unsqueeze(-2)).any(-1)
    p, q = (completed(x.gather(-1, support), gone, tail=True) for x in (logps, answer.double()))
    return p, q, torch.cat([gone, torch.zeros_like(gone[:, :1])], -1)


class Teacher:
    """A model in place of TRL's `VLLMClient`. `answers`: the log-probs (T, V) of the completion of each scored sequence, as they
    are at the temperature that it should be asked for; `vllm`: it heeds none."""

    def __init__(self, model: Any, temperature: float, vllm: bool):
        self.model, self.temperature, self.vllm = model, temperature, vllm
        self.answers: dict[tuple[int, ...], Tensor] = {}

    def get_sequence_logprobs(
        self, sequences: Sequence[list[int]], prompt_lengths: Sequence[int], top_logprobs: int, temperature: float
    ) -> dict[str, list[Any]]:
        """Of each completion token: the likeliest `top_logprobs` tokens of the vocabulary, and the token that is there."""
        out: dict[str, list[Any]] = {}
        for ids, start in zip(sequences, prompt_lengths, strict=True):
            with torch.no_grad():
                logits = self.model(input_ids=torch.tensor([ids])).logits[0, start - 1 : -1]
            self.answers[tuple(ids)] = torch.log_softmax(logits.double() / self.temperature, -1).float()
            logps = torch.log_softmax(logits.double() / (1.0 if self.vllm else temperature), -1).float()
            top, there = logps.topk(top_logprobs, -1), torch.tensor(ids[start:]).unsqueeze(-1)
            found = {"logprobs": top.values, "logprob_token_ids": top.indices}
            found |= {"actual_logprobs": logps.gather(-1, there), "actual_token_ids": there}
            for name, value in found.items():
                out.setdefault(name, []).append(value.tolist())
        return out


def upstream() -> str:
    """The class of the installed release whose teacher may be a server. Raises Unsupported when it has none."""
    for name in ("ServerDistillationTrainer", "DistillationTrainer"):
        with contextlib.suppress(Unsupported):
            if hasattr(drive.trl_class(name), "_get_teacher_token_logprobs_from_server"):
                return name
    raise Unsupported("the installed version has no distillation from a teacher server")


def samples(prompts: str = "ragged") -> list[Sample]:
    """A dataset of conversations, whose completions have no end."""
    return [
        Sample(models.words(i, "prompt", p), models.words(i, "completion", c), "", label=True, limit=c)
        for i, (p, c) in enumerate(SAMPLES[prompts])
    ]


def served(trainer: str, teacher: Teacher, s: SimpleNamespace) -> Any:
    """A trainer over a tiny student; `s`: `SERVED`."""
    name = upstream() if trainer == SERVER else SPECS[trainer].upstream
    wanted = recorder.plain(s.split) | COMMON | {"beta": s.beta, "temperature": s.temperature, "loss_top_k": s.top}
    wanted |= {
        "teacher_model_server_url": "http://127.0.0.1",
        "use_teacher_server": True,
        "distillation_objective": "jsd",
    }
    generates = hasattr(drive.trl_class(name), "_generate_single_turn")
    data = stored_window.dataset(samples(), "prompts" if generates else "turns")
    from trl.generation import vllm_client

    with mock.patch.object(vllm_client, "VLLMClient", return_value=teacher):
        made = drive.build(name, models.model(ARCHITECTURE), wanted, train_dataset=data)
    stored = {tuple(stored_window.ids(s.prompt)): stored_window.ids(s.completion) for s in samples()}
    if generates:
        made._generate_single_turn = lambda prompt_ids, *_: [list(stored[tuple(p)]) for p in prompt_ids]
    elif not hasattr(made.args, "lmbda"):  # 1.9, which always samples
        twin_runs.generate_in_model(made, {prompt: [completion] for prompt, completion in stored.items()})
    return made


@check("ragged-control", **_paired(RAGGED, SHORT_LOCAL), moves=True)
def ragged_control(call: CheckCall) -> Iterator[Quantity]:
    """GKD, GOLD or IW-OPD with a local teacher on ragged completions: finite also in releases whose server path was not."""
    trainer, s = call.case.family, SimpleNamespace(model=ARCHITECTURE, **vars(call.settings))
    if (s.alone or s.objective == IW) and (trainer != IW_OPD or s.sampler != "student"):
        raise Unsupported("only IW-OPD goes without completions, or weights those that the student generates")
    if s.uld and (trainer != GOLD or s.sampler == "teacher"):
        raise Unsupported("only GOLD compares sorted probabilities, of its student's completions or the dataset's")
    if s.top and (trainer != IW_OPD or s.objective == IW):
        raise Unsupported("only IW-OPD's jsd is restricted to some tokens")
    run = Control(trainer, s, call.path, call.device)
    asked = run.sampled() if s.sampler != "none" else None
    yield run.all_there()
    if asked is not None:
        given = [(g.do_sample, g.temperature) for g in (c.kwargs["generation_config"] for c in asked.call_args_list)]
        yield holds("sampling", set(given) == {(True, s.temperature)}, f"sampled, at a temperature: {given}")
    window = [recorder.sequences_of([batch]) for batch in run.steps.batches]
    local = all(n is None for n in run.steps.items)  # before 1.10
    yield from first_step(run.definition(window, local), run.steps)


def taught(student: str) -> str:
    """The teacher's architecture, another one than the student's."""
    return TEACHER if student != TEACHER else ARCHITECTURE


class Control(Run):
    """GKD, GOLD or IW-OPD over the tiny student `s.model` and its local teacher; `s`: `RAGGED`, and `model`."""

    def __init__(self, trainer: str, s: SimpleNamespace, path: str, device: str = "cpu", **config: Any):
        super().__init__(trainer, SimpleNamespace(whole=False, **vars(s)), path, samples(s.prompts), **config)
        self.device = device

    def build(self, **more: Any) -> Any:
        s, upstream = self.s, SPECS[self.trainer].upstream
        wanted = recorder.plain(s.split) | COMMON | {"beta": s.beta, "temperature": s.temperature}
        wanted |= {"lmbda": float(s.sampler == "student"), "loss_top_k": s.top, "distillation_objective": s.objective}
        wanted |= {"iw_opd_gamma": GAMMA}
        if s.sampler == "teacher":
            drive.needs(upstream, "seq_kd")
            wanted |= {"seq_kd": True}
        if s.uld:
            own = {"use_uld_loss": True, "use_extended_uld": False, "uld_token_merge_strategy": s.uld}
            own |= {"uld_student_temperature": s.temperature, "uld_teacher_temperature": WARMER * s.temperature}
            drive.needs(upstream, *own)
            wanted |= own | {"teacher_tokenizer_name_or_path": str(models.saved(s.model))}
        given = {"teacher_model": models.model(taught(s.model)), "train_dataset": self.data()}
        student = models.model(s.model)
        if s.ends:
            models.two_ends(student)
        built = drive.build(upstream, student, wanted | self.config | more, self.device, **given)
        built._local_teacher_tokenizer_matches_student = True  # IW-OPD's, which reads it from files
        return built

    def data(self) -> Any:
        out = stored_window.dataset(self.window.rows, "messages" if self.s.alone else "turns")
        if self.trainer == GOLD:  # which reads no text that is split at spaces
            window = self.window.sequences
            out = out.add_column("input_ids", [ids for ids, _ in window])
            out = out.add_column("completion_mask", [[0] * n + [1] * (len(ids) - n) for ids, n in window])
        return out

    def sampled(self) -> mock.Mock:
        """Other completions than the dataset's, in place of what student or teacher generate; tells how it is asked for them."""
        lengths = [c - 1 + 2 * self.s.longer for _, c in SAMPLES[self.s.prompts]]
        lengths[0] *= not self.s.empty
        texts = [models.words(i, "sampled", n) for i, n in enumerate(lengths)]
        pairs = enumerate(zip(self.window.rows, texts, strict=True))
        ends = [models.EOS, models.END if self.s.ends else models.EOS]
        rows = [dataclasses.replace(r, completion=x, limit=None, end=ends[i % 2]) for i, (r, x) in pairs]
        sampler = self.built.model if self.s.sampler == "student" else self.built.teacher_model
        self.window = Window.of(self.trainer, rows)
        stored = {tuple(ids[:n]): [ids[n:]] for ids, n in self.window.sequences}
        twin_runs.generate_in_model(self.built, stored, model=sampler)
        sampler.generate = asked = mock.Mock(wraps=sampler.generate)
        return asked

    def definition(self, window: list[Sequences], local: bool) -> Oracle:
        """The step of these micro-batches; `local`: the mean of each."""
        terms = functools.partial(objective, self.trainer, self.s)
        return by_definition(terms, window, local, self.s.model)


def objective(trainer: str, s: SimpleNamespace, model: Any, batch: Sequences) -> list[Tensor]:
    """The trainer's divergence at each token of each completion, (T_i,)."""
    student = Scored(model, batch, taught(s.model), s.temperature if trainer != "gkd-trainer" else 1.0)
    if s.uld:
        warmer = Scored(student.base.model, batch, temperature=WARMER * s.temperature)
        return [_sorted(*pair, s.uld) for pair in zip(student.tables, warmer.tables, strict=True)]
    if s.top:
        pairs = zip(student.tables, student.base.tables, batch, strict=True)
        return [sparse(p, q, torch.tensor(ids[n:]), s.beta, s.top) for p, q, (ids, n) in pairs]
    return _weighted(student) if s.objective == IW else jsd(student, s.beta)


def _sorted(own: Tensor, teachers: Tensor, strategy: str) -> Tensor:
    """Of a completion with T tokens the mean over its tokens but <eos>, 0 of none, of Σ |p - q|, the vocabulary's
    probabilities sorted (ULD, arXiv 2402.12030), (1,): bayesian: where each token is predicted; observed: where it stands, and
    predicts the next."""
    kept = slice(0, -1) if strategy == "bayesian" else slice(1, None)
    p, q = (x[kept].exp().sort(-1).values for x in (own, teachers))
    return (p - q).abs().sum().unsqueeze(0) / max(len(p), 1)


def _weighted(student: Scored) -> list[Tensor]:
    """IW-OPD at each token t of each completion, (T_i,): -w·a·log π, a = log q - log π and w without a gradient,
    w_t = 1 + γ (1 - Σ_(u<t) |a_u| / Σ_u |a_u|), γ = `GAMMA` (trl/experimental/iw_opd)."""
    out = []
    for logps, teachers in zip(student.tokens, student.base.tokens, strict=True):
        a = (teachers - logps).detach()
        weights = 1 + GAMMA * (1 - (a.abs().cumsum(0) - a.abs()) / a.abs().sum())
        out.append(-weights * a * logps)
    return out
