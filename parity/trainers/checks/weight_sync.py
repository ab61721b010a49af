"""What an inference engine gets of the policy, and what sending it leaves: TRL's synchronisation with vLLM, without vLLM."""

import contextlib
import importlib.util
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from parity.case.inputs import Setting
from parity.errors import Unsupported
from parity.judge.oracle import Oracle
from parity.trainers.check import CheckCall, CheckCase, Quantity, check, entry, holds, pairwise, shared
from parity.trainers.checks.twins import twin
from parity.trainers.checks.variations import OPTIONS
from parity.trainers.definitions.scored import logits
from parity.trainers.definitions.training_step import measured
from parity.trainers.rig import drive, models, stored_window
from parity.trainers.rig.twin_runs import Run
from parity.upstream import trl

TRAINERS = ("grpo-trainer", "rloo-trainer", "online-dpo-trainer", "distillation-trainer")
NONE = "none"
SETTINGS = {
    "mode": Setting("server", "vllm_mode", ("server", "colocate")),
    "adapter": Setting("new", "a LoRA, one beside a saved LM head, or none", ("new", "rslora", "saved-head", NONE)),
    "model": Setting("llama", "tiny model", ("llama", "qwen2", "gemma2", "qwen3_moe")),
    "stored": Setting("fp32", "dtype of the base model's weights", ("fp32", "bf16")),
}
PR: list[CheckCase] = [
    ("grpo-trainer", {}),
    ("grpo-trainer", {"mode": "colocate", "adapter": "saved-head"}),
    ("grpo-trainer", {"adapter": NONE}),
    ("grpo-trainer", {"mode": "colocate", "stored": "bf16"}),
    ("online-dpo-trainer", {}),
]


def cases(seed: int) -> Iterator[CheckCase]:
    """Every pair of values, per trainer."""
    for number, trainer in enumerate(TRAINERS):
        yield from ((trainer, settings) for settings in pairwise(SETTINGS, seed + number))


class Engine:
    """vLLM's place: TRL's client of a server, and the model in the process. Keeps what it gets."""

    def __init__(self) -> None:
        self.got: dict[str, Tensor] = {}
        runner = SimpleNamespace(model=self)
        driver = SimpleNamespace(driver_worker=SimpleNamespace(model_runner=runner))
        self.llm_engine = SimpleNamespace(model_executor=driver)

    def load_weights(self, pairs: Iterable[tuple[str, Tensor]]) -> None:
        self.got |= {name: tensor.detach().clone() for name, tensor in pairs}

    def update_named_param(self, name: str, weights: Tensor) -> None:
        self.load_weights([(name, weights)])

    def update_named_params(self, told: Sequence[Any], pairs: Iterable[tuple[str, Tensor]]) -> None:
        """As vLLM's packed transfer: it collects views until they fill a buffer of 1 GiB, or there are no more, and then copies
        (vllm/distributed/weight_transfer/packed_tensor.py)."""
        self.load_weights(list(pairs))

    def weight_update(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def reset_prefix_cache(self) -> None:
        """It has none."""


@check("weight-sync", TRAINERS, SETTINGS, cases, pr=PR)
def weight_sync(call: CheckCall) -> Iterator[Quantity]:
    """The engine has the weights of the policy, LoRA and all; behind it policy and reference are as they were, in 16 bits too."""
    s, trainer = call.settings, call.case.family
    dtype, alone = {"fp32": torch.float32, "bf16": torch.bfloat16}[s.stored], s.adapter == NONE
    drive.needs(call.trainer, "use_vllm")
    options = OPTIONS.get(s.adapter, {})
    handed = None if alone else lambda: (models.model(s.model, dtype), trl.lora(**options))
    run = Run(trainer, twin(trainer, model=s.model), call.path, plain=True, adapter=handed)
    engine = Engine()
    synchronise = _connected(call, run.built, engine, s.mode)
    sequences = [tokens for tokens, _ in run.window.sequences]

    kept = run.built.model.state_dict
    before = {name: x.clone() for name, x in kept().items()}

    def copied(state: Mapping[str, Tensor], dtype: torch.dtype = torch.float32) -> Any:
        """A fresh model with these weights: its forward is as it was, where accelerate wraps the trainer's."""
        out = models.model(s.model, dtype)
        out = out if alone else stored_window.with_adapter(out, **options)
        out.load_state_dict({name: state[name] for name in out.state_dict()})
        return out

    def found(model: Any) -> dict[str, Tensor]:
        return {"logits": torch.cat(logits(model, sequences))}

    def of_base(model: Any) -> dict[str, Tensor]:
        with stored_window.base_alone(model):
            return found(model)

    def quantity(name: str, model: Any, define: Callable[[Any], dict[str, Tensor]] = found) -> Quantity:
        def oracle() -> Oracle:
            exact = copied(before, torch.float64)
            return measured(exact if alone else stored_window.written_out(exact), define)

        with torch.no_grad():
            value = found(model.eval())["logits"]
        return entry(name, value, shared(call, define.__name__, oracle), of="logits")

    state = _state(run.built.model)
    with drive.fixed(call.path, run.built):
        synchronise()
        now = _state(run.built.model)
    sampler = models.model(s.model)
    every, once = (dict(sampler.named_parameters(remove_duplicate=only)) for only in (False, True))
    tied = every.keys() - once.keys()  # vLLM leaves out a second name
    missing, unknown = sampler.load_state_dict({n: x for n, x in engine.got.items() if n not in tied}, strict=False)
    unsent = [name for name in missing if name not in tied]
    yield holds("names", not unsent and not unknown, f"missing {unsent[:2]}, unknown {unknown[:2]}")
    if s.stored == "fp32":
        yield quantity("logits of the engine", sampler)
    moved = [f"{name}: {now.get(name)} instead of {was}" for name, was in state.items() if now.get(name) != was]
    yield holds("state", not moved, f"behind it {len(moved)} are other ones, first {moved[:1]}")
    behind = copied(kept()) if s.stored == "bf16" else run.built.model
    yield quantity("logits of the policy behind it", behind)
    if not alone:
        with behind.disable_adapter():
            yield quantity("logits of the base behind it", behind, of_base)


def _state(model: Any) -> dict[str, Any]:
    """What is trained, which adapters are merged, off, and scaled by how much, and the mode of every module."""
    out: dict[str, Any] = {n: p.requires_grad for n, p in model.named_parameters()}
    for name, module in model.named_modules():
        own = [getattr(module, n, None) for n in ("merged_adapters", "disable_adapters", "scaling", "active_adapters")]
        out[f"{name} as a module"] = (module.training, *(str(x) for x in own))
    return out


def _connected(call: CheckCall, trainer: Any, engine: Engine, mode: str) -> Any:
    """The trainer's own synchronisation, with the engine at its other end."""
    trainer.use_vllm, trainer.vllm_mode = True, mode
    holder = trainer
    if importlib.util.find_spec("trl.generation") and not hasattr(trainer, "_move_model_to_vllm"):
        from trl.generation.vllm_generation import VLLMGeneration

        given = {name: getattr(trainer, name) for name in ("model", "accelerator", "processing_class")}
        given |= {"mode": mode, "is_fsdp_enabled": False}
        known = inspect.signature(VLLMGeneration).parameters
        with mock.patch.object(VLLMGeneration, "_init_vllm"):
            holder = trainer.vllm_generation = VLLMGeneration(**{n: x for n, x in given.items() if n in known})
    holder.vllm_client = holder.llm = engine
    synchronise = getattr(holder, "sync_weights", None) or getattr(holder, "_move_model_to_vllm", None)
    if synchronise is None:
        raise Unsupported(f"{call.trainer} of the installed version sends no weights to vLLM")
    return synchronise
