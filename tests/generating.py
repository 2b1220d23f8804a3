"""What the tests of `generate` share beside `tiny`: drafters of every kind, a tokenizer, and comparisons with stock."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import tiny
import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerFast
from transformers.generation import BaseStreamer

import hf_specgen as sg

EOS = 2
Texts = Sequence[Sequence[int]]

BATCHES = pytest.mark.parametrize("prompt", [tiny.ONE, tiny.RAGGED], ids=["one", "ragged"])
KINDS = ("plain", "chain", "tree", "model", "lookup")
DRAFTERS = pytest.mark.parametrize("kind", KINDS)
SHAPES = pytest.mark.parametrize("shape", ["chain", "tree"])


def drafter(kind: str, model: PreTrainedModel, truth: Texts) -> Any:
    """One of `KINDS`: nothing, a script that is right most of the time, a model that is, and a look into the prompt."""
    if kind in ("chain", "tree"):
        return tiny.Scripted(truth, kind, num_assistant_tokens=5)
    if kind == "model":
        return tiny.sibling(model)
    return {"plain": sg.Plain, "lookup": sg.PromptLookup}[kind]()


def truth(sequences: Tensor, mask: Tensor) -> Texts:
    """Rows without what `mask` hides of the first of their columns."""
    shown = torch.nn.functional.pad(mask, (0, sequences.shape[1] - mask.shape[1]), value=1).bool()
    return [row[keep].tolist() for row, keep in zip(sequences, shown, strict=True)]


def said(model: PreTrainedModel, prompt: tiny.Prompt, count: int = 24) -> list[list[int]]:
    """What follows each row of the prompt when nothing ends it."""
    ids = model.generate(**prompt.inputs(), max_new_tokens=count, do_sample=False, eos_token_id=None)
    rows: list[list[int]] = ids[:, prompt.columns :].tolist()
    return rows


def whole(prompt: tiny.Prompt, rows: Texts) -> Texts:
    """Each row of the prompt with what follows it: the script of `tiny.Scripted`."""
    return [[*before, *after] for before, after in zip(prompt.rows, rows, strict=True)]


def same_as_stock(model: PreTrainedModel, assistant: Any, **kwargs: Any) -> Tensor:
    """Stock's greedy answer, after seeing that the assisted one is the same."""
    expected: Tensor = model.generate(**kwargs, do_sample=False)
    actual = sg.enable(model).generate(**kwargs, do_sample=False, assistant=assistant)
    assert torch.equal(actual, expected)
    return expected


def ends(rows: Texts, eos: int) -> list[int]:
    """For each row how many tokens it has, its EOS included."""
    return [[*row, eos].index(eos) + (eos in row) for row in rows]


@contextmanager
def counted(model: torch.nn.Module) -> Iterator[list[int]]:
    """The widths of the forward passes made meanwhile."""
    widths: list[int] = []

    def count(module: torch.nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        ids = kwargs.get("input_ids")
        widths.append(kwargs["inputs_embeds"].shape[1] if ids is None else ids.shape[1])

    handle = model.register_forward_pre_hook(count, with_kwargs=True)
    try:
        yield widths
    finally:
        handle.remove()


def tokenizer(words: int = tiny.VOCAB) -> PreTrainedTokenizerFast:
    """Three letters a token, so that a text can be encoded again and a stop string can end inside of a token."""
    generator = torch.Generator().manual_seed(0)
    # The last two are what transformers' stop strings look a vocabulary over with.
    known = ["<pad>", "<bos>", "<eos>", "abc", "def"]
    while len(known) < words:
        word = "".join("abcdefghij"[i] for i in torch.randint(10, (3,), generator=generator).tolist())
        if word not in known:
            known.append(word)
    backend = Tokenizer(models.WordLevel({word: i for i, word in enumerate(known)}, unk_token="<pad>"))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex("..."), "isolated")
    backend.decoder = decoders.Fuse()
    special = {"pad_token": "<pad>", "bos_token": "<bos>", "eos_token": "<eos>"}
    return PreTrainedTokenizerFast(tokenizer_object=backend, padding_side="left", **special)


class Recorded(BaseStreamer):
    """A streamer that notes what it is given."""

    def __init__(self) -> None:
        self.puts: list[Any] = []
        self.shapes: list[tuple[int, ...]] = []
        self.ends = 0

    def put(self, value: Tensor) -> None:
        assert not self.ends
        assert value.device.type == "cpu"
        self.puts.append(value.tolist())
        self.shapes.append(tuple(value.shape))

    def end(self) -> None:
        self.ends += 1
