"""One optimizer window of stored data, and the models that go with it, for every trainer whose twins are compared.

Eight sequences of unequal lengths (of pairs: chosen and rejected of each). The policy is the tiny model moved a little, so
that a reference model, read from disk, is not equal to it and log-ratios are not zero.
"""

import contextlib
import dataclasses
import functools
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from parity.trainers.rig import drawn, models, recorder
from parity.trainers.rig.drawn import normal
from parity.trainers.rig.recorder import Sequences
from parity.trainers.specs import SPECS, TrainerSpec
from parity.upstream import trl

PROMPT_LENGTHS = (2, 6, 3, 5, 2, 4, 7, 3)
LENGTHS = (7, 1, 4, 8, 2, 6, 3, 5)
"""Tokens of each completion: no two alike, so that a mean of means is not the mean."""
OTHER_LENGTHS = (3, 6, 2, 2, 8, 1, 5, 4)
NUDGE, MOVED, OLDER = 0.05, 5, 6
"""By how much the policy's parameters are moved, its seed, and that of one that takes the place of an older policy."""
HANDED_OVER, ADAPTER_SIZE = 3, 0.1
"""Seed of the adapter that a trainer is handed, size of its weights."""
WITHOUT = "parity_base_alone"
TRAINED = 2
"""Seed of the adapter at the step that is judged; `HANDED_OVER` of one at construction."""
GENERATIONS = 2
EVEN = 4


@dataclasses.dataclass(frozen=True)
class Sample:
    """A sample as words: a prompt, a completion, and another completion of the same prompt. `counted`: in the loss;
    `ended`: with `end`, where a model generates the completion (a dataset's always end so); `limit`: tokens after which
    generation is cut off."""

    prompt: str
    completion: str
    other: str
    label: bool
    counted: bool = True
    ended: bool = True
    end: int = models.EOS
    limit: int | None = None


def rows(prompts: int = 8) -> list[Sample]:
    """The samples of the window; with fewer prompts than samples they follow each other in groups of one prompt."""
    out = []
    order = drawn.order(len(LENGTHS))
    for i, n in enumerate(order):
        length, other, group = LENGTHS[n], OTHER_LENGTHS[n], i * prompts // len(LENGTHS)
        prompt = models.words(11, f"prompt {group}", PROMPT_LENGTHS[order[group]]) + " "
        completion, alternative = models.words(11, f"completion {i}", length), models.words(11, f"other {i}", other)
        out.append(Sample(prompt, completion, alternative, label=i % 3 != 0, ended=i % 2 == 0))
    return out


def even(rows: Iterable[Sample]) -> list[Sample]:
    """The rows, every prompt and completion cut or repeated to `EVEN` words, ended, every second one desirable: the mean of what
    a metric is in each micro-batch is what it is in all."""
    out = []
    for i, row in enumerate(rows):
        texts = (itertools.islice(itertools.cycle(t.split()), EVEN) for t in (row.prompt, row.completion, row.other))
        prompt, completion, other = map(" ".join, texts)
        out.append(Sample(f"{prompt} ", completion, other, label=i % 2 == 0))
    return out


def brief() -> list[Sample]:
    """Eight prompts, each of another length, with two completions each: what a trainer gets that brings no window of its own."""
    out = []
    for i in range(8):
        lengths = {"prompt": 2 + i, "chosen": 3 + i % 4, "rejected": 5 - i % 3}
        prompt, chosen, rejected = (models.words(7, f"{name} {i}", n) for name, n in lengths.items())
        out.append(Sample(f"{prompt} ", chosen, rejected, label=True))
    return out


def dataset(chosen: Sequence[Sample], columns: str) -> Any:
    """The samples as a dataset of "prompts", or with "completions", with "labels" besides, with "pairs", or with "triples" (as
    `Window.gold`). "messages" are conversations of a prompt alone, "turns" such that end with the completion."""
    from datasets import Dataset

    prompts, completions = [r.prompt for r in chosen], [r.completion for r in chosen]
    others = [r.other for r in chosen]
    asked = [{"role": "user", "content": p} for p in prompts]
    answers = [{"role": "assistant", "content": c} for c in completions]
    table: dict[str, dict[str, list[Any]]] = {
        "prompts": {"prompt": prompts, "told": prompts},
        "completions": {"prompt": prompts, "completion": completions},
        "labels": {"prompt": prompts, "completion": completions, "label": [r.label for r in chosen]},
        "pairs": {"prompt": prompts, "chosen": completions, "rejected": others},
        "triples": {
            "prompt": prompts,
            "chosen": completions,
            "rejected": others,
            "reference": others[-1:] + others[:-1],
        },
        "messages": {"messages": [[a] for a in asked]},
        "turns": {"messages": [[a, b] for a, b in zip(asked, answers, strict=True)]},
    }
    return Dataset.from_dict(table[columns])


def reward(completions: Any, prompts: Any = None, told: Any = None, **kwargs: Any) -> list[float]:
    """A reward that differs within a group: a hash of the completion, in [0, 1), or 9 where what the dataset's column `told`
    says of a prompt is handed over beside another."""
    pairs = zip(prompts, told, strict=True) if told else [("", "")] * len(completions)
    return [
        drawn.share(3, str(c)) if t.strip() in str(p) else 9.0 for c, (p, t) in zip(completions, pairs, strict=True)
    ]


def external(tokens: Tensor) -> Tensor:
    """1 where a token counts as the model's own, 0 where it is part of a tool's answer: every third word."""
    return (tokens % 3 != 0).long()


def ids(text: str) -> list[int]:
    found: list[int] = models.tokenizer()(text, add_special_tokens=False)["input_ids"]
    return found


def mismatched(window: Sequences, batch: int) -> Sequences:
    """Each prompt with the completion of the sequence before it, the first of each `batch` with that of its last."""
    completions = [tokens[start:] for tokens, start in window]
    parts = [completions[i : i + batch] for i in range(0, len(window), batch)]
    shifted = [completion for part in parts for completion in (*part[-1:], *part[:-1])]
    return [(tokens[:start] + c, start) for (tokens, start), c in zip(window, shifted, strict=True)]


@dataclasses.dataclass(frozen=True)
class Window:
    """The rows of a trainer's window as it gets them."""

    trainer: str
    rows: Sequence[Sample]
    whole: bool = False  # every token but the first is in the loss

    @classmethod
    def of(cls, trainer: str, given: Sequence[Sample] | None = None, whole: bool = False) -> "Window":
        """Some rows, or all: in groups of one prompt where advantages are relative to a group."""
        return cls(trainer, rows(4 if SPECS[trainer].grouped else 8) if given is None else given, whole)

    @property
    def spec(self) -> TrainerSpec:
        return SPECS[self.trainer]

    @property
    def labels(self) -> list[bool]:
        return [row.label for row in self.rows]

    @functools.cached_property
    def sequences(self) -> Sequences:
        """Prompt and completion of each row."""
        return self._of("completion")

    @property
    def gold(self) -> Sequences:
        """Each prompt with the other completion of the row before it."""
        return mismatched(self._of("other"), len(self.rows))

    def mismatched(self, batch: int) -> Sequences:
        return mismatched(self.sequences, batch)

    @property
    def expected(self) -> Sequences:
        """What must reach the loss, each sequence once."""
        gold = self.gold if self.spec.data == "triples" else []
        return self.sequences + (self._of("other") if self.spec.paired else []) + gold

    def pair(self, penalty: float = 0.0, weight: float = 1.0) -> tuple[Sequences, Sequences]:
        """The chosen and the rejected sequences: the dataset's, or those of the higher and the lower reward, which is
        multiplied by `weight`. `penalty`: what a generated completion without an end loses."""
        sides = self.sequences, self._of("other")
        if not self.spec.generates:
            return sides
        earned = [
            [
                weight * x - penalty * (ids[-1] not in (models.EOS, models.END))
                for x, (ids, _) in zip(reward(_texts(side)), side, strict=True)
            ]
            for side in sides
        ]
        keep = [a >= b for a, b in zip(*earned, strict=True)]
        turned = [(a, b) if k else (b, a) for a, b, k in zip(*sides, keep, strict=True)]
        return [better for better, _ in turned], [worse for _, worse in turned]

    def _of(self, name: str) -> Sequences:
        """A model that generates ends some; of a row that is not counted every token stands before the completion."""
        out = []
        for row in self.rows:
            end = [row.end] if row.ended or self.spec.generates != "method" else []
            prompt, completion = ids(row.prompt), (ids(getattr(row, name)) + end)[: row.limit]
            start = 1 if self.whole else len(prompt) + (0 if row.counted else len(completion))
            first = [models.BOS] if self.spec.begun else []
            out.append((first + prompt + completion, len(first) + start))
        return out

    def found_in(self, micro_batches: Iterable[Mapping[str, Any]]) -> "Window":
        """The rows whose completion is among the sequences of these micro-batches."""
        seen = [tokens for tokens, _ in recorder.sequences_of(micro_batches)]
        pairs = zip(self.rows, self.sequences, strict=True)
        return Window(self.trainer, [row for row, (ids, _) in pairs if ids in seen])

    def dataset(self) -> Any:
        rows, spec = list(self.rows), self.spec
        if spec.grouped:
            rows = list({row.prompt: row for row in rows}.values())
        return dataset(rows, "prompts" if spec.generates else spec.data)


def policy(architecture: str, dtype: torch.dtype = torch.float32, seed: int = MOVED) -> Any:
    """The model of the twins: the saved one, each parameter moved by a share of itself, the same bits in every dtype."""
    out = models.model(architecture, dtype).train()
    with torch.no_grad():
        for name, parameter in out.named_parameters():
            _move(parameter, seed, name, NUDGE)
    return out


def _move(parameter: Tensor, seed: int, name: str, nudge: float) -> None:
    """By a share of itself, the same bits in every dtype."""
    share = (1 + nudge * normal(seed, name, parameter.shape)).to(parameter.device)
    parameter.copy_((parameter.float() * share.float()).to(parameter.dtype))


@drawn.once
def reference(architecture: str) -> Any:
    """The saved model in float64, without gradients."""
    return models.model(architecture, torch.float64).eval().requires_grad_(False)


def adapted(base: Any, seed: int, **options: Any) -> Any:
    """`base` with a LoRA whose weights are drawn from `seed`."""
    out = with_adapter(base, **options)
    fill_adapter(out, seed)
    return out


def with_adapter(base: Any, **options: Any) -> Any:
    """`base` with a LoRA, `trl.lora(**options)`, in the dtype of the base."""
    import peft

    with trl.quiet():
        return peft.get_peft_model(base, trl.lora(**options), autocast_adapter_dtype=False)


def written_out(model: Any) -> Any:
    """The PeftModel of a definition: its modules and parameters are PEFT's, what they compute is written here. Of a linear
    layer W·x + (α/r)·B·A·x, α/√r with use_rslora (arXiv 2106.09685, section 4.1; 2312.03732); x of an embedding is one-hot;
    of a saved module its copy. DoRA (2402.09353, equations 5 and 11): the weight's rows times m over their norm, a constant."""
    given = model.peft_config["default"]
    scale = given.lora_alpha / (given.r**0.5 if given.use_rslora else given.r)
    for module in model.modules():
        if hasattr(module, "lora_A"):
            module.forward = functools.partial(_low_rank, module, scale)
        elif "original_module" in module._modules:
            module.forward = functools.partial(_copied, module)
    return model


def _low_rank(module: Any, scale: float, x: Tensor) -> Tensor:
    out: Tensor = module.base_layer(x)
    if getattr(module, WITHOUT, False):
        return out
    if len(module.lora_embedding_A):
        return out + module.lora_embedding_A["default"].T[x] @ module.lora_embedding_B["default"].T * scale
    if len(module.lora_magnitude_vector):
        weight = module.base_layer.weight + module.lora_B["default"].weight @ module.lora_A["default"].weight * scale
        norms = module.lora_magnitude_vector["default"].weight / weight.norm(dim=1).detach()
        return torch.nn.functional.linear(x, weight * norms.unsqueeze(1), module.base_layer.bias)
    return out + module.lora_B["default"](module.lora_A["default"](x)) * scale


def _copied(module: Any, x: Tensor) -> Tensor:
    kept = module.original_module if getattr(module, WITHOUT, False) else module.modules_to_save["default"]
    out: Tensor = kept(x)
    return out


@contextlib.contextmanager
def base_alone(model: Any) -> Iterator[None]:
    """While it lasts, a model that is `written_out` is its base; another is left as it is."""
    with contextlib.ExitStack() as alone:
        for module in model.modules():
            alone.enter_context(mock.patch.object(module, WITHOUT, True, create=True))
        yield


def fill_adapter(model: Any, seed: int, size: float = ADAPTER_SIZE, nudge: float = NUDGE) -> None:
    """Weights of the adapter that is trained, by parameter name, none of them zero; a saved copy, and biases that are trained,
    away from where they were."""
    beside = hasattr(model, "peft_config")  # a model without an adapter trains all that it has
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".ref" in name:
                continue
            if "lora_" in name and "magnitude" not in name:
                parameter.copy_(size * normal(seed, name, parameter.shape).to(parameter))
            elif (
                "modules_to_save" in name
                or "magnitude" in name
                or (beside and parameter.requires_grad and name.endswith(".bias"))
            ):
                _move(parameter, seed, name, nudge)


def rewards(window: Sequences) -> Tensor:
    """The rewards of the stored completions, in groups: (prompts, generations), float64."""
    return torch.tensor(reward(completions=_texts(window)), dtype=torch.float64).view(-1, GENERATIONS)


def _texts(window: Sequences) -> list[str]:
    found: list[str] = models.tokenizer().batch_decode([t[start:] for t, start in window], skip_special_tokens=True)
    return found
