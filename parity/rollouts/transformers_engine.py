"""transformers' own `generate` as an engine: what a trainer without vLLM samples with."""

from collections.abc import Callable
from pathlib import Path

import torch

from parity.judge.recipe import DTYPES
from parity.rollouts import engine_models
from parity.rollouts.request import Request, Sampled


def opened(model: str, dtype: str, max_length: int) -> Callable[[Request], Sampled]:
    """Loads the model once; what it returns samples a request, one row after the other, each with its own seed."""
    import transformers

    device = "cuda" if torch.cuda.is_available() else "cpu"
    loaded = engine_models.loaded(Path(model), DTYPES[dtype]).to(device)

    def sample(request: Request) -> Sampled:
        completions, logps, raw = [], [], []
        for row, prompt in enumerate(request.prompts):
            torch.manual_seed(request.seed + row)
            ids = torch.tensor([prompt], device=device)
            with torch.no_grad():
                out = loaded.generate(
                    ids,
                    attention_mask=torch.ones_like(ids),
                    do_sample=True,
                    temperature=request.temperature,
                    top_p=request.top_p,
                    top_k=request.top_k,
                    max_new_tokens=request.max_tokens,
                    return_dict_in_generate=True,
                    output_scores=True,
                    output_logits=True,
                )
            found = out.sequences[0, len(prompt) :]
            completions.append(found.tolist())
            logps.append(_selected(out.scores, found))
            raw.append(_selected(out.logits, found))
        facts = {"engine": f"transformers {transformers.__version__}", "device": device, "reported": "processed"}
        return Sampled(completions, logps, raw, facts)

    return sample


def _selected(logits: tuple[torch.Tensor, ...], ids: torch.Tensor) -> list[float | None]:
    rows = torch.stack([one[0].float() for one in logits]).log_softmax(-1)
    return [float(x) for x in rows.gather(1, ids[:, None])[:, 0]]
