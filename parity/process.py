"""Settings of a process in which losses run: environment variables, threads, full float32 products."""

from __future__ import annotations

import logging
import os


def environment(device: str, threads: int) -> dict[str, str]:
    """Environment variables of a worker: no hub, quiet libraries, and Triton's interpreter where there is no GPU."""
    out = {
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_VERBOSITY": "error",
        "TOKENIZERS_PARALLELISM": "false",
        "OMP_NUM_THREADS": str(threads),
        "TRL_EXPERIMENTAL_SILENCE": "1",
        "UNSLOTH_IS_PRESENT": "1",
        "UNSLOTH_ALLOW_CPU": "1",
        "PYTHONWARNINGS": "ignore",
        "TORCHINDUCTOR_COMPILE_THREADS": "1",
    }
    return out | ({"TRITON_INTERPRET": "1"} if device == "cpu" else {})


def prepare(device: str, threads: int) -> None:
    """Settings that hold for every party and are recorded in the header: full float32 products, no tf32."""
    for name, value in environment(device, threads).items():
        os.environ.setdefault(name, value)
    import torch

    torch.set_num_threads(threads)
    torch.set_float32_matmul_precision("highest")
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False
    import torch._dynamo.config
    import torch._inductor.config  # imported before the first snapshot: it sets environment variables

    torch._dynamo.config.recompile_limit = 10_000  # shapes differ from case to case here, as they do not in training
    torch._dynamo.config.accumulated_recompile_limit = 10_000
    logging.getLogger("torch._dynamo").setLevel(logging.CRITICAL)
