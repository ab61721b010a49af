"""DeepSpeed's ZeRO-3 and ZeRO-2 under a real trainer, on the CPU over gloo: configs, and the gradients its engine steps with."""

import contextlib
from collections.abc import Iterator
from typing import Any

from torch import Tensor

from parity.errors import Unsupported

CONFIG: dict[str, Any] = {
    "use_cpu": False,
    "deepspeed": {
        "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
        "zero_allow_untested_optimizer": True,
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": "auto",
    },
}
"""Arguments of a config. `use_cpu` makes accelerate leave DeepSpeed aside; without it a machine with no accelerator trains
on the CPU all the same. With the default threshold no parameter of a tiny model is sharded."""

STAGE_2: dict[str, Any] = CONFIG | {"deepspeed": CONFIG["deepspeed"] | {"zero_optimization": {"stage": 2}}}
"""The same with whole weights on every rank: gradients and optimizer states are sharded."""

SETTINGS = {"DS_ACCELERATOR": "cpu", "ACCELERATE_USE_CPU": "false"}
"""Environment of a rank."""


@contextlib.contextmanager
def _joined() -> Iterator[None]:
    """Within it accelerate joins DeepSpeed's processes on a machine without an accelerator, through gloo.

    As released there is no way to: told of the CPU, accelerate leaves DeepSpeed aside; not told, it finds no backend and
    counts one process while DeepSpeed has them all.
    """
    from accelerate.state import DistributedType, PartialState

    original = PartialState._prepare_backend

    def prepared(self: Any, *args: Any, **kwargs: Any) -> Any:
        backend, kind = original(self, *args, **kwargs)
        return (backend, kind) if backend is not None else ("gloo", DistributedType.MULTI_CPU)

    PartialState._prepare_backend = prepared
    try:
        yield
    finally:
        PartialState._prepare_backend = original


@contextlib.contextmanager
def recorded() -> Iterator[list[tuple[int, dict[str, Tensor]]]]:
    """Within it each step of an engine adds what it steps with: how many parameters are sharded, and name -> gradient.

    To be entered before the config is made, which starts DeepSpeed. The engine keeps partitioned gradients, steps and drops
    them within the backward pass of the last micro-batch, before any callback. The shared-memory reduction for inference, a
    C++ extension that is compiled for minutes on first use, is left out; training never calls it.

    Raises:
        Unsupported: where deepspeed does not import.
    """
    try:
        import deepspeed
        from deepspeed.utils import safe_get_full_grad
    except ImportError as error:
        raise Unsupported(f"deepspeed does not import: {error}") from None
    from transformers.integrations.deepspeed import unset_hf_deepspeed_config

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    engine, found = deepspeed.DeepSpeedEngine, []
    original = engine.step

    def step(self: Any, *args: Any, **kwargs: Any) -> Any:
        named = {n: p for n, p in self.module.named_parameters() if p.requires_grad}
        shards = [p for p in named.values() if hasattr(p, "ds_id")]
        sharded = sum(p.ds_tensor.ds_numel < p.ds_numel and not p.ds_persist for p in shards)
        grads = {n: safe_get_full_grad(p) for n, p in named.items()}
        found.append((sharded, {n: g.detach().clone() for n, g in grads.items() if g is not None}))
        return original(self, *args, **kwargs)

    engine.step = step
    try:
        with _joined():
            yield found
    finally:
        engine.step = original
        unset_hf_deepspeed_config()  # with it set, the next model would be loaded in shards
