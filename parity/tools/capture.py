"""`parity.capture`: the batch of a real training step as a case, to replay, minimise and judge."""

import contextlib
import dataclasses
import functools
import importlib.metadata
import inspect
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from parity.case.case import Case
from parity.case.family import Family
from parity.case.stored import write
from parity.errors import UsageError
from parity.families import policy_inputs
from parity.families.policy_losses import CONFIG_FIELDS, GIVEN
from parity.fixes.wiring import logit_scale
from parity.implementations.user import canonical, family_of, named_outputs
from parity.judge.recipe import DTYPES
from parity.registry import family, loss_families, loss_family


@dataclasses.dataclass
class _Taken:
    """What one call showed."""

    family: str = ""
    tensors: dict[str, Tensor] = dataclasses.field(default_factory=dict)
    settings: dict[str, Any] = dataclasses.field(default_factory=dict)
    leaves: list[str] = dataclasses.field(default_factory=list)
    remarks: dict[str, Any] = dataclasses.field(default_factory=dict)
    calls: int = 0

    def keep(self, name: str, value: Tensor) -> None:
        self.tensors[name] = value.detach().to("cpu", copy=True)
        if value.requires_grad and name in ("hidden", "weight", "bias"):
            self.leaves.append(name)


@contextlib.contextmanager
def capture(target: Any, to: str | Path = "case.json", step: int = 1, rows: int | None = None) -> Iterator[Any]:
    """Write the batch of call number `step` of a loss, or of a trainer's `compute_loss`, as the case `to`.

        with parity.capture(my_loss, to="case.json") as loss_fn:  # call loss_fn where my_loss was called
            loss_fn(hidden, weight, ids, mask, advantages, beta=0.04).backward()
        with parity.capture(trainer, to="case.json", step=3):  # TRL's GRPOTrainer or SFTTrainer
            trainer.train()

    A function's arguments are known by their names, as in `--implementation FILE.py:NAME`; tensors are copied before the
    call, the upstream gradient when `backward` reaches it. Of a trainer: the last hidden states and the LM head, which must
    be an `nn.Linear`. `to` gets a file of the same name with suffix `.safetensors` beside it. `rows`: the first so many
    sequences only.

    Raises:
        UsageError: at the end of the block, naming what cannot be a case; nothing is written then.
    """
    taken = _Taken()
    is_trainer = hasattr(target, "compute_loss") and hasattr(target, "accelerator")
    watch = _trainer if is_trainer else _function
    with watch(target, taken, step) as given:
        yield given
    if taken.calls < step:
        raise UsageError(f"capture: the loss was called {taken.calls} times, so there is no step {step}")
    of, to = loss_family(taken.family), Path(to)
    for name, letters in {**of.stored, f"d {of.first}": "BT"}.items():  # the first rows of whatever has a dimension B
        if rows is not None and name in taken.tensors and letters[:1] == "B" and taken.tensors[name].dim():
            taken.tensors[name] = taken.tensors[name][:rows]
    settings = taken.settings | ({"grad": " ".join(taken.leaves)} if taken.leaves else {})
    case = stored(of, taken.tensors, settings, to, **taken.remarks)
    try:
        of.build(case)
    except UsageError:
        to.unlink()
        Path(str(case.tensors)).unlink()
        raise


def captured(trainer: Any, to: Path, run: Callable[[], Any]) -> tuple[Any, Exception | None]:
    """What `run`, a step of the trainer, returns; its batch is the case `to`, or there is the error why it is not."""
    out, begun = list[Any](), False
    try:
        to.parent.mkdir(parents=True, exist_ok=True)
        with capture(trainer, to):
            begun = True
            out.append(run())
    except (UsageError, OSError) as error:
        if begun and not out:
            raise  # the step's own
        return out[0] if out else run(), error
    return out[0], None


def stored(
    of: Family, tensors: Mapping[str, Tensor], settings: Mapping[str, Any], to: Path, seed: int = 0, **remarks: Any
) -> Case:
    """A case of these tensors, written to `to`; they decide its dtype and sizes."""
    tensors = policy_inputs.completed(tensors) if of.name == "policy" else tensors
    dtype = {dtype: name for name, dtype in DTYPES.items()}[tensors["hidden"].dtype]
    made = of.case(seed, dtype, {**settings, **of.derived(tensors, str(to))})
    of.full_settings(made)  # sizes and values, before anything is written
    return write(made, tensors, to, **remarks)


@contextlib.contextmanager
def _function(function: Callable[..., Any], taken: _Taken, step: int) -> Iterator[Callable[..., Any]]:
    signature = inspect.signature(getattr(function, "forward", function))
    label = getattr(function, "__name__", type(function).__name__)
    of = family_of(signature, label, [loss_family(name) for name in loss_families()])

    @functools.wraps(function)
    def watched(*args: Any, **kwargs: Any) -> Any:
        taken.calls += 1
        if taken.calls != step:
            return function(*args, **kwargs)
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        _arguments(of, bound, taken, label)
        out = function(*args, **kwargs)
        first = named_outputs(out, of)[of.first]
        if first.requires_grad:
            first.register_hook(lambda g: taken.keep(f"d {of.first}", g))
        return out

    yield watched


def _arguments(of: Family, bound: inspect.BoundArguments, taken: _Taken, label: str) -> None:
    taken.family, taken.remarks = of.name, {"captured": {"function": label}}
    given = dict(bound.arguments)
    for name, parameter in bound.signature.parameters.items():
        if parameter.kind is parameter.VAR_KEYWORD:
            given |= given.pop(name, {})
    for (argument, value), name in zip(given.items(), canonical(given).values(), strict=True):
        if name in of.stored and value is not None:
            taken.keep(name, value := torch.as_tensor(value))
            taken.settings |= _autocast(value) if name == "hidden" else {}
        elif name in of.settings and name not in ("B", "T", "V", "H"):
            taken.settings[name] = value.item() if isinstance(value, Tensor) else value
        elif value is not None and name not in of.stored and name != "ignore_index":
            taken.remarks["captured"].setdefault("left out", []).append(argument)


def _autocast(hidden: Tensor) -> dict[str, Any]:
    """Settings of the autocast that the caller is in."""
    device = hidden.device.type
    name = "autocast" if torch.get_autocast_dtype(device) == torch.bfloat16 else "autocast_fp16"
    return {"context": name} if torch.is_autocast_enabled(device) else {}


@contextlib.contextmanager
def _trainer(trainer: Any, taken: _Taken, step: int) -> Iterator[Any]:
    """The trainer, its `compute_loss` and the decoder of its model watched."""
    kinds = {base.__name__ for base in type(trainer).__mro__}
    read = _policy if "GRPOTrainer" in kinds else _labels if "SFTTrainer" in kinds else None
    if read is None:
        name = type(trainer).__name__
        raise UsageError(f"capture: {name} is no GRPOTrainer or SFTTrainer; give the loss function that it calls")
    model = trainer.accelerator.unwrap_model(trainer.model)
    model = model.get_base_model() if hasattr(model, "get_base_model") else model
    head = model.get_output_embeddings()
    if type(head) is not nn.Linear:
        raise UsageError(f"capture: the LM head is a {type(head).__name__}, only nn.Linear can be stored")
    original, seen, inside = trainer.compute_loss, list[Tensor](), [False]

    def decoded(module: Any, args: Any, out: Any) -> None:
        if inside[0] and torch.is_grad_enabled():
            seen.append(out[0].detach())
            taken.settings |= _autocast(out[0])  # accelerate puts it around the model's forward, not around the loss

    @functools.wraps(original)
    def watched(model_: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        taken.calls += 1
        if taken.calls != step:
            return original(model_, inputs, *args, **kwargs)
        inside[0] = True
        kept = {k: v.detach().clone() if isinstance(v, Tensor) else v for k, v in inputs.items()}
        taken.keep("weight", head.weight)
        if head.bias is not None:
            taken.keep("bias", head.bias)
        try:
            out = original(model_, inputs, *args, **kwargs)
        finally:
            inside[0] = False
        loss = out[0] if isinstance(out, tuple) else out
        about = {"trainer": type(trainer).__name__, "trl": importlib.metadata.version("trl"), "step": step}
        taken.remarks = {"captured": about | {"loss": float(loss.detach())}}
        softcap = getattr(model.config.get_text_config(), "final_logit_softcapping", None)
        taken.settings |= {"softcap": softcap, "logit_scale": logit_scale(model.config)}
        taken.leaves.insert(0, "hidden")
        read(trainer, kept, torch.cat(seen), taken, kwargs.get("num_items_in_batch"))
        return out

    hook = model.get_decoder().register_forward_hook(decoded)
    trainer.compute_loss = watched
    try:
        yield trainer
    finally:
        hook.remove()
        del trainer.compute_loss


def _policy(trainer: Any, inputs: Mapping[str, Any], hidden: Tensor, taken: _Taken, items: Any) -> None:
    """GRPO: the hidden states that predict the completions."""
    taken.family = "policy"
    width = inputs["completion_ids"].shape[1]
    taken.keep("hidden", hidden[:, -width - 1 : -1])
    for theirs, ours in GIVEN.items():
        if inputs.get(theirs) is not None:
            taken.keep(ours, torch.as_tensor(inputs[theirs]))
    completion = taken.tensors["completion_mask"]
    taken.keep("mask", completion * taken.tensors["tool_mask"] if "tool_mask" in taken.tensors else completion)
    s = family("policy").settings
    wanted = {n: getattr(trainer.args, n) for n in (*CONFIG_FIELDS, "steps_per_generation") if hasattr(trainer.args, n)}
    wanted |= {"temperature": trainer.temperature, "mode": "train" if trainer.model.training else "eval"}
    wanted["accumulation"] = getattr(trainer, "current_gradient_accumulation_steps", None) or 1
    quantile = getattr(trainer.args, "top_entropy_quantile", 1.0)
    if quantile < 1.0:
        taken.keep("top_entropy_quantile", torch.tensor(quantile, dtype=torch.float64))
    taken.settings |= {
        n: type(s[n].default)(v) if isinstance(s[n].default, int | float) else v for n, v in wanted.items()
    }
    taken.settings["cotangent"] = "ones"


def _labels(trainer: Any, inputs: Mapping[str, Any], hidden: Tensor, taken: _Taken, items: Any) -> None:
    """SFT: log-probs of the labels, with the upstream gradient of their mean, -1/N at a label."""
    taken.family = "logprobs"
    labels = inputs["labels"][:, 1:]
    taken.keep("hidden", hidden[:, :-1])
    taken.keep("ids", labels)
    there = (labels != -100).double()
    taken.keep("d logps", -there / float(there.sum().clamp(min=1) if items is None else items))
