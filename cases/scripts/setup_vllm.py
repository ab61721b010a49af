"""A real vLLM in this process, and TRL's way of pushing weights to it. Ends with 2 where vLLM is not installed.

vLLM's CPU build packs weights when it loads them, and packed weights cannot be loaded again: both ways of packing are off.
Two kernels of 0.32.0 are replaced, which are wrong on a CPU alone: rotary embeddings of three dimensions, and the router of
experts, which leaves the correction bias out.
"""

import contextlib
import gc
import importlib.util
import os
import sys
import types

QUIET = dict(HF_HUB_OFFLINE="1", VLLM_NO_USAGE_STATS="1", VLLM_DO_NOT_TRACK="1", VLLM_LOGGING_LEVEL="ERROR")
QUIET |= dict(VLLM_CPU_KVCACHE_SPACE="1", VLLM_ENABLE_V1_MULTIPROCESSING="0", VLLM_CPU_OMP_THREADS_BIND="nobind")
for name, value in QUIET.items():
    os.environ.setdefault(name, value)
if importlib.util.find_spec("vllm") is None:
    print("vLLM is not installed; make rollouts brings one: .venv-rollouts/bin/python SCRIPT")
    raise SystemExit(2)

import setup_bytes
import torch
import transformers
import vllm
from trl.generation.vllm_generation import VLLMGeneration

transformers.logging.set_verbosity_error()
transformers.utils.logging.disable_progress_bar()
PROMPT = torch.randint(3, 240, (57,), generator=torch.Generator().manual_seed(3)).tolist()


def on_a_cpu():
    import vllm._custom_ops as ops
    from vllm.model_executor.layers.fused_moe.experts import cpu_moe
    from vllm.model_executor.layers.fused_moe.router import cpu_router
    from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding

    torch.cpu._is_amx_tile_supported = lambda: False
    ops._supports_onednn = False
    RotaryEmbedding.forward_cpu = RotaryEmbedding.forward_native
    experts, router, pack = cpu_moe.CPUUnquantizedExperts, cpu_router.CPURouter, cpu_moe.cpu_prepack_moe_weight
    multiply, chosen = experts.apply, router._compute_routing

    def route(self, hidden, logits, kind, **more):
        if self.use_grouped_topk or self.custom_routing_function or self.e_score_correction_bias is None:
            return chosen(self, hidden, logits, kind, **more)
        rest = (self.scoring_func, self.routed_scaling_factor, self.e_score_correction_bias)
        return cpu_router._grouped_topk(logits, self.top_k, self.renormalize, 1, 1, *rest)

    def apply(self, output, hidden_states, w1, w2, *more, **named):
        return multiply(self, output, hidden_states, pack(w1, self.isa), pack(w2, self.isa), *more, **named)

    experts.process_weights_after_loading = lambda self, layer: setattr(self, "_use_zentorch", False)
    experts.apply = apply
    router._compute_routing = route


if not torch.cuda.is_available():
    on_a_cpu()


def saved(model, path):
    model.save_pretrained(path)
    setup_bytes.of_bytes().save_pretrained(path)
    return str(path)


def engine(path, **more):
    fixed = dict(dtype="float32", max_model_len=128, max_num_seqs=16, max_num_batched_tokens=512, seed=0)
    return vllm.LLM(model=path, enforce_eager=True, logprobs_mode="processed_logprobs", **fixed | more)


def closed(llm):
    from vllm.distributed.parallel_state import cleanup_dist_env_and_memory

    llm.llm_engine.engine_core.shutdown()
    cleanup_dist_env_and_memory()
    gc.collect()


def inside(llm):
    return llm.llm_engine.model_executor.driver_worker.model_runner.model


def pusher(model, llm):
    """TRL's VLLMGeneration in colocate mode, around an engine that runs already."""
    made = object.__new__(VLLMGeneration)
    made.model, made.llm, made.mode, made.enable_sleep_mode = model, llm, "colocate", False
    made.accelerator = types.SimpleNamespace(is_main_process=True, device="cpu")
    made._dist = types.SimpleNamespace(is_fsdp=False, gather_params=lambda _: contextlib.nullcontext())
    return made


def off(llm, model):
    """Largest distance in nats of the prompt's log-probs in vLLM from those of the model."""
    llm.reset_prefix_cache()
    asked = vllm.SamplingParams(temperature=1.0, max_tokens=1, prompt_logprobs=0)
    (out,) = llm.generate([{"prompt_token_ids": PROMPT}], asked, use_tqdm=False)
    there = torch.tensor([p[i].logprob for p, i in zip(out.prompt_logprobs[1:], PROMPT[1:], strict=True)])
    with torch.no_grad():
        rows = model(input_ids=torch.tensor([PROMPT])).logits[0, :-1].double().log_softmax(-1)
    return float((there - rows.gather(1, torch.tensor(PROMPT[1:])[:, None])[:, 0]).abs().max())


def moved(model, by=0.05, seed=5):
    torch.manual_seed(seed)
    with torch.no_grad():
        for p in model.parameters():
            if p.requires_grad:
                p.add_(by * torch.randn_like(p))
    return model


def end(wrong):
    sys.stdout.flush()
    os._exit(int(wrong))  # the engine's threads would print at exit
