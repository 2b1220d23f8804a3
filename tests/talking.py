"""Tiny targets that chat: two tokenizers with chat templates, and a model that says anything."""

from __future__ import annotations

from pathlib import Path

import tiny
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

SPECIAL = ["<pad>", "<end>", "<user>", "<assistant>", "<system>"]
PAD, END, USER, ASSISTANT, SYSTEM = range(5)
WORDS = [f"w{number}" for number in range(60)]

TURN = "<{{ m['role'] }}>{{ m['content'] }}<end>\n"
BEGUN = "{% if add_generation_prompt %}<assistant>{% endif %}"
CHAT = "{% for m in messages %}" + TURN + "{% endfor %}" + BEGUN


def letters(template: str | None = CHAT, pad: str = "<pad>") -> PreTrainedTokenizerFast:
    """A token a character; blanks and line ends are tokens too."""
    characters = [*map(chr, range(32, 127)), "\n"]
    made = Tokenizer(models.BPE(vocab={token: at for at, token in enumerate(SPECIAL + characters)}, merges=[]))
    made.decoder = decoders.Fuse()
    return _chatting(made, template, pad)


def words(template: str | None = CHAT, pad: str = "<pad>") -> PreTrainedTokenizerFast:
    """A token a word, so that whatever a model says are words."""
    known = {token: at for at, token in enumerate([*SPECIAL, *WORDS, "<unk>"])}
    made = Tokenizer(models.WordLevel(known, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return _chatting(made, template, pad)


def _chatting(made: Tokenizer, template: str | None, pad: str) -> PreTrainedTokenizerFast:
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=made, eos_token="<end>", pad_token=pad, additional_special_tokens=SPECIAL[2:]
    )
    wrapped.chat_template = template
    return wrapped


def speaker(seed: int = tiny.SEED) -> LlamaForCausalLM:
    """Says the words of `words`, and ends now and then."""
    model = tiny.llama(seed=seed, vocab_size=len(SPECIAL) + len(WORDS) + 1, eos_token_id=END)
    with torch.no_grad():
        model.lm_head.weight[END] *= 3.5
        model.lm_head.weight[[PAD, USER, ASSISTANT, SYSTEM, -1]] *= 0.2
    return model


def saved(path: Path, seed: int = tiny.SEED, template: str | None = CHAT) -> str:
    """A model and its tokenizer in a folder; returns its name."""
    speaker(seed).save_pretrained(path)
    words(template).save_pretrained(path)
    return str(path)
