"""Tokenizers, a text, and tiny models that know it by heart in the tokens of one of them.

Training the same tokenizer twice does not give the same merges, and what a drafter gets right differs with them: so
those that are trained lie in tests/data/tongues. `python tests/tongues.py` trains them anew.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path

import torch
from tiny import llama, sibling
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedModel, PreTrainedTokenizerFast

import hf_specgen as sg

# Double spaces, an indent, empty lines, accents, characters of several bytes, a character of several code points.
TEXT = (
    "The quick brown fox jumps over the lazy dog, and the naïve café owner — Zoë — paid 1250 zł for it.\n\n"
    "  if theory == 'therefore':\n        return  the_other(thing)  # 42\n"
    "Über den Wolken muß die Freiheit wohl grenzenlos sein. 你好,世界! Ünïcödé 🙂👩‍🚀 is everywhere; nobody knows "
    "where the others were gathering together.\tEnd of the story. "
)
# The drafter's version of it: some words differ, so that some of what it drafts is wrong.
OTHER = TEXT.replace("lazy dog", "busy cat").replace("nobody knows", "everyone saw").replace("wohl", "fast")

DATA = Path(__file__).parent / "data" / "tongues"
ALPHABET = pre_tokenizers.ByteLevel.alphabet()
SPECIAL = ["<s>", "</s>"]
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]


def _trained(raw: Tokenizer, trainer: object) -> Tokenizer:
    raw.train_from_iterator([TEXT] * 4 + [OTHER], trainer)
    return raw


def _byte_level(size: int, space: bool = False) -> Tokenizer:
    raw = Tokenizer(models.BPE())
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=space)
    raw.decoder = decoders.ByteLevel()
    raw.post_processor = processors.ByteLevel(trim_offsets=True)
    trainer = trainers.BpeTrainer(
        vocab_size=size, initial_alphabet=ALPHABET, special_tokens=SPECIAL, show_progress=False
    )
    return _trained(raw, trainer)


def _unigram() -> Tokenizer:
    raw = Tokenizer(models.Unigram())
    raw.pre_tokenizer = pre_tokenizers.Metaspace()
    raw.decoder = decoders.Metaspace()
    trainer = trainers.UnigramTrainer(
        vocab_size=160, special_tokens=[*SPECIAL, "<unk>"], unk_token="<unk>", show_progress=False
    )
    return _trained(raw, trainer)


def _llama() -> Tokenizer:
    """As sentencepiece's BPE is converted: a space before every text, bytes for what has no token, a BOS."""
    grown = Tokenizer(models.BPE())
    grown.normalizer = normalizers.Replace(" ", "▁")
    trainer = trainers.BpeTrainer(vocab_size=120, special_tokens=SPECIAL, show_progress=False, limit_alphabet=48)
    grown.train_from_iterator([TEXT], trainer)
    pieces = [piece for piece, _ in sorted(grown.get_vocab().items(), key=lambda known: known[1])]
    pieces = [piece for piece in pieces if "▁" not in piece[1:]]
    known = {piece: i for i, piece in enumerate([*SPECIAL, "<unk>", *BYTES, *pieces[len(SPECIAL) :]])}
    merges = [
        (piece[:cut], piece[cut:])
        for piece in pieces[len(SPECIAL) :]
        for cut in range(1, len(piece))
        if piece[:cut] in known and piece[cut:] in known
    ]
    raw = Tokenizer(models.BPE(known, merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    raw.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    raw.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    raw.add_special_tokens([*SPECIAL, "<unk>"])
    raw.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A <s> $B", special_tokens=[("<s>", 0)]
    )
    return raw


def _word_piece() -> Tokenizer:
    """Lower case, no accents, no spaces: a text does not come back as it was."""
    raw = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    raw.normalizer = normalizers.BertNormalizer(lowercase=True)
    raw.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    raw.decoder = decoders.WordPiece()
    trainer = trainers.WordPieceTrainer(vocab_size=220, special_tokens=["[UNK]", "[CLS]", "[SEP]"], show_progress=False)
    _trained(raw, trainer)
    raw.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[(name, raw.token_to_id(name)) for name in ("[CLS]", "[SEP]")]
    )
    return raw


# What the 96 ids of the tiny models stand for in "letters".
LETTERS = [chr(33 + i) for i in range(96)]


def _characters(letters: list[str], merges: tuple[str, ...] = ()) -> Tokenizer:
    """A character a token, and some pairs."""
    known = {piece: i for i, piece in enumerate([*letters, *merges])}
    raw = Tokenizer(models.BPE(known, [tuple(pair) for pair in merges]))
    raw.decoder = decoders.Fuse()
    return raw


# Few merges, many merges, a space before every text, sentencepiece's two kinds, and one that loses what it is told.
TRAINED: dict[str, Callable[[], Tokenizer]] = {
    "small": lambda: _byte_level(280),
    "large": lambda: _byte_level(420),
    "spaced": lambda: _byte_level(340, space=True),
    "unigram": _unigram,
    "llama": _llama,
    "lower": _word_piece,
}
MAKERS: dict[str, Callable[[], Tokenizer]] = {
    "letters": lambda: _characters(LETTERS),
    # the same in another order, and all but ten of them with some pairs beside
    "backwards": lambda: _characters(LETTERS[::-1]),
    "others": lambda: _characters(LETTERS[:9:-1], ("AB", "th", "9z")),
    # next to nothing
    "few": lambda: _characters(["a", "é", "世"]),
}


@functools.cache
def tokenizer(name: str) -> PreTrainedTokenizerFast:
    """A tokenizer; its special tokens are named where it has them."""
    raw = MAKERS[name]() if name in MAKERS else Tokenizer.from_file(str(DATA / f"{name}.json"))
    names = raw.get_vocab()
    special = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    if "[CLS]" in names:
        special = {"cls_token": "[CLS]", "sep_token": "[SEP]", "unk_token": "[UNK]"}
    return PreTrainedTokenizerFast(tokenizer_object=raw, **{k: v for k, v in special.items() if v in names})


@functools.cache
def reader(name: str, text: str = TEXT) -> PreTrainedModel:
    """A tiny Llama that knows the text by heart, in the tokens of a tokenizer."""
    words = tokenizer(name)
    ids = torch.tensor([words(text)["input_ids"]])
    with torch.random.fork_rng(), torch.enable_grad():
        torch.manual_seed(0)
        model = llama(vocab_size=len(words), hidden_size=48, num_hidden_layers=1, max_position_embeddings=12_000)
        for parameter in model.parameters():
            torch.nn.init.normal_(parameter, std=0.1) if parameter.ndim > 1 else torch.nn.init.ones_(parameter)
        model.float()
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        for _ in range(80):
            optimizer.zero_grad()
            model(input_ids=ids, labels=ids).loss.backward()
            optimizer.step()
    return sg.enable(model.double().eval().requires_grad_(False))


def translated(model: PreTrainedModel, noise: float = 0.1, name: str = "others") -> PreTrainedModel:
    """A sibling of a tiny model that speaks "letters": the same in other letters, with the rows of its table moved."""
    other = sibling(model, noise)
    ours, theirs = tokenizer("letters").get_vocab(), tokenizer(name).get_vocab()
    # A pair of letters is read as the first, and never said.
    rows = [ours[piece[0]] for piece in sorted(theirs, key=theirs.__getitem__)]
    said = torch.tensor([[float(len(piece) == 1)] for piece in sorted(theirs, key=theirs.__getitem__)])
    other.model.embed_tokens = torch.nn.Embedding.from_pretrained(other.model.embed_tokens.weight[rows])
    head = torch.nn.Linear(other.config.hidden_size, len(rows), bias=False, dtype=other.dtype)
    head.weight = torch.nn.Parameter(other.lm_head.weight[rows] * said.to(other.dtype), requires_grad=False)
    other.lm_head = head
    other.config.vocab_size = len(rows)
    return other


if __name__ == "__main__":
    DATA.mkdir(exist_ok=True)
    for name, train in TRAINED.items():
        train().save(str(DATA / f"{name}.json"), pretty=False)
