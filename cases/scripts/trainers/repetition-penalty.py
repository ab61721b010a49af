# TRL 1.16.0: GKD, GOLD, IW-OPD, A2PO draw completions with the repetition penalty of the model's generation config (1.1 in Qwen2.5-Instruct's), which their configs cannot set
# trl/experimental/gkd/gkd_trainer.py and others leave repetition_penalty out of their GenerationConfig: transformers fills it in. Penalty 1.1, temperature 1, top_p 1, top_k 0; GRPO sets 1.0 and is right
import torch
import transformers
from setup_a2po import a2po
from setup_distilled import made, said, tokenized
from setup_grpo import grpo
from setup_tiny import tiny
from trl.experimental.gkd import GKDConfig, GKDTrainer
from trl.experimental.gold import GOLDConfig, GOLDTrainer
from trl.experimental.iw_opd import IWOPDConfig, IWOPDTrainer

ROWS = [([5, 6, 7, 5, 6, 7, 5, 6], [9, 10]), ([11, 12, 11, 12, 11, 12, 13, 13], [14])]
seen = []
processors = transformers.generation.GenerationMixin._get_logits_processor


def watched(self, *given, **more):
    """The processors, and how far the last one's log-probs are from the model's own."""
    out, raw = processors(self, *given, **more), []

    def first(ids, scores):
        raw.append(scores.log_softmax(-1))
        return scores

    def last(ids, scores):
        seen.append(float((scores.log_softmax(-1) - raw[-1]).abs().max()))
        return scores

    return transformers.LogitsProcessorList([first, *out, last])


transformers.generation.GenerationMixin._get_logits_processor = watched


def distilled(kind, config, row, **more):
    return made(kind, config, [row(*r) for r in ROWS], 2, lmbda=1.0, gradient_checkpointing=False, **more)


def valued():
    prompts = [" ".join(f"w{i}" for i in prompt) for prompt, _ in ROWS]
    return a2po(tiny(), prompts, top_k=0, filter_all_incorrect=False)


WAYS = {
    "GRPO": lambda: grpo(tiny(), max_steps=1),
    "GKD": lambda: distilled(GKDTrainer, GKDConfig, said),
    "GOLD": lambda: distilled(GOLDTrainer, GOLDConfig, tokenized, top_p=1.0, top_k=0),
    "IW-OPD": lambda: distilled(IWOPDTrainer, IWOPDConfig, said, top_p=1.0, top_k=0),
    "A2PO": valued,
}
bad = False
print("| trainer | log-probs that completions are drawn from, off from the policy's by up to, nats |\n|---|---|")
for name, trainer in WAYS.items():
    seen.clear()
    torch.manual_seed(0)
    trainer = trainer()
    trainer.remove_callback(transformers.PrinterCallback)
    with torch.no_grad():
        for parameter in trainer.model.parameters():
            parameter.mul_(8 if parameter.ndim > 1 else 1)
    trainer.model.generation_config.repetition_penalty = 1.1
    trainer.train()
    bad |= max(seen) > 1e-3
    print(f"| {name} | {max(seen):.2g} |")
raise SystemExit(int(bad))
