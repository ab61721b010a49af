import tempfile
import types

import tokenizers
import torch
import transformers

torch.set_num_threads(1)
words = {"<pad>": 0, "<eos>": 1, **{f"w{i}": i for i in range(2, 32)}}
tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="<pad>"))
tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
tokenizer = transformers.PreTrainedTokenizerFast(
    tokenizer_object=tokenizer,
    pad_token="<pad>",
    eos_token="<eos>",
    model_input_names=["input_ids", "attention_mask"],
)
tokenizer.chat_template = "{{ messages[0].content }}"


def tiny(seed=0):
    torch.manual_seed(seed)
    size = dict(hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2)
    return transformers.LlamaForCausalLM(
        transformers.LlamaConfig(vocab_size=32, pad_token_id=0, eos_token_id=1, **size)
    )


def experts(seed=0):
    torch.manual_seed(seed)
    size = dict(hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2)
    return transformers.MixtralForCausalLM(
        transformers.MixtralConfig(
            vocab_size=32, pad_token_id=0, eos_token_id=1, num_key_value_heads=2, num_local_experts=4, **size
        )
    )


def options(**more):
    quiet = dict(report_to=[], use_cpu=True, bf16=False, save_strategy="no", disable_tqdm=True, logging_strategy="no")
    return quiet | dict(output_dir=tempfile.mkdtemp(), learning_rate=0.0, max_grad_norm=1e9) | more


def uld(**more):
    """What GOLD's ULDLoss reads of a config, at its defaults."""
    plain = dict(uld_crossentropy_weight=0.0, uld_distillation_weight=1.0, use_extended_uld=True)
    plain |= dict.fromkeys(("uld_student_temperature", "uld_teacher_temperature"), 1.0)
    plain |= dict.fromkeys(("uld_skip_student_eos", "uld_skip_teacher_eos"), True)
    return types.SimpleNamespace(**plain | more)


PAIRS = [
    {"prompt": "w2 w3", "chosen": " w4 w5 w6", "rejected": " w7 w8"},
    {"prompt": "w9 w10", "chosen": " w11", "rejected": " w12 w13 w14"},
    {"prompt": "w15", "chosen": " w16 w17", "rejected": " w18"},
    {"prompt": "w20 w21", "chosen": " w22 w23 w24 w25", "rejected": " w26 w27"},
]
