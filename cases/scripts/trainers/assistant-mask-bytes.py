# transformers 5.23.0, apply_chat_template(return_assistant_tokens_mask=True), SFT's assistant_only_loss: an answer whose last character is of several tokens (an emoji, a rare ideogram) loses the tokens behind the first; one that begins with a space is left out with all that follow, where offsets leave spaces out (GPT-NeoX)
# transformers/tokenization_utils_base.py:apply_chat_template ends the mask at char_to_token of the last character, its first token, and leaves the loop where that of the first is None
import tokenizers
import transformers

TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'user' %}<u>{{ m.content }}<a>{% else %}"
    "{% generation %}{{ m.content }}{% endgeneration %}<e>{% endif %}{% endfor %}"
)


def made(trimmed):
    """A tokenizer of bytes."""
    letters = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    model = tokenizers.models.BPE({letter: i for i, letter in enumerate(letters)}, [])
    one = tokenizers.Tokenizer(model)
    one.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    one.post_processor = tokenizers.processors.ByteLevel(trim_offsets=trimmed)
    one.decoder = tokenizers.decoders.ByteLevel()
    one.add_special_tokens(["<u>", "<a>", "<e>"])
    return transformers.PreTrainedTokenizerFast(tokenizer_object=one, chat_template=TEMPLATE)


print("| answers | offsets | tokens of the answers | in the mask |\n|---|---|---|---|")
wrong = False
for answers in (("yes", "no"), ("fine 😀", "no"), ("龘", "no"), (" yes", "no")):
    for trimmed in (False, True):
        tokenizer = made(trimmed)
        roles = [{"role": "user", "content": "why"}, {"role": "assistant", "content": ""}] * 2
        messages = [dict(turn) for turn in roles]
        for turn, answer in zip(messages[1::2], answers, strict=True):
            turn["content"] = answer
        found = tokenizer.apply_chat_template(
            messages, tokenize=True, return_dict=True, return_assistant_tokens_mask=True
        )
        right = sum(len(answer.encode()) for answer in answers)
        told = ", ".join(f'"{answer}"' for answer in answers)
        print(f"| {told} | {'trimmed' if trimmed else 'whole'} | {right} | {sum(found['assistant_masks'])} |")
        wrong |= sum(found["assistant_masks"]) != right
raise SystemExit(int(wrong))
