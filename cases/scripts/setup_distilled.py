import tempfile

import datasets
import torch
import transformers
from setup_tiny import options, tiny, tokenizer

tokenizer.chat_template = "{% for m in messages %}{{ m.content + ' ' }}{% endfor %}"


def words(ids):
    return " ".join(f"w{i}" for i in ids)


def said(prompt, completion):
    """A row as a conversation, without an answer where there is no completion."""
    turns = [{"role": "user", "content": words(prompt)}]
    return {"messages": turns + [{"role": "assistant", "content": words(completion)}] * bool(completion)}


def tokenized(prompt, completion):
    """GOLDTrainer refuses tokenizers that are not byte-level; it takes ids."""
    return said(prompt, completion) | {
        "input_ids": prompt + completion,
        "completion_mask": [0] * len(prompt) + [1] * len(completion),
    }


def made(kind, config, rows, batch, accumulation=1, **more):
    """A trainer with a teacher, of one step."""
    cut = dict(per_device_train_batch_size=batch, gradient_accumulation_steps=accumulation, max_steps=1)
    length = "max_new_tokens" if hasattr(config, "max_new_tokens") else "max_completion_length"
    args = config(**options(beta=0.5, temperature=1.0, max_length=32, **{length: 4}, **cut, **more))
    teacher = tiny(1)
    teacher.config._name_or_path = tempfile.mkdtemp()
    tokenizer.save_pretrained(teacher.config._name_or_path)
    data = datasets.Dataset.from_list(rows)
    return kind(tiny(), teacher, args=args, train_dataset=data, processing_class=tokenizer)


def trained(kind, config, rows, batch, accumulation, **more):
    """One step: the loss of its window, the mean over its tokens of the JSD (beta 0.5) to the teacher, and their number."""
    trainer = made(kind, config, rows, batch, accumulation, **more)
    trainer.remove_callback(transformers.PrinterCallback)  # its lines would stand in the table
    compute_loss, losses, terms = trainer.compute_loss, [], []

    def watched(model, inputs, **more):
        losses.append(compute_loss(model, inputs, **more))
        given = {name: inputs[name] for name in ("input_ids", "attention_mask")}
        with torch.no_grad():
            student, taught = (m.double()(**given).logits[:, :-1].log_softmax(-1) for m in (tiny(), tiny(1)))
        mixture = torch.logaddexp(student, taught) - torch.tensor(2.0).double().log()
        jsd = 0.5 * (student.exp() * (student - mixture) + taught.exp() * (taught - mixture)).sum(-1)
        terms.append(jsd[inputs["labels"][:, 1:] != -100])
        return losses[-1]

    trainer.compute_loss = watched
    trainer.train()
    every = torch.cat(terms)
    return float(sum(losses).detach()), float(every.mean()), len(every)
