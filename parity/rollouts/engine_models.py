"""The models that recordings are made of: a folder of the user's, or a tiny shipped one; and transformers as the engine."""

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from parity.data import rollouts_dir
from parity.errors import UsageError
from parity.judge.recipe import DTYPES
from parity.rollouts.server import Request, Sampled
from parity.upstream import trl

TINY = ("llama", "qwen2", "gemma2")
PREFIX = "tiny-"


def folder_of(model: str) -> Path:
    """A model's folder: DIR itself, or of the tiny model `tiny-NAME`. Raises UsageError for what is neither."""
    if model.startswith(PREFIX) and model.removeprefix(PREFIX) in TINY:
        return rollouts_dir() / "models" / model.removeprefix(PREFIX)
    if not (Path(model) / "config.json").exists():
        tiny = ", ".join(PREFIX + name for name in TINY)
        raise UsageError(f"model {model!r}: no folder with a config.json; or one of {tiny}")
    return Path(model)


def loaded(folder: Path, dtype: torch.dtype, adapter: Path | None = None) -> Any:
    """The causal language model in `folder`, with a PEFT adapter if one is given, in evaluation mode. Eager attention: the
    others may be another function. transformers 5.19 runs Gemma-2 with sdpa and drops the softcap on its attention scores.
    Experts in turn: its grouped product knows no float64."""
    import transformers

    with trl.quiet():
        out = transformers.AutoModelForCausalLM.from_pretrained(folder, torch_dtype=dtype, attn_implementation="eager")
    if hasattr(out, "set_experts_implementation"):
        out.set_experts_implementation("eager")
    if adapter is not None:
        from peft import PeftModel

        out = PeftModel.from_pretrained(out, adapter)
    return out.eval()


def weights_hash(folder: str | Path) -> str:
    """SHA-256 over the names and bytes of the tensors in the folder's safetensors files, sorted by name."""
    from safetensors import safe_open

    digest = hashlib.sha256()
    for file in sorted(Path(folder).glob("*.safetensors")):
        with safe_open(file, "pt") as tensors:
            for name in sorted(tensors.keys()):
                value = tensors.get_tensor(name).contiguous()
                digest.update(f"{name} {value.dtype} {tuple(value.shape)}".encode())
                digest.update(value.flatten().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def opened(model: str, dtype: str, max_length: int) -> Callable[[Request], Sampled]:
    """Loads the model once; what it returns samples a request, one row after the other, each with its own seed."""
    import transformers

    device = "cuda" if torch.cuda.is_available() else "cpu"
    policy = loaded(Path(model), DTYPES[dtype]).to(device)

    def sample(request: Request) -> Sampled:
        completions, logps, raw = [], [], []
        for row, prompt in enumerate(request.prompts):
            torch.manual_seed(request.seed + row)
            ids = torch.tensor([prompt], device=device)
            with torch.no_grad():
                more = {"top_k": request.top_k, "max_new_tokens": request.max_tokens, **request.sampling}
                more |= dict.fromkeys(("do_sample", "return_dict_in_generate", "output_scores", "output_logits"), True)
                out = policy.generate(ids, attention_mask=torch.ones_like(ids), **more)
            found = out.sequences[0, len(prompt) :]
            completions.append(found.tolist())
            logps.append(_selected(out.scores, found))
            raw.append(_selected(out.logits, found))
        facts = {"engine": f"transformers {transformers.__version__}", "device": device, "reported": "processed"}
        return Sampled(completions, logps, raw, facts)

    return sample


def _selected(logits: tuple[torch.Tensor, ...], ids: torch.Tensor) -> list[float]:
    rows = torch.stack([one[0].float() for one in logits]).log_softmax(-1)
    return [float(x) for x in rows.gather(1, ids[:, None])[:, 0]]
