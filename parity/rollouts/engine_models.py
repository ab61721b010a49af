"""The models that recordings are made of: a folder of the user's, or a tiny one that is shipped with the recordings."""

import hashlib
from pathlib import Path
from typing import Any

import torch

from parity.data import rollouts_dir
from parity.errors import UsageError
from parity.upstream import trl

TINY = ("llama", "qwen2", "gemma2")
PREFIX = "tiny-"


def folder_of(model: str) -> Path:
    """A model's folder: DIR itself, or of the tiny model `tiny-NAME`.

    Raises:
        UsageError: for what is neither.
    """
    if model.startswith(PREFIX) and model.removeprefix(PREFIX) in TINY:
        return rollouts_dir() / "models" / model.removeprefix(PREFIX)
    if not (Path(model) / "config.json").exists():
        tiny = ", ".join(PREFIX + name for name in TINY)
        raise UsageError(f"model {model!r}: no folder with a config.json; or one of {tiny}")
    return Path(model)


def loaded(folder: Path, dtype: torch.dtype) -> Any:
    """The causal language model in `folder`, in evaluation mode, in eager attention: the others may be another function.

    transformers 5.19 runs Gemma-2 with sdpa and drops the softcap on its attention scores.
    """
    import transformers

    with trl.quiet():
        return transformers.AutoModelForCausalLM.from_pretrained(
            folder, torch_dtype=dtype, attn_implementation="eager"
        ).eval()


def weights_hash(folder: Path) -> str:
    """SHA-256 over the names and bytes of the tensors in the folder's safetensors files, sorted by name."""
    from safetensors import safe_open

    digest = hashlib.sha256()
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, "pt") as tensors:
            for name in sorted(tensors.keys()):
                value = tensors.get_tensor(name).contiguous()
                digest.update(f"{name} {value.dtype} {tuple(value.shape)}".encode())
                digest.update(value.flatten().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
