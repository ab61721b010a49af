"""One look at a micro-batch of a run: its log-probs by each side, by the model's own forward, and what may lie between them."""

import contextlib
import dataclasses
import functools
import math
import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from parity.fixes.logits import head_in_float32
from parity.judge.recipe import NAMES
from parity.judge.shaken import unit
from parity.rollouts import scoring
from parity.rollouts.causes import Supports
from parity.rollouts.scoring import Difference, Rows, Scores, agrees, innermost, kept_mass, undisturbed
from parity.watching.step import checkpointing
from parity.watching.taps import Taken

NEUTRAL = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0}
"""How a sampler is asked -> what changes nothing."""
LIMITS = "max_prompt_length", "max_length", "vllm_max_model_length", "model_max_length", "max_position_embeddings"
"""Names of what may cut a prompt."""


@dataclasses.dataclass
class Look:
    """A micro-batch of a trainer."""

    trainer: Any
    model: Any
    inputs: Any  # what its loss is made of
    taken: Taken  # its scoring with gradients
    others: list[Taken]  # those without
    mask: Tensor  # (B, T), the tokens in the loss
    rows: Rows  # those looked at
    fresh: bool  # whether its completions are the present weights'
    stale: bool  # whether they are known to be earlier ones'
    first: bool  # whether no update has been
    later: bool  # whether the reference is to be held against its own weights, behind an update
    random: bool  # whether the log-probs of the model in training are
    generated: Any = None  # of completions that are used again: the batch as it was when they were generated
    # by `score`: log-probs (n,) of the trainer and whoever else has them, and the model's own
    sides: dict[str, Tensor] = dataclasses.field(default_factory=dict)
    mine: Scores | None = None
    measured: dict[str, float] = dataclasses.field(default_factory=dict)  # name -> number

    @property
    def temperature(self) -> float:
        """Of the trainer's log-probs."""
        return float(getattr(self.trainer, "temperature", None) or 1.0) if self.taken.mask is None else 1.0

    @property
    def single(self) -> bool:
        return bool(self.trainer.accelerator.num_processes == 1)

    def far(self, but: str = "") -> bool:
        """Whether noise does not explain a difference, on a side other than `but`."""
        sides = () if self.mine is None else self.sides.keys() - {but}
        return not all(agrees(self.difference(what).units()) for what in sides)

    def behind(self, what: str) -> bool:
        """Whether it is a side of other weights than the policy's: behind an update a reference, or old log-probs."""
        return (what == "reference" and not self.first) or (what == "old" and not self.fresh)

    def difference(self, what: str) -> Difference:
        """Of one of the `sides`, from the model's own log-probs; behind an update a reference's are by its own weights, and
        old ones are as they were."""
        assert self.mine is not None
        own = self.mine
        if self.behind(what):
            own = self._reference if what == "reference" else dataclasses.replace(own, logps=self._old(self.generated))
            own = dataclasses.replace(own, noise=self.mine.noise)
        narrow = self.taken.logps.dtype.itemsize < 4 and what != "sampler"
        return Difference(self.sides[what], own, unit(self.taken.logps.dtype) if narrow else 0.0)

    @functools.cached_property
    def _reference(self) -> Scores:
        """By the reference's own weights, or those below the only adapter."""
        return self._scores(self.rows, self._theirs, adapted=bool(self._theirs))

    @functools.cached_property
    def _theirs(self) -> dict[str, Tensor]:
        """Name of each weight of the policy -> the reference's: another model's, or of the adapter "ref", which TRL makes of one
        that it was given."""
        model = getattr(self.trainer, "ref_model", None)
        named = (self.model if model is None else model).named_parameters()
        return {n.replace(".ref.", ".default."): p for n, p in named if model is not None or ".ref." in n}

    def score(self, known: float, budget: int = 0) -> None:
        """All log-probs, with noise of the size that is `known`, or measured where that is NaN; then also with a float32 head.
        Logits of all rows at once, and a head's weights in float32, are made if they fit in the `budget`, in bytes."""
        self.mine, self.sides = None, {name: x for name, x in self._sides().items() if x is not None}
        head, unknown = innermost(self.model).get_output_embeddings(), math.isnan(known)
        plain = type(head) is torch.nn.Linear and "forward" not in vars(head)
        size = 4 * sum(p.numel() for p in head.parameters()) if head else 0
        logits = 4 * max(map(len, self.rows.ids)) * getattr(head, "out_features", 1 << 20)
        at_once = self.single and not unknown and logits * len(self.rows.ids) <= budget
        mine = self._own(self.rows, noisy=unknown, together=len(self.rows.ids) if at_once else 1)
        self.measured |= {"tokens": len(mine.logps), "watch/noise": mine.noise if unknown else known}
        if self.single and unknown and plain and mine.dtype is not torch.float32 and size + logits <= budget:
            with head_in_float32(innermost(self.model)):
                self.measured["watch/float32_head"] = scoring.rms(self._by(self.rows) - mine.logps)
        self.mine = dataclasses.replace(mine, noise=self.measured["watch/noise"])

    def _own(self, rows: Rows, dtype: Any = None, noisy: bool = True, together: int = 1) -> Scores:
        with undisturbed(self.model), self.trainer.accelerator.autocast():
            mine = scoring.score(self.model, rows, self.temperature, together)
            return scoring.noise(self.model, rows, self.temperature, mine, dtype) if noisy else mine

    def _by(self, rows: Rows, *args: Any, **options: Any) -> Tensor:
        """The log-probs alone of `_scores`."""
        return self._scores(rows, *args, **options).logps.detach()

    def _scores(
        self, rows: Rows, weights: Any = None, adapted: bool = True, training: bool = False, seed: int | None = None
    ) -> Scores:
        """By the model with these weights in place of its own, without its adapter, or in training mode."""
        model = self.model
        graded = training and self.single  # as in training; a shard's backward pass would be waited for
        with undisturbed(model, training), self.trainer.accelerator.autocast(), torch.set_grad_enabled(graded):
            if seed is not None:
                torch.manual_seed(seed)
            devices = {n: p.device for n, p in model.named_parameters()}
            moved = {n: w.to(devices[n]) for n, w in (weights or {}).items()}
            call = functools.partial(_by_weights, model, moved) if moved else None
            with contextlib.nullcontext() if adapted else model.disable_adapter():
                return scoring.score(model, rows, self.temperature, call=call)

    def drop_random(self) -> None:
        """Leaves the sampler's side alone if in training the model is random by more than the dropout that shows."""
        a, b = (self._by(self.rows, training=True, seed=seed) for seed in (0, 1))
        self.random = self.mine is not None and not agrees(Difference(a, self.mine).units(b))
        if self.random:
            self.sides = {name: x for name, x in self.sides.items() if name == "sampler"}

    def _sides(self) -> dict[str, Tensor | None]:
        """Log-probs of the tokens by the trainer and whoever else has them; if random the sampler's alone."""
        rows, taken, dropped = self.rows, self.taken, self.random

        def of(name: str) -> Tensor | None:
            value = self.inputs.get(name)
            return rows.of(value) if torch.is_tensor(value) and value.shape == rows.picked.shape else None

        out = {"trainer": None if dropped else rows.of(taken.logps)}
        if not self.stale:
            out["sampler"] = of("sampling_per_token_logps")
        if not dropped and (self.fresh or (self.stale and self._old(self.generated) is not None)):
            out["old"] = self._old(self.inputs)
        if not dropped and (self._is_reference if self.first else self.later and self._is_like()):
            out["reference"] = of("ref_per_token_logps") if taken.mask is None else self._referred()
            if taken.mask is None and out["reference"] is None:
                out["reference"] = self._of_batch(self.generated, "ref_per_token_logps")
        return out

    def _referred(self) -> Tensor | None:
        """The reference's log-probs (n,) of a trainer that does not hand them out as a part of its batch."""
        rows, taken = self.rows, self.taken
        if (whole := self._precomputed) is not None:
            base = taken.logps if self.first else rows.back(self._reference.logps).to(taken.logps)
            return rows.of(self._shared(whole, base))
        # KTO's estimate of the KL by the policy, maybe of the same ids, is before
        alike = [t for t in self.others if t.logps.shape == taken.logps.shape and torch.equal(t.ids, taken.ids)]
        whose = getattr(self.trainer, "ref_model", None) or self.trainer.model
        return rows.of(alike[-1].logps) if alike and (self.first or alike[-1].model is whose) else None

    def _old(self, given: Any) -> Tensor | None:
        """Old log-probs (n,) of these tokens by a batch, NaN where it has not this sequence; of a whole completion each token
        gets the same share."""
        return self._of_batch(given, "old_per_token_logps" if "old_per_token_logps" in self.inputs else "old_logps")

    def _of_batch(self, given: Any, name: str) -> Tensor | None:
        there, here = ({n: x for n, x in (of or {}).items() if torch.is_tensor(x)} for of in (given, self.inputs))
        names = "prompt_ids", "completion_ids"
        if not {*names} <= {*here} or not {*names, name} <= {*there}:
            return None
        if any(there[n].shape[1:] != here[n].shape[1:] for n in names):
            return None
        same = functools.reduce(operator.and_, ((here[n][:, None] == there[n]).all(-1) for n in names))
        found = there[name][same.int().argmax(1)]
        found = self._shared(found, self.taken.logps) if found.dim() == 1 else found
        return self.rows.of(found.masked_fill(~same.any(1)[:, None], math.nan))

    def _shared(self, whole: Tensor, logps: Tensor) -> Tensor:
        """(B, T), each token of a completion with the same share of how far `whole` (B,) is from the sum of its `logps`."""
        off = whole.to(logps) - logps.where(self.mask.bool(), 0.0).sum(1)
        return logps + (off / self.mask.sum(1).clamp(min=1))[:, None]

    @property
    def _precomputed(self) -> Tensor | None:
        """Log-probs of whole completions (B,) that the reference had before training; not those that `ld_alpha` weighs."""
        names = ("ref_logps",) if "ref_logps" in self.inputs else ("ref_chosen_logps", "ref_rejected_logps")
        weighed = getattr(self.trainer, "ld_alpha", None) is not None
        if weighed or not getattr(self.trainer.args, "precompute_ref_log_probs", False):
            return None
        return torch.cat([self.inputs[n] for n in names]) if all(n in self.inputs for n in names) else None

    def _padded(self, late: int = 0, positions: Tensor | None = None, labels: Tensor | None = None) -> Tensor:
        """Log-probs by the model with the trainer's own padding, by the logits of places that are `late` by 0 or 1."""
        rows, taken, width = self.rows, self.taken, self.mask.shape[1]
        told = taken.ids if labels is None else labels.clamp(min=0)
        out = torch.full(rows.picked.shape, math.nan, device=taken.ids.device)
        with undisturbed(self.model), self.trainer.accelerator.autocast():
            for i in rows.picked.any(1).nonzero()[:, :1]:
                more = {} if positions is None else {"position_ids": positions.expand_as(taken.ids)[i]}
                logits = self.model(input_ids=taken.ids[i], attention_mask=taken.attention[i], **more).logits[0]
                z = logits[: late - 1 or None][-width:].float()
                logps = (z / self.temperature).log_softmax(-1)
                out[i] = logps.gather(-1, told[i, -width:].T)[:, 0]
        return rows.of(out)

    def _leaked(self) -> Tensor:
        """By the model of the row that the sequences were packed into; where that separates them, by attention to all before."""
        assert self.mine is not None
        found = self._in_row()
        return self._in_row(whole=True) if agrees(Difference(found, self.mine).units()) else found

    def _in_row(self, whole: bool = False) -> Tensor:
        """The LM head is given the places of these tokens alone: a row has many more."""
        assert self.taken.row is not None
        ids, positions, columns = self.taken.row
        at = columns[:, 1:][self.rows.picked]
        head = innermost(self.model).get_output_embeddings()
        seen = torch.ones_like(ids) if whole else None
        with undisturbed(self.model), self.trainer.accelerator.autocast(), contextlib.ExitStack() as stack:
            if head is not None:
                hook = head.register_forward_pre_hook(lambda _, args: (args[0][..., at - 1, :], *args[1:]))
                stack.callback(hook.remove)
            out = self.model(input_ids=ids, position_ids=positions, attention_mask=seen, use_cache=False)
        z = out.logits[0] if out.logits.shape[1] == len(at) else out.logits[0, at - 1]
        pieces = zip(z.split(scoring.CHUNK), ids[0, at].split(scoring.CHUNK), strict=True)
        logps = [(x.float() / self.temperature).log_softmax(-1).gather(-1, told[:, None])[:, 0] for x, told in pieces]
        return torch.cat(logps).double().cpu()

    @property
    def other(self) -> bool:
        """Whether a reference has other weights than the policy from the beginning."""
        given = self.first and self.single and getattr(self.trainer, "ref_model", None) is not None
        return given and not self._is_reference and self._theirs.keys() == {n for n, _ in self.model.named_parameters()}

    @property
    def untied(self) -> bool:
        """Whether the LM head has weights of its own against the config; of plain modules."""
        inner = innermost(self.model)
        if not self.single or not getattr(inner, "_tied_weights_keys", None):
            return False
        if not all(getattr(c, "tie_word_embeddings", False) for c in (inner.config, inner.config.get_text_config())):
            return False
        head, table = inner.get_output_embeddings(), inner.get_input_embeddings()
        if type(head) is not torch.nn.Linear or not isinstance(table, torch.nn.Embedding):
            return False
        return head.weight.device == table.weight.device and head.weight.data_ptr() != table.weight.data_ptr()

    def missing(self) -> list[str]:
        """Whose log-probs of tokens in the loss are NaN, of those that the loss is made of."""
        inside, whose = self.mask.bool(), {"ref_": "reference", "old_": "old"}
        given = [("trainer", self.taken.logps)]
        given += [("reference", t.logps) for t in self.others if t.model is not self.trainer.model]
        given += [(whose[n[:4]], x) for n, x in self.inputs.items() if n[:4] in whose and torch.is_tensor(x)]
        nan = [(side, x.isnan() & inside if x.shape == inside.shape else x.isnan()) for side, x in given]
        return sorted({side for side, x in nan if bool(x.any())})

    @functools.cached_property
    def _is_reference(self) -> bool:
        """Whether policy and reference have the same weights before the first update."""
        mine, theirs = dict(self.model.named_parameters()), self._theirs
        if theirs:
            alike = mine.keys() == theirs.keys() or getattr(self.trainer, "ref_model", None) is None
            return alike and all(torch.equal(mine[n].to(p), p) for n, p in theirs.items())
        if not hasattr(self.model, "peft_config"):
            return self._precomputed is not None
        adapted = [p for n, p in mine.items() if ".lora_B." in n]
        return bool(adapted) and not any(bool(p.any()) for p in adapted)

    def _is_like(self) -> bool:
        """Whether the policy can compute with the weights of a reference that stays as it is; of adapters TRL's two alone."""
        reference, args = getattr(self.trainer, "ref_model", None), self.trainer.args
        if not self.single or getattr(args, "sync_ref_model", False):
            return False
        if reference is None:
            return {*getattr(self.model, "peft_config", ())} in ({"default"}, {"default", "ref"})
        both = self.model, reference
        shapes, others = ({n: (p.shape, p.dtype, p.device) for n, p in m.named_parameters()} for m in both)
        mine, theirs = (_numbers(innermost(m).config) for m in both)
        return shapes == others and mine == theirs

    def asked(self) -> list[str]:
        """What the model is asked to sample by, where it generates itself, other than by the trainer's config."""
        config, args = getattr(self.trainer, "generation_config", None), self.trainer.args
        other = getattr(self.trainer, "use_vllm", True) or getattr(self.trainer, "rollout_func", None) is not None
        if other or not getattr(config, "do_sample", False):
            return []
        meant = vars(args) | (getattr(args, "generation_kwargs", None) or {})
        meant["temperature"] = getattr(self.trainer, "temperature", None) or getattr(args, "temperature", None)
        both = [(n, getattr(config, n, None) or by, meant[n] or by) for n, by in NEUTRAL.items() if n in meant]
        return [
            f"completions are sampled by {n} {x:g} where the trainer's is {y:g}"
            for n, x, y in both
            if not math.isclose(x, y, rel_tol=1e-5)
        ]

    @property
    def sampling(self) -> Supports:
        """Top-p, top-k and min-p of the run's config and of the model's generation config."""
        sources = (self.trainer.args, getattr(self.trainer.model, "generation_config", None))
        found = [[getattr(s, name, None) for name in ("top_p", "top_k", "min_p")] for s in sources]
        return [(float(p or 1.0), max(int(k or 0), 0), float(m or 0.0)) for p, k, m in found]

    def kept_mass(self) -> dict[str, float]:
        """Of the run's own top-p, top-k and min-p, if it has any."""
        if self.mine is None or self.sampling[0] == (1.0, 0, 0.0):
            return {}
        logps = (self.mine.logits.double() / self.temperature).log_softmax(-1)
        return {"kept_mass": float(kept_mass(logps, self.rows.token_ids[self.mine.sample], *self.sampling[0]).mean())}

    def facts(self, what: str, mine: Scores, old: list[Any]) -> tuple[Any, ...]:
        """What may explain a difference of this run, as `causes.explanations` wants it; `old`: weights, the last first."""
        others: dict[str, Callable[[], Tensor]] = {}
        policy = mine.logps if self.mine is None else self.mine.logps
        coarser: dict[str, Callable[[], Scores]] = {}
        if self.single:
            by = functools.partial(self._by, self.rows)
            for back, weights in enumerate(old, 1):
                others[f"weights {back} update{'s' * (back > 1)} old"] = functools.partial(by, weights)
            if hasattr(self.model, "disable_adapter") and what != "reference":
                others["the adapter is left out"] = functools.partial(by, adapted=False)
            sources = (self.trainer.args, self.trainer.processing_class, innermost(self.model).config)
            for n in {n for s in sources for name in LIMITS if isinstance(n := getattr(s, name, None), int)}:
                if 0 < n < self.rows.prompt:
                    others[f"prompts are cut to their last {n} tokens"] = functools.partial(self._by, self.rows.cut(n))
            if self.behind(what):
                text = "they are scored again" if what == "old" else "it computes with the policy's weights"
                others[text] = lambda: policy
            if what in ("trainer", "sampler"):
                text = "each log-prob is by the logits of the token itself, not of the one before it"
                others[text] = functools.partial(self._padded, 1)
            if what == "trainer":
                how = f" (activations checkpointed by {name})" if (name := checkpointing(self.model)) else ""
                others[f"in training the model computes something else{how}"] = functools.partial(by, training=True)
                if (labels := self.taken.labels) is not None:
                    text = "labels are not the input_ids at their places, where they belong unshifted"
                    others[text] = functools.partial(self._padded, labels=labels)
                if (given := self.taken.positions) is not None:
                    text = "position_ids are not the places in the sequence"
                    others[text] = functools.partial(self._padded, positions=given)
                if self.taken.row is not None:
                    others["sequences change each other in their row"] = self._leaked
                if bool((self.taken.attention[:, 0] == 0).any()):
                    others["padding at the left changes what the model computes"] = self._padded
            for text, rows in scoring.begun(self.model, self.rows).items() if what == "sampler" else ():
                others[text] = functools.partial(self._by, rows)
            for dtype in (torch.float16, torch.bfloat16) if what != "old" and not self.behind(what) else ():
                coarser[NAMES[dtype]] = functools.partial(self._own, self.rows, dtype)
        if what != "old" and not self.behind(what):
            others |= scoring.bare_head(self.model, mine, self.rows.token_ids, self.temperature)
        return self.temperature, self.sampling if what == "sampler" else None, others, coarser.items()


def _by_weights(model: Any, weights: dict[str, Tensor], **kwargs: Any) -> Any:
    return torch.func.functional_call(model, weights, kwargs=kwargs)


def _numbers(config: Any) -> dict[str, Any]:
    """What a model computes with besides its weights; token ids are of no forward pass."""
    found = {n: v for n, v in config.to_dict().items() if isinstance(v, int | float | dict) and not isinstance(v, bool)}
    return {n: v for n, v in found.items() if not n.endswith("_token_id")}
