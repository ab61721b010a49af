import tokenizers
import transformers
from setup_tiny import options

words = {"<pad>": 0, "<eos>": 1, "<bos>": 2, **{f"w{i}": i for i in range(3, 32)}}
begun = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="<pad>"))
begun.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
begun.post_processor = tokenizers.processors.TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", 2)])
special = dict(pad_token="<pad>", eos_token="<eos>", bos_token="<bos>", padding_side="left")
tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=begun, **special)
tokenizer.model_input_names = ["input_ids", "attention_mask"]


def quiet(config, **more):
    return config(**options(per_device_train_batch_size=2, max_steps=1, **more))


def read_first(trainer, model):
    """The first tokens that the model is given in a step of the trainer."""
    seen = []
    trainer.remove_callback(transformers.PrinterCallback)
    watched = model.register_forward_pre_hook(
        lambda _, args, given: seen.append(given.get("input_ids", args[0] if args else None)), with_kwargs=True
    )
    trainer.train()
    watched.remove()
    return tokenizer.decode([i for i in seen[0][0].tolist() if i][:3])
