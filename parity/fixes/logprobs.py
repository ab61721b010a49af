"""Log-probs and entropies of chosen tokens from hidden states and an LM head, without the (N, V) logits.

They keep a relative precision where the plain forms round to 0: a token of probability 1 - 1e-9 has a log-prob of -1e-9
and a gradient of 1e-9 (how: `parity.fixes.chunked`). Besides gradients and tiles, memory is a few numbers per token.
"""

import torch
from torch import Tensor

from parity.fixes.checks import check_count, check_shapes, check_tensors, check_transform
from parity.fixes.chunked import ChunkedLogProbs, Settings, precision, statistics_dtype


@torch._disable_dynamo  # reads values (ids) and loops: nothing to trace. The public spelling imports Triton at once
def selective_log_probs(
    hidden: Tensor,
    weight: Tensor,
    ids: Tensor,
    *,
    bias: Tensor | None = None,
    temperature: float = 1.0,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    entropy: bool = False,
    chunk_size: int | None = None,
    token_chunk_size: int | None = None,
    ignore_index: int = -100,
    memory_budget: int | None = None,
    wide: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """`logp = z[id] - logsumexp(z)` with `z = softcap(logit_scale * (hidden @ weight.T + bias)) / temperature`.

    softcap(z) is softcap·tanh(z / softcap), the entropy -Σ p log p.
    Shapes: hidden (..., H), weight (V, H), bias (V,), ids (...) of an integer dtype; the result is (...). With
    `entropy=True` it is `(logps, entropies)`, both differentiable. Gradients flow to hidden, weight and bias, each in
    its own dtype, and only where asked for: a frozen head costs no buffer. Positions with `ids == ignore_index` get
    exact zeros, cost nothing, and whatever their hidden states hold (NaN too) reaches no result.

    Dtypes: hidden, weight and bias may be float16, bfloat16, float32 or float64, mixed (they are promoted; under
    autocast rounded to its dtype first). Results are float32, or float64 if an input is, and with `wide=True` wherever
    the device has it.

    Rounding: products of the rounded operands are accumulated in float32; logits, softmax and
    dlogits are float32, never stored in less, except that on CUDA with 16-bit operands dlogits are rounded to the
    operand dtype (float16 after scaling by a power of two, so that they do not underflow); sums over tiles float32;
    per-token statistics float64. Gradients are rounded to the input's dtype once, at the end. Everything is float64
    for float64 inputs.

    `chunk_size` is the number of vocabulary entries in a tile and `token_chunk_size` the number of tokens; the
    defaults suit the device. They change rounding order only.

    `memory_budget`, in bytes, is what the call may hold beside its inputs and their gradients. Tiles shrink until they
    fit (to 128 x 128), and tiles (4 bytes a logit, 8 in float64) stay for the backward as far as there is room: three
    products instead of four, in another order of rounding. None keeps none. Not counted: a copy of all narrow logits in a
    backward pass with retain_graph, and statistics where the vocabulary is a few entries.

    Not differentiable twice (RuntimeError); opaque to torch.compile: a graph break, which `fullgraph=True` refuses. Under
    ZeRO-3 gather the head around the call.

    Raises ValueError for what is no tensor, shapes that do not fit, ids outside [0, V), a temperature, softcap, or
    logit_scale that is not positive and finite or whose ratio is beyond 2**64, and an empty vocabulary.

    Source: the softmax identities above; interface after TRL 1.16.0 `selective_log_softmax` and
    `ChunkedLogProbFunction`.
    """
    check_tensors({"hidden": hidden, "weight": weight, "ids": ids}, {"bias": bias})
    if not isinstance(ignore_index, int):
        raise ValueError(f"ignore_index={ignore_index!r}: must be a whole number")
    check_shapes(hidden, weight, bias, ids)
    check_transform(temperature, softcap, logit_scale)
    check_count("chunk_size", chunk_size)
    check_count("token_chunk_size", token_chunk_size)
    check_count("memory_budget", memory_budget)
    operand, tile = precision(hidden, weight, bias)
    on_cpu = hidden.device.type == "cpu"
    tokens, (vocab, width) = ids.numel(), weight.shape
    vocab_block, token_block = chunk_size or (1024 if on_cpu else 8192), token_chunk_size or (1024 if on_cpu else 4096)
    vocab_block, token_block = min(vocab_block, vocab), max(1, min(token_block, tokens))
    keep, free = 0, chunk_size is token_chunk_size is None
    all_logits = tokens * vocab * tile.itemsize
    flat, valid = _scored(ids, vocab, ignore_index)
    rows = None if valid is None else valid.nonzero().squeeze(1)
    if memory_budget is not None:
        broad = min(4 * vocab_block, vocab)  # where all stays, fewer and larger products
        if chunk_size is None and all_logits + _working(broad, token_block, tokens, width, tile) <= memory_budget:
            vocab_block = broad
        while (
            (working := _working(vocab_block, token_block, tokens, width, tile)) > memory_budget
            and max(vocab_block, token_block) > 128
            and free
        ):
            vocab_block, token_block = (min(n, max(n // 2, 128)) for n in (vocab_block, token_block))
        keep = max(0, memory_budget - working)
    settings = Settings(
        temperature=float(temperature),
        softcap=None if softcap is None else float(softcap),
        logit_scale=float(logit_scale),
        entropy=entropy,
        vocab_block=vocab_block,
        token_block=token_block,
        operand=operand,
        tile=tile,
        result=statistics_dtype(hidden.device) if wide else tile,
        keep=keep,
    )
    scored = flat if rows is None else flat[rows]
    table = hidden.reshape(flat.numel(), hidden.shape[-1])
    logps, entropies = ChunkedLogProbs.apply(table, weight, bias, scored, rows, settings)
    logps = logps.reshape(ids.shape)
    return logps if entropies is None else (logps, entropies.reshape(ids.shape))


def _working(vocab_block: int, token_block: int, tokens: int, width: int, tile: torch.dtype) -> int:
    """Bytes at work at once: three tiles, operands and gradient of a block of the head, the hidden states' sums, statistics."""
    numbers = 3 * vocab_block * token_block + (2 * vocab_block + token_block + tokens) * width
    return numbers * tile.itemsize + 80 * tokens


def _scored(ids: Tensor, vocab: int, ignore_index: int) -> tuple[Tensor, Tensor | None]:
    """The ids, flat and 64 bits wide, and which are not ignored, None for all; ValueError where one of those is no token."""
    flat = ids.reshape(-1).long()
    if flat.numel() and not 0 <= ignore_index < vocab:
        least, most = flat.aminmax()
        if least.item() >= 0 and most.item() < vocab:
            return flat, None
    valid = flat != ignore_index
    outside = ((flat < 0) | (flat >= vocab)) & valid
    if bool(outside.any()):
        raise ValueError(f"ids: {int(flat[outside][0])} is outside [0, {vocab}); mask it with ignore_index")
    return flat, None if bool(valid.all()) else valid
