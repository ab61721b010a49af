"""TRL's push of weights to a vLLM in this process, and which of the engine's weights then are not those of the model."""

import copy
import importlib.metadata
import importlib.util
import os
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from parity.errors import UsageError
from parity.judge.hints import FEW
from parity.rollouts import engine_models


def moved(folder: Path, dtype: torch.dtype, out: Path, adapter: Path | None = None) -> tuple[Any, Path]:
    """The model in `folder`, each number of its parameters a tenth larger or smaller, or 0.02 from 0, saved in `out`; with an
    adapter if one is given. And where it is saved, merged. Raises UsageError where `out` exists, or TRL has no push."""
    import transformers

    if out.exists():
        raise UsageError(f"--push {out}: it exists; the model with moved weights is saved in a new folder")
    if importlib.util.find_spec("trl.generation") is None:
        raise UsageError("--push: the installed TRL has no trl.generation.vllm_generation")
    if adapter and not (adapter / "adapter_config.json").is_file():
        raise UsageError(f"--adapter {adapter}: it has no adapter_config.json")
    model = engine_models.loaded(folder, dtype)
    torch.manual_seed(0)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.where(p == 0, 0.02, 0.1 * p) * (2 * torch.randint_like(p, 2) - 1))
    merged = out / "merged" if adapter else out
    for place in {out, merged}:
        transformers.AutoProcessor.from_pretrained(folder).save_pretrained(place)
    model.save_pretrained(out)
    if adapter:
        model = engine_models.loaded(out, dtype, adapter)
        copy.deepcopy(model).merge_and_unload().save_pretrained(merged)
    return model, merged


def pushed(inside: Any, model: Any, folder: Path, asleep: bool) -> dict[str, Any]:
    """TRL pushes `model` to vLLM's model `inside`. What a manifest says of it: by which TRL, and which of vLLM's parameters are
    not as it loads them from `folder`, where the model is saved, merged. `asleep`: they are set to 0 before. Raises UsageError
    where vLLM cannot load them itself."""
    import trl.generation.vllm_generation as generation
    from accelerate import Accelerator
    from safetensors.torch import load_file

    llm, said, weights = mock.MagicMock(), "", dict(inside.named_parameters())
    filled = [name for name, p in weights.items() if asleep and bool(p.any()) and bool(p.isfinite().all())]
    llm.llm_engine.model_executor.driver_worker.model_runner.model = inside
    with torch.no_grad():
        for p in weights.values() if asleep else ():
            p.zero_()
        given: dict[str, Any] = {"create": True, "LLM": lambda **_: llm, "is_vllm_available": lambda: True}
        with mock.patch.multiple(generation, **given), mock.patch.dict(os.environ):  # it sets those of ranks
            sender = generation.VLLMGeneration(model, Accelerator(), None, mode="colocate")
        try:
            sender.sync_weights()
        except Exception as error:
            said = f"it ends in {type(error).__name__}: {str(error)[:100]}; "
        found = {name: p.cpu().clone() for name, p in weights.items()}
        try:
            inside.load_weights(
                pair for file in sorted(folder.glob("*.safetensors")) for pair in load_file(file).items()
            )
        except Exception as error:
            said = f"TRL's push: {said}" if said else ""
            raise UsageError(f"{said}vLLM cannot load {folder} itself: {type(error).__name__}: {error}") from error
        off = [name for name, p in weights.items() if not torch.equal(p.cpu().nan_to_num(), found[name].nan_to_num())]
        off += [name for name in filled if name not in off and not bool(found[name].any())]  # neither way loads it
        for name, p in weights.items():
            p.copy_(found[name])
    if off or said:
        said += f"{len(off)} of vLLM's {len(weights)} parameters are not as it loads them from {folder}: {', '.join(off[:FEW])}"
    return {"pushed_by": f"trl {importlib.metadata.version('trl')}", "not_pushed": said}
