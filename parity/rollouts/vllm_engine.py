"""vLLM in this process."""

import math
import os
from collections.abc import Callable, Mapping
from typing import Any
from unittest import mock

import torch

from parity.errors import UsageError
from parity.judge.recipe import DTYPES
from parity.process import installed
from parity.rollouts.server import Request, Sampled

ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_DO_NOT_TRACK": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    # the engine in a process of its own crashed with bf16 in 6 of 8 runs of the CPU build 0.32.0
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "ERROR",
}
"""Set before vLLM is imported, where the user has not set them."""


def distribution() -> str | None:
    """The installed distribution that brings the module `vllm` and its version, "vllm-cpu 0.32.0"; None without one."""
    return next((f"{name} {installed(name)}" for name in ("vllm", "vllm-cpu") if installed(name)), None)


def prepare() -> None:
    """Sets what vLLM reads at import. Raises UsageError where no vLLM is installed; how to get one."""
    if distribution() is None:
        without = "`make rollouts`, then .venv-rollouts/bin/python -m parity rollouts …"
        raise UsageError(f"vLLM is not installed: on a GPU box pip install .[vllm]; without one {without}")
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)


def opened(
    model: str, dtype: str, max_length: int, change: Callable[[Any], Mapping[str, Any]] | None = None
) -> Callable[[Request], Sampled]:
    """Starts the engine once; what it returns samples a request. The log-probs beside sampled tokens are processed:
    behind temperature and top-p, of the distribution that was sampled from. The raw ones come from a second pass, which
    reads prompt and completion as a prompt: vLLM reports those at temperature 1 over the whole vocabulary.

    `change` is given vLLM's model once it is loaded, on a CPU before its weights are packed, which cannot be loaded again; it
    returns facts of a manifest."""
    prepare()
    from vllm import LLM, SamplingParams
    from vllm.model_executor.model_loader import base_loader
    from vllm.platforms import current_platform

    fixed = {"logprobs_mode": "processed_logprobs", "enforce_eager": True, "seed": 0}
    if max_length <= 128:  # a block of the CPU's cache would never be full, and nothing be read from it
        fixed["block_size"] = 32
    ended = list[Exception]()
    more, pack, early = dict[str, Any](), base_loader.process_weights_after_loading, current_platform.is_cpu()

    def changed(inside: Any, *how: Any) -> None:
        try:
            more.update(change(inside) if change else {})
        except Exception as error:
            ended.append(error)
            raise
        pack(inside, *how)

    try:
        with mock.patch.object(base_loader, "process_weights_after_loading", changed if early else pack):
            llm = LLM(model=model, dtype=DTYPES[dtype], max_model_len=max_length, **fixed)
    except Exception as error:
        if ended:  # in the push, not in vLLM
            raise ended[0] from None
        raise UsageError(f"vLLM does not start on {model}: {type(error).__name__}: {error}") from error
    if change and not early:
        more.update(change(llm.llm_engine.model_executor.driver_worker.model_runner.model))

    def sample(request: Request) -> Sampled:
        how = {"top_k": request.top_k, "max_tokens": request.max_tokens, "logprobs": 0, **request.sampling}
        params = [SamplingParams(**how, seed=request.seed + row) for row in range(len(request.prompts))]
        outs = llm.generate([{"prompt_token_ids": p} for p in request.prompts], params, use_tqdm=False)
        completions = [list(out.outputs[0].token_ids) for out in outs]
        logps = [_of(out.outputs[0].logprobs, ids) for out, ids in zip(outs, completions, strict=True)]
        whole = [p + c for p, c in zip(request.prompts, completions, strict=True)]
        asked = SamplingParams(temperature=1.0, max_tokens=1, prompt_logprobs=0)
        again = llm.generate([{"prompt_token_ids": ids} for ids in whole], asked, use_tqdm=False)
        three = zip(again, request.prompts, completions, strict=True)
        raw = [_of(out.prompt_logprobs[len(p) :], ids) for out, p, ids in three]
        cached = sum(o.num_cached_tokens or 0 for o in outs)
        return Sampled(completions, logps, raw, {**facts(), **more, "cached_tokens": cached})

    return sample


def facts() -> dict[str, Any]:
    """The engine's part of a manifest."""
    from vllm.platforms import current_platform

    kind = str(current_platform.device_type)
    device = kind if kind == "cpu" else current_platform.get_device_name()
    found = {"engine": distribution(), "device": device, "reported": "processed"}
    if kind == "cpu":  # its bf16 kernels, and so the bits of a recording, are chosen by them
        amx = " with AMX" if torch.cpu._is_amx_tile_supported() else ""
        found["instructions"] = torch.backends.cpu.get_cpu_capability() + amx
    return found


def _of(found: Any, ids: list[int]) -> list[float]:
    """The log-prob of each token; NaN where vLLM gives none."""
    return [float(e[i].logprob) if e and i in e else math.nan for e, i in zip(found, ids, strict=True)]
