"""One batch of a twin with one thing more: a LoRA, a limit on the length, stored reference log-probs, experts in balance."""

import dataclasses
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from parity.case.inputs import Setting
from parity.errors import Unsupported
from parity.fixes.override import source_of
from parity.trainers.check import EVERY_PATH, CheckCall, CheckCase, Quantity, always, check, entry, holds
from parity.trainers.checks.twin_windows import EPOCH, EVALUATED
from parity.trainers.checks.twins import RATE, SETTINGS, judged, moved, step_of, twin
from parity.trainers.definitions.formulas import Loss
from parity.trainers.definitions.scored import logits, rows
from parity.trainers.definitions.training_step import gradients, measured, window_loss
from parity.trainers.rig import drive, models, recorder, stored_window
from parity.trainers.rig.recorder import Sequences
from parity.trainers.rig.stored_window import Window
from parity.trainers.rig.twin_runs import Run
from parity.trainers.specs import SPECS, TWINS, having
from parity.upstream import trl

SPLIT = Setting("8x1", "batch x accumulation", ("8x1", "1x8", "2x4", "4x2"))

ADAPTERS = {
    "new": "peft_config: the reference is the base model",
    "existing": "a PeftModel with an adapter that is trained on: the reference is that adapter before the first step",
    "saved-head": "peft_config with the LM head in modules_to_save: the reference has the base model's head",
    "saved-embeddings": "peft_config with the embeddings in modules_to_save: the reference has the base model's",
    "rslora": "peft_config with use_rslora: scaled by α/√r",
    "dora": "peft_config with use_dora: rows of the weight that have a trained norm",
    "pissa": "peft_config with init_lora_weights pissa, which moves a part of the weights into the adapter: as new",
    "biases": "peft_config with bias all, on Qwen2: the reference keeps the base model's biases",
    "lora-bias": "peft_config with lora_bias, on Qwen2: B has one, which is merged into the base's",
    "existing-embeddings": "as existing, on embed_tokens too",
    "existing-pissa": "as existing, made by pissa",
}
OPTIONS: dict[str, dict[str, Any]] = {
    "saved-head": {"modules_to_save": ["lm_head"]},
    "saved-embeddings": {"modules_to_save": ["embed_tokens"]},
    "rslora": {"use_rslora": True},
    "dora": {"use_dora": True},
    "pissa": {"init_lora_weights": "pissa"},
    "biases": {"bias": "all"},
    "lora-bias": {"lora_bias": True},
    "existing-embeddings": {"targets": (*models.PROJECTIONS, "embed_tokens")},
    "existing-pissa": {"init_lora_weights": "pissa"},
}
"""Of the LoRA, away from `trl.lora`."""
REFERRED = tuple(t for t in TWINS if SPECS[t].rewarded or SPECS[t].given == "ref_model")
"""Trainers that have a reference."""
MAX_LENGTH = 10
"""At it four of the window's eight sequences are too long, every prompt keeps a token of its completion at either end."""
MODES_OF_TRUNCATION = ("keep_start", "keep_end")
PACKINGS = ("bfd", "bfd_split", "wrapped")
MODE = Setting(
    "keep_start",
    "truncation_mode; KTO and later releases keep the start; or SFT's packing_strategy",
    (*MODES_OF_TRUNCATION, *PACKINGS),
)
KL = Setting(False, "KTO with its own loss, which estimates a KL to the reference", (False, True))
ONLINE = "online-dpo-trainer"
LEVEL = Setting(False, "online DPO: every completion has eight tokens", (False, True))
FULL = Setting(False, "two prompts more fill max_length, and are left out, or kept without a completion", (False, True))
AVERAGED = Setting(False, "CPO: simpo, of mean log-probs", (False, True))
CUT = {"mode": MODE, "split": SPLIT, "kl": KL, "level": LEVEL, "full": FULL, "averaged": AVERAGED}
CUT_IN_PR: list[CheckCase] = [("dpo-trainer", {})]
CUTTING = (*having("max_length"), ONLINE)
PRECOMPUTED = "precompute_ref_log_probs"
EXPERTS, BALANCED = "qwen3_moe", "router_aux_loss_coef"
SMOOTHED: CheckCase = ("sft-trainer", {"smoothing": 0.1})


def adapter_cases(seed: int) -> Iterator[CheckCase]:
    for trainer in TWINS:
        for kind in [kind for kind in ADAPTERS if trainer in REFERRED or not kind.startswith("existing")]:
            yield trainer, {"adapter": kind}
            if trainer in having(PRECOMPUTED):
                yield trainer, {"adapter": kind, "precomputed": True}
            if SPECS[trainer].data == "labels":
                yield trainer, {"adapter": kind, "kl": True}
        yield from ((trainer, {"checkpointing": kind}) for kind in (drive.REENTRANT, drive.NON_REENTRANT))


@check(
    "adapters",
    TWINS,
    {
        "adapter": Setting("new", "; ".join(f"{k}: {v}" for k, v in ADAPTERS.items()), tuple(ADAPTERS)),
        "precomputed": Setting(False, "precompute_ref_log_probs, DPO and KTO", (False, True)),
        "kl": KL,
        "checkpointing": SETTINGS["checkpointing"],
    },
    adapter_cases,
    pr=[
        *((t, {}) for t in REFERRED),
        *((t, {"adapter": "existing"}) for t in REFERRED),
        *((t, {"adapter": "existing", "precomputed": True}) for t in ("dpo-trainer", "kto-trainer")),
        *((t, {"adapter": "saved-head"}) for t in ("grpo-trainer", "dpo-trainer", "kto-trainer")),  # Liger takes heads
        ("kto-trainer", {"kl": True}),
        *(("dpo-trainer", {"adapter": kind}) for kind in ("rslora", "dora", "lora-bias", "saved-embeddings")),
        *((t, {"checkpointing": drive.REENTRANT}) for t in ("grpo-trainer", "online-dpo-trainer")),
    ],
    paths=EVERY_PATH,
)
def adapters(call: CheckCall) -> Iterator[Quantity]:
    """One batch with a LoRA: loss and every gradient of the adapter, by the reference that its kind implies."""
    trainer, s = call.case.family, call.settings
    existing, options = s.adapter.startswith("existing"), OPTIONS.get(s.adapter, {})
    if existing and trainer not in REFERRED:
        raise Unsupported(f"{trainer} has no reference: an existing adapter is a new one to it")
    _estimates(call)
    more: dict[str, Any] = {PRECOMPUTED: True} if s.precomputed else {}
    drive.needs(call.trainer, *more)
    settings = twin(trainer, beta=0.04, kl=s.kl, checkpointing=s.checkpointing)
    settings.model = "qwen2" if s.adapter in ("biases", "lora-bias") else settings.model  # which has some
    more |= {} if s.checkpointing == drive.OFF else {"learning_rate": RATE}
    more |= EVALUATED if s.precomputed else {}

    def with_lora(seed: int) -> Any:
        return stored_window.adapted(models.model(settings.model), seed, **options)

    def handed() -> tuple[Any, Any]:
        if existing:
            return with_lora(stored_window.HANDED_OVER), None
        return models.model(settings.model), trl.lora(**options)

    run = Run(trainer, settings, call.path, adapter=handed, **more)
    before = stored_window.written_out(with_lora(stored_window.HANDED_OVER).double()).eval().requires_grad_(False)
    loss = Loss(run.window, settings, before if existing else "")
    # in float32, as the trainer: pissa leaves of the base model what rounding there makes it
    adapted = stored_window.written_out(with_lora(stored_window.TRAINED).double())
    yield _trained(run.built.model, options)
    yield from judged(call, run, loss, adapted.train())
    if s.precomputed:  # another dataset, in another order, which comes when policy and reference have parted
        later = dataclasses.replace(run.window, rows=run.window.rows[::-1]).dataset()
        with trl.quiet(), drive.fixed(call.path, run.built):
            found = run.built.evaluate(later)["eval_loss"]
        yield window_loss(step_of(call, run, loss, adapted), float(found), "evaluation loss")
    if s.checkpointing != drive.OFF:
        yield moved(run)
    elif trainer == "dpo-trainer" and call.path == "released":  # what the others do alike
        yield from _kept(settings.model, run.built.model, adapted, run.window)


def _kept(name: str, model: Any, adapted: Any, window: Window) -> Iterator[Quantity]:
    """Merged into the base, as for an inference engine, taken out again, and read from its files the adapter is the same."""
    import peft

    sequences = [tokens for tokens, _ in window.sequences]

    def found(model: Any) -> dict[str, Tensor]:
        return {"logits": torch.cat(logits(model, sequences))}

    oracle = measured(adapted, found)

    def quantity(model: Any, told: str) -> Quantity:
        with torch.no_grad():
            value = found(model.eval())["logits"]
        return entry(f"logits, {told}", value, oracle, of="logits")

    with trl.quiet(), tempfile.TemporaryDirectory(prefix="parity-adapter-") as folder:
        model.save_pretrained(folder)
        yield quantity(peft.PeftModel.from_pretrained(models.model(name), folder), "saved and loaded")
    model.merge_adapter()
    yield quantity(model, "merged")
    model.unmerge_adapter()
    yield quantity(model, "unmerged")


def _trained(model: Any, options: Mapping[str, Any]) -> Quantity:
    """The parameters that are trained are A and B of each target, DoRA's norms, and the copies of what is saved with them."""
    name, parts = model.active_adapter, ("A", "B", "magnitude_vector")[: 3 if "use_dora" in options else 2]
    modules = [n for n, _ in model.named_modules()]
    wanted = {
        f"{n}.lora_{part}.{name}.weight"
        for n in modules
        if n.rpartition(".")[2] in models.PROJECTIONS
        for part in parts
    }
    if "targets" in options:
        wanted |= {f"{n}.lora_embedding_{part}.{name}" for n in modules if n.endswith("embed_tokens") for part in "AB"}
    biases = ".bias" if "bias" in options else f".lora_B.{name}.bias"
    wanted |= {n for n, _ in model.named_parameters() if n.endswith(biases)}
    wanted |= {
        f"{n}.modules_to_save.{name}.weight"
        for n in modules
        if n.rpartition(".")[2] in options.get("modules_to_save", ())
    }
    found = {n for n, p in model.named_parameters() if p.requires_grad}
    message = f"missing {sorted(wanted - found)[:2]}, besides {sorted(found - wanted)[:2]}"
    return holds("trained parameters", found == wanted, message, float(len(found)), float(len(wanted)))


def _estimates(call: CheckCall) -> None:
    """Raises Unsupported where a KL is asked for that the trainer does not estimate."""
    if call.settings.kl and call.spec.data != "labels":
        raise Unsupported(f"{call.case.family} estimates no KL")


def truncation_cases(seed: int) -> Iterator[CheckCase]:
    for trainer in having("max_length"):
        for mode in MODES_OF_TRUNCATION if trainer in having("truncation_mode") else ("keep_start",):
            own = {"kl": True} if SPECS[trainer].data == "labels" else {"split": "8x1"}
            cuts = (own, {"split": "1x8"}) if trainer in TWINS else (own,)  # the others average each micro-batch alone
            yield from ((trainer, {"mode": mode, **cut}) for cut in cuts)
        yield trainer, {"full": True}
    yield "cpo-trainer", {"full": True, "averaged": True}
    yield from (("sft-trainer", {"mode": strategy}) for strategy in PACKINGS)
    yield from ((ONLINE, {"mode": "keep_end", "level": level}) for level in (False, True))


@check("truncation", CUTTING, CUT, truncation_cases, pr=CUT_IN_PR, covered=always, paths=EVERY_PATH)
def truncation(call: CheckCall) -> Iterator[Quantity]:
    """The sequences that reach the loss are cut where the config says, and loss and gradients are theirs."""
    _estimates(call)
    s, known = call.settings, trl.fields(drive.config(call.trainer))
    limits: dict[str, Any] = {"max_length": MAX_LENGTH}
    packed, kind = s.mode in PACKINGS, trl.class_named(call.trainer)
    if packed:
        drive.needs(call.trainer, "packing_strategy")
        if s.mode != "wrapped" and "self.padding_free = args.padding_free or" not in source_of(vars(kind)["__init__"]):
            raise Unsupported(
                "sequences of a packed row see each other without flash attention in the installed version"
            )
        limits |= {"packing": True, "packing_strategy": s.mode}
    elif call.case.family == ONLINE:
        drive.needs(call.trainer, "max_length")
    elif "truncation_mode" in known or s.mode != "keep_start":
        drive.needs(call.trainer, "truncation_mode")
        limits["truncation_mode"] = s.mode
    settings = twin(call.case.family, split=s.split, kl=s.kl, whole=packed)
    if s.averaged:
        if call.case.family != "cpo-trainer":
            raise Unsupported(f"{call.case.family} has no loss type simpo")
        settings.loss = limits["loss_type"] = "simpo"
    kept = Window.of(call.case.family).rows
    if s.level:  # completions that only a limit ends
        texts = [(f"{r.completion} " * 8, f"{r.other} " * 8) for r in kept]
        kept = [dataclasses.replace(r, limit=8, completion=a, other=b) for r, (a, b) in zip(kept, texts, strict=True)]
    if call.spec.begun and not trl.since("1.15.0"):
        raise Unsupported("the installed version cuts a completion by the longer one's length")
    # without room for a completion
    prompts = [models.words(n, "prompt", n) + " " for n in (MAX_LENGTH, MAX_LENGTH + 2)]
    full = [dataclasses.replace(kept[0], prompt=text) for text in prompts] if s.full else []
    run = Run(call.case.family, settings, call.path, [*full, *kept], plain=True, **limits)
    if s.full and ".filter(" not in source_of(vars(kind).get("_prepare_dataset")):
        broken = [name for name, g in run.steps.gradients[0].items() if g is not None and not bool(g.isfinite().all())]
        message = f"an empty completion, NaN in the gradients of {len(broken)} parameters, first {broken[:1]}"
        yield holds("gradient", not broken, message)
        return
    whole = sorted(run.window.expected)
    _ = run.steps  # on all rows
    run.window = Cut(run.trainer, kept, packed, mode=s.mode)
    late = sorted(recorder.sequences_of(run.steps.batches)) == whole  # DPO up to 1.3 cuts behind where a batch is seen
    yield from judged(call, run, Loss(run.window, settings), there=not late)


@dataclasses.dataclass(frozen=True)
class Cut(Window):
    mode: str = "keep_start"

    def _of(self, name: str) -> Sequences:
        return cut(super()._of(name), self.mode)

    def mismatched(self, batch: int) -> Sequences:
        return cut(stored_window.mismatched(super()._of("completion"), batch), self.mode)


def cut(window: Sequences, mode: str) -> Sequences:
    """At most `MAX_LENGTH` tokens of each sequence, the first or the last; prompts give way at the end that is cut. Or all tokens
    in parts of at most as many, of a sequence ("bfd_split") or of all in turn ("wrapped")."""
    if mode == "wrapped":
        window = [([token for tokens, _ in window for token in tokens], 1)]
    if mode in ("bfd_split", "wrapped"):
        return [
            (tokens[i : i + MAX_LENGTH], start) for tokens, start in window for i in range(0, len(tokens), MAX_LENGTH)
        ]
    out = []
    for tokens, start in window:
        gone = max(0, len(tokens) - MAX_LENGTH) if mode == "keep_end" else 0
        out.append((tokens[gone : gone + MAX_LENGTH], max(0, start - gone)))
    return out


STORED: dict[str, dict[str, Any]] = {
    "reference": {"model": "qwen2"},
    "ld_alpha": {"ld_alpha": 0.4},
    "max_length": {"max_length": MAX_LENGTH, "truncation_mode": "keep_end"},
}
"""What another run on the same dataset had otherwise -> how: the model of a twin, or fields of the config."""
STORED_CASES: list[CheckCase] = [("kto-trainer", {}), *(("dpo-trainer", {"other": other}) for other in STORED)]


class _OnDisk(Run):
    """A run over the window as a dataset in a folder, beside which `datasets` stores what is made of it."""

    folder = ""

    def data(self) -> Any:
        import datasets

        return datasets.load_from_disk(self.folder)


@check(
    "stored-reference",
    having(PRECOMPUTED),
    {"other": Setting("reference", "what a run before it had otherwise", tuple(STORED))},
    lambda seed: STORED_CASES,
    pr=STORED_CASES,
    paths=("released",),
)
def stored_reference(call: CheckCall) -> Iterator[Quantity]:
    """Reference log-probs that another run has stored with the dataset are not this run's: one batch by its own."""
    other: dict[str, Any] = STORED[call.settings.other]
    stored: dict[str, Any] = {"max_length": None, PRECOMPUTED: True}
    drive.needs(call.trainer, PRECOMPUTED, *(name for name in other if name != "model"))
    with tempfile.TemporaryDirectory(prefix="parity-dataset-") as folder:
        with trl.quiet():
            Window.of(call.case.family).dataset().save_to_disk(folder)

        def over(model: str = "llama", **config: Any) -> Run:
            settings = twin(call.case.family, model=model)
            run = _OnDisk(call.case.family, settings, call.path, plain=True, **config)
            run.folder = folder
            return run

        over(**stored | other).build()
        run = over(**stored)
        yield from judged(call, run, Loss(run.window, run.s))


def _balanced(*cases: dict[str, Any]) -> list[CheckCase]:
    """These, and where groups of completions do not forbid it, a last window that is not full."""
    left = {"left": True}
    return [(t, s) for t in having(BALANCED) for s in (*cases, *[left] * (not SPECS[t].generates))]


@check(
    "experts",
    having(BALANCED),
    {
        "coefficient": Setting(0.5, f"{BALANCED}; older releases: the model's", (0.5, 0.0)),
        "split": SPLIT,
        "left": Setting(False, "one sequence of five, in a last window of four micro-batches", (False, True)),
        "smoothing": Setting(0.0, "SFT: label_smoothing_factor", (0.0, 0.1)),
    },
    lambda seed: [*_balanced({}, {"split": "4x2"}, {"coefficient": 0.0}), SMOOTHED],
    pr=[*_balanced({"split": "4x2"}), SMOOTHED],
)
def experts(call: CheckCall) -> Iterator[Quantity]:
    """Loss and gradients are those of the trainer's loss plus coefficient times the mean over micro-batches of the balance."""
    s, trainer = call.settings, call.case.family
    of_model = BALANCED not in trl.fields(drive.config(call.trainer))  # in older releases
    if not trl.mentions("aux_loss_enabled", trl.class_named(call.trainer)):
        drive.needs(call.trainer, BALANCED)
    if s.left and call.spec.generates:
        raise Unsupported("groups of completions leave no single sequence")
    settings, given = twin(trainer, model=EXPERTS, split="1x4" if s.left else s.split), {BALANCED: s.coefficient}
    if s.smoothing:
        if call.spec.data != "completions":
            raise Unsupported("SFT alone smooths labels with label_smoothing_factor")
        settings.smoothing = s.smoothing

    def switched_on(policy: Any) -> None:
        policy.config.update(given | {"output_router_logits": True})

    more: dict[str, Any] = {"changed": switched_on} if of_model else given
    more |= EPOCH | {"rows": Window.of(trainer).rows[:5]} if s.left else {}
    more |= {"label_smoothing_factor": s.smoothing} if s.smoothing else {}
    run = Run(trainer, settings, call.path, plain=True, **more)
    batches = run.steps.window(len(run.steps.gradients) - 1)
    loss = Loss(run.window.found_in(batches), settings)

    def define(model: Any) -> Tensor:
        parts = [[tokens for tokens, _ in recorder.sequences_of([batch])] for batch in batches]
        return loss(model) + s.coefficient * torch.stack([balance(model, part) for part in parts]).mean()

    if not s.left:
        yield from judged(call, run, define)
        return
    yield holds("sequences", len(loss.window.rows) == 1, f"the last window holds {len(loss.window.rows)}")
    yield gradients(step_of(call, run, define), run.steps.gradients[-1], "gradient of the last window")


def balance(model: Any, sequences: Sequence[Sequence[int]]) -> Tensor:
    """E·Σ_i f_i·P_i over all tokens of the sequences in all layers, 0-dim (Switch Transformer, arXiv 2101.03961, 4 to 6).
    E: experts; f_i: how often expert i is among the k chosen, per token (Σ f = k; no gradient); P_i: the mean of its
    probability. 1 for k = 1 where every expert gets the same. The paper's is of each layer; transformers pools all, and so does
    this (docs/measured/trainers-unchecked.md, experts-pooled-layers)."""
    batch = rows(sequences)
    counted = batch["attention_mask"].flatten().bool()
    found = model.base_model(**batch, use_cache=False, output_router_logits=True).router_logits
    p = torch.cat([torch.softmax(z[counted], -1) for z in found])
    chosen = p.topk(model.config.get_text_config().num_experts_per_tok, -1).indices
    f = torch.nn.functional.one_hot(chosen, p.shape[-1]).sum((0, 1)) / len(p)
    return p.shape[-1] * (f * p.mean(0)).sum()
