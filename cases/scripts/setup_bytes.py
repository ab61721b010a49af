import tokenizers
import transformers

letters = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
made = tokenizers.Tokenizer(tokenizers.models.BPE(vocab={letter: i for i, letter in enumerate(letters)}, merges=[]))
made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
made.decoder = tokenizers.decoders.ByteLevel()


def of_bytes(**more):
    """A tokenizer with a token for each byte."""
    return transformers.PreTrainedTokenizerFast(tokenizer_object=made, **more)
