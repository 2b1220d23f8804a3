"""What the tests share: tiny models sharp enough to fail, prompts, and drafters that are told what will come.

A freshly initialised model is nearly flat: its text hardly changes when a mask, a position or a prefix is wrong. With
larger weights it does, and in float64 two ways to compute the same never differ by enough to change it.
"""

from __future__ import annotations

import copy
import itertools
import random
import sys
import zlib
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import (
    DynamicCache,
    LlamaConfig,
    LlamaForCausalLM,
    LogitsProcessor,
    LogitsProcessorList,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    StaticCache,
)

import hf_specgen as sg
from hf_specgen.draft import Context, Draft, DraftSession, Limit, Needs, Request

VOCAB = 96
# Of the seeds tried, the one whose greedy texts run into loops last.
SEED = 103


def sharpen(model: PreTrainedModel) -> PreTrainedModel:
    """The model with larger weights, so that an error in what it is shown changes its text.

    In float64, but for eager attention: its softmax is taken in float32, where float64's mask is -inf and padding NaN.
    """
    model.to(torch.float32 if model.config._attn_implementation == "eager" else torch.float64).eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.endswith("_proj.weight"):
                weight.mul_(8)
            elif name == "lm_head.weight":
                weight.mul_(25)
    return model


def _sizes(**changed: Any) -> dict[str, Any]:
    sizes = {
        "vocab_size": VOCAB,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": 0,
    }
    return {**sizes, **changed}


def llama(attention: str = "sdpa", seed: int = SEED, **changed: Any) -> LlamaForCausalLM:
    """A stock Llama with grouped heads and without an EOS; equal arguments make equal weights."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return sharpen(LlamaForCausalLM(LlamaConfig(**_sizes(attn_implementation=attention, **changed))))


def mistral(attention: str = "sdpa", window: int = 8, seed: int = SEED) -> MistralForCausalLM:
    """A stock Mistral that sees `window` tokens."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        config = MistralConfig(**_sizes(attn_implementation=attention, sliding_window=window))
        return sharpen(MistralForCausalLM(config))


def sibling(model: PreTrainedModel, noise: float = 0.15) -> PreTrainedModel:
    """A drafter that often agrees with a model of this file: its weights with `noise` added."""
    other = sg.disable(copy.deepcopy(model))
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, weight in other.named_parameters():
            if name.endswith("_proj.weight"):
                weight.add_(noise * weight.std() * torch.randn(weight.shape, generator=generator, dtype=weight.dtype))
    return other


def checkpoints(path: Path) -> Path:
    """The tiny Llama and a sibling, saved in a folder, as `llama` and `sibling`; returns the folder."""
    llama().save_pretrained(path / "llama")
    sibling(llama()).save_pretrained(path / "sibling")
    return path


def store_of(texts: Sequence[Sequence[int]]) -> sg.LookupStore:
    """A store for prompt lookup that holds what will come, with every sixth token wrong."""
    store = sg.LookupStore(min_ngram=2)
    for text in texts:
        store.add([wrong(token) if place % 6 == 5 else token for place, token in enumerate(text)])
    return store


def suffix_store_of(texts: Sequence[Sequence[int]]) -> sg.SuffixStore:
    """The same for suffix lookup."""
    store = sg.SuffixStore()
    for text in texts:
        store.add([wrong(token) if place % 6 == 5 else token for place, token in enumerate(text)])
    return store


def matrix_of(texts: Sequence[Sequence[int]]) -> sg.CandidateMatrix:
    """The same as a matrix for token recycling; the likelier candidate may be the wrong one."""
    matrix = sg.CandidateMatrix()
    for text in texts:
        for place, (token, follower) in enumerate(itertools.pairwise(text)):
            best = [follower, wrong(follower)]
            matrix.update([], [(token, best[::-1] if place % 6 == 5 else best)])
    return matrix


@dataclass(frozen=True)
class Foretold:
    """Lookahead whose pools hold n-grams of what will come, with every sixth token wrong."""

    drafter: sg.Lookahead
    texts: Sequence[Sequence[int]]
    num_assistant_tokens: int | None = None

    def start(self, target: PreTrainedModel, request: Request) -> DraftSession:
        session = self.drafter.start(target, request)
        levels = self.drafter.levels
        for row, text in zip(session.rows, self.texts, strict=False):
            for place in range(len(text) - levels + 1):
                ngram = text[place : place + levels]
                row.add([*ngram[:-1], wrong(ngram[-1])] if place % 6 == 5 else ngram)
        return session


@dataclass(frozen=True)
class Prompt:
    """Rows of ids; as inputs they are padded on the left."""

    rows: tuple[tuple[int, ...], ...]

    @classmethod
    def random(cls, *rows: tuple[int, int]) -> Prompt:
        """Rows given as (length, seed)."""
        ids = []
        for length, seed in rows:
            generator = random.Random(seed)
            ids.append(tuple(generator.randrange(3, VOCAB) for _ in range(length)))
        return cls(tuple(ids))

    @property
    def batch(self) -> int:
        return len(self.rows)

    @property
    def columns(self) -> int:
        return max(map(len, self.rows))

    def inputs(self) -> dict[str, Tensor]:
        padding = [self.columns - len(row) for row in self.rows]
        return {
            "input_ids": torch.tensor([[0] * pad + list(row) for pad, row in zip(padding, self.rows, strict=True)]),
            "attention_mask": torch.tensor([[0] * pad + [1] * (self.columns - pad) for pad in padding]),
        }

    def alone(self, row: int) -> Prompt:
        return Prompt((self.rows[row],))


# After these the greedy text of the Llama does not loop, and its first tokens differ from one another.
ONE = Prompt.random((14, 9))
RAGGED = Prompt(((61,), *Prompt.random((24, 18), (3, 13)).rows))


class PrefixHash(LogitsProcessor):
    """Adds noise hashed from every id shown, so that one wrong id in a prefix changes the text. It keeps no state."""

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        noise = []
        for row in input_ids:
            generator = torch.Generator().manual_seed(zlib.crc32(row.numpy().tobytes()))
            noise.append(torch.randn(scores.shape[-1], generator=generator))
        return scores + 4 * torch.stack(noise)


# Keyword arguments of `generate`, made anew for each call.
MODES: dict[str, Callable[[], dict[str, Any]]] = {
    "greedy": lambda: {"do_sample": False},
    "sampled": lambda: {"do_sample": True, "temperature": 1.3, "top_k": 30, "top_p": 0.95},
    "hash-greedy": lambda: {"do_sample": False, "logits_processor": LogitsProcessorList([PrefixHash()])},
    "hash-sampled": lambda: {"do_sample": True, "top_k": 30, "logits_processor": LogitsProcessorList([PrefixHash()])},
    "penalties-greedy": lambda: {"do_sample": False, "repetition_penalty": 1.4, "no_repeat_ngram_size": 2},
    "penalties-sampled": lambda: {"do_sample": True, "repetition_penalty": 1.4, "no_repeat_ngram_size": 2},
}

# The cache arguments of `generate`, for a model and the most columns there can be.
CACHES: dict[str, Callable[[PreTrainedModel, int], dict[str, Any]]] = {
    "slot": lambda model, columns: {},
    "dynamic": lambda model, columns: {"cache": DynamicCache(config=model.config)},
    "static": lambda model, columns: {"cache_implementation": "static"},
    "static-object": lambda model, columns: {"cache": StaticCache(config=model.config, max_cache_len=columns)},
}


def texts(prompt: Prompt, sequences: Tensor) -> tuple[tuple[int, ...], ...]:
    """What `generate` returned, row by row without the left padding."""
    skip = [prompt.columns - len(row) for row in prompt.rows]
    return tuple(tuple(ids[pad:]) for pad, ids in zip(skip, sequences.tolist(), strict=True))


@dataclass
class Seen:
    """What a scripted drafter noticed, one entry for each row of each draft that was checked; but for the last round's.

    Attributes:
        mixed: some of the row's draft was accepted and some was not.
        younger: a node was accepted that is not its parent's first child.
        chains: for each draft, whether a chain was asked for.
        requests: what was said when a call began.
    """

    mixed: list[bool] = field(default_factory=list)
    younger: list[bool] = field(default_factory=list)
    chains: list[bool] = field(default_factory=list)
    requests: list[Request] = field(default_factory=list)

    def share(self, which: str) -> float:
        noticed: list[bool] = getattr(self, which)
        return sum(noticed) / len(noticed)


@dataclass(frozen=True)
class Scripted:
    """Hides what will come in chains, or among wrong siblings in trees.

    Attributes:
        truth: for each row the ids of plain decoding from the prompt's first on, and some more than will be decoded.
        shape: "chain" or "tree"; where chains are asked for it makes chains.
        spoiled: the share of places at which the true token is missing.
        overlong: go on past the depth that was asked for.
        seen: takes notes.
    """

    truth: Sequence[Sequence[int]]
    shape: str = "chain"
    spoiled: float = 1 / 6
    overlong: bool = False
    num_assistant_tokens: int = 8
    seen: Seen = field(default_factory=Seen)

    def start(self, target: PreTrainedModel, request: Request) -> ScriptedSession:
        self.seen.requests.append(request)
        return ScriptedSession(self)


# A node as (token, parent); parents count the root as 0.
Node = tuple[int, int]
GAP = -1


class ScriptedSession:
    needs = Needs()

    def __init__(self, drafter: Scripted) -> None:
        self.drafter = drafter
        self._before: list[list[Node]] = []
        self._lengths: list[int] = []

    def propose(self, context: Context, limit: Limit) -> Draft:
        drafter = self.drafter
        self._look_back(context)
        drafter.seen.chains.append(limit.chain)
        chain = limit.chain or drafter.shape == "chain"
        rows = []
        for row, (ids, depth) in enumerate(zip(context.ids, limit.depth, strict=True)):
            if drafter.overlong:
                # All that fits into the draft, whatever the row has room for, and for rows that have ended too.
                depth = min(limit.nodes, drafter.num_assistant_tokens) if chain else drafter.num_assistant_tokens
            start = len(ids)
            ahead = list(drafter.truth[row][start : start + depth])
            rows.append(self._chain(row, start, ahead) if chain else self._tree(row, start, ahead, limit.nodes))
        self._before, self._lengths = rows, [len(ids) for ids in context.ids]
        return as_draft(rows, chain)

    def _wrong_at(self, row: int, place: int) -> bool:
        return random.Random(f"0 {row} {place}").random() < self.drafter.spoiled

    def _chain(self, row: int, start: int, ahead: list[int]) -> list[Node]:
        tokens = [wrong(token) if self._wrong_at(row, start + i) else token for i, token in enumerate(ahead)]
        return [(token, i) for i, token in enumerate(tokens)]

    def _tree(self, row: int, start: int, ahead: list[int], most: int) -> list[Node]:
        """The true path among siblings, cousins that carry true tokens in wrong places, twins, and gaps."""
        chance = random.Random(f"tree {row} {start}")
        nodes: list[Node] = []
        spine = 0
        for i, token in enumerate(ahead):
            siblings = [wrong(token, by) for by in chance.sample(range(1, VOCAB), 2)]
            if not self._wrong_at(row, start + i):
                siblings.insert(chance.choice([0, 1, 1, 2, 2]), token)
            if chance.random() < 0.2:
                siblings.append(chance.choice(siblings))
            parent = spine
            for sibling in siblings:
                if chance.random() < 0.1:
                    nodes.append((token, GAP))
                nodes.append((sibling, parent))
                if sibling == token and spine == parent:
                    spine = len(nodes)
            if spine == parent:  # nothing true at this level: the true tokens go on below a wrong one
                spine = len(nodes)
            if i + 1 < len(ahead) and chance.random() < 0.5:
                # A cousin: the token of two levels on, below a wrong sibling.
                nodes.append((ahead[i + 1], len(nodes) if spine != len(nodes) else len(nodes) - 1))
        return shuffled(nodes[:most], chance)

    def _look_back(self, context: Context) -> None:
        for row, nodes in enumerate(self._before):
            gained = context.ids[row][self._lengths[row] :]
            if not gained or not nodes:
                continue
            path, younger, at = 0, False, 0
            for token in gained:
                children = [place for place, (_, parent) in enumerate(nodes, 1) if parent == at]
                found = next((place for place in children if nodes[place - 1][0] == token), None)
                if found is None:
                    break
                younger |= found != children[0]
                path, at = path + 1, found
            real = sum(parent != GAP for _, parent in nodes)
            self.drafter.seen.mixed.append(0 < path < real)
            self.drafter.seen.younger.append(younger)


def wrong(token: int, by: int = 1) -> int:
    """Another token."""
    return (token + by) % VOCAB


def shuffled(nodes: list[Node], chance: random.Random) -> list[Node]:
    """The same tree in another order, parents still before children, the first of two twins still the first."""
    waiting, place, order = list(range(1, len(nodes) + 1)), {0: 0, GAP: GAP}, []
    while waiting:
        ready = [node for node in waiting if nodes[node - 1][1] in place]
        # Of nodes with one parent the first comes first: only the levels mix.
        firsts = {nodes[node - 1][1]: node for node in reversed(ready)}
        node = chance.choice(sorted(firsts.values()))
        waiting.remove(node)
        token, parent = nodes[node - 1]
        order.append((token, place[parent]))
        place[node] = len(order)
    return order


def as_draft(rows: Sequence[Sequence[Node]], chain: bool) -> Draft:
    """Rows of nodes as the tensors of a draft, filled up with places that hold no node."""
    width = max(map(len, rows))
    filled = [[*row, *[(0, GAP)] * (width - len(row))] for row in rows]
    tokens = torch.tensor([[token for token, _ in row] for row in filled], dtype=torch.long).view(len(rows), width)
    parents = torch.tensor([[parent for _, parent in row] for row in filled], dtype=torch.long).view(len(rows), width)
    return Draft(tokens, parents, is_chain=chain)


@dataclass(frozen=True)
class AlwaysWrong:
    """Drafts nothing that will be accepted; `truth` and `shape` as in `Scripted`."""

    truth: Sequence[Sequence[int]]
    shape: str = "chain"
    num_assistant_tokens: int = 5

    def start(self, target: PreTrainedModel, request: Request) -> AlwaysWrongSession:
        return AlwaysWrongSession(self)


class AlwaysWrongSession:
    needs = Needs()

    def __init__(self, drafter: AlwaysWrong) -> None:
        self.drafter = drafter

    def propose(self, context: Context, limit: Limit) -> Draft:
        chain = limit.chain or self.drafter.shape == "chain"
        rows = []
        for truth, ids, depth in zip(self.drafter.truth, context.ids, limit.depth, strict=True):
            ahead = truth[len(ids) : len(ids) + depth]
            if chain:
                rows.append([(wrong(token), i) for i, token in enumerate(ahead)])
            else:  # the true tokens hang below wrong ones
                first = [(wrong(token, by), 0) for token in ahead[:1] for by in (1, 2, 3)]
                rows.append(first + [(token, 1 + i % 3) for i, token in enumerate(ahead[1:])])
        return as_draft(rows, chain)


# How deep drafters draft in tests that say nothing of it; see conftest.py.
DEPTH = 6


def run(model: PreTrainedModel, prompt: Prompt, mode: str = "greedy", **kwargs: Any) -> tuple[tuple[int, ...], ...]:
    """The texts of a call of `generate` in one of `MODES`; with `assistant=` under seed 7 where the mode samples."""
    arguments = {**prompt.inputs(), **MODES[mode](), **kwargs}
    if arguments.get("assistant") is not None and arguments["do_sample"]:
        arguments.setdefault("seed", 7)
    return texts(prompt, model.generate(**arguments))


def truth_of(model: PreTrainedModel, prompt: Prompt, mode: str, new: int) -> tuple[tuple[int, ...], ...]:
    """What plain decoding in this package's loop gives: the reference of the law."""
    return run(model, prompt, mode, assistant=sg.Plain(), max_new_tokens=new)


# A chi-square of 26 degrees of freedom is larger once in a million times.
FITS = 76.0
SEEN = 3
WARM: dict[str, Any] = {"do_sample": True, "temperature": 4.0, "top_k": 3}


def misfit(model: PreTrainedModel, assistant: Any, acceptance: str, rows: int = 12_000) -> float:
    """How far the first tokens after two of `ONE` are from the model's own distribution, as a chi-square over 27 texts.

    Args:
        model: an enabled target.
        assistant: drafts.
        acceptance: the rule.
        rows: samples, all in one batch.
    """
    prompt = ONE.rows[0][:2]
    exact: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(SEEN):
        prefixes = list(exact)
        with torch.no_grad():
            logits = model(torch.tensor([prompt + prefix for prefix in prefixes])).logits[:, -1]
        best = (logits / WARM["temperature"]).topk(WARM["top_k"])
        exact = {
            (*prefix, token): exact[prefix] * chance
            for prefix, tokens, chances in zip(
                prefixes, best.indices.tolist(), best.values.softmax(-1).tolist(), strict=True
            )
            for token, chance in zip(tokens, chances, strict=True)
        }
    inputs = {"input_ids": torch.tensor([prompt] * rows), "attention_mask": torch.ones((rows, 2), dtype=torch.long)}
    # Two tokens more than are looked at, so that the last of those can be drafted too, and more than one in a round.
    kwargs = {"assistant": assistant, "acceptance": acceptance, "seed": 1, "max_new_tokens": SEEN + 2}
    ids = model.generate(**inputs, **WARM, **kwargs)[:, len(prompt) : len(prompt) + SEEN]
    counted = Counter(map(tuple, ids.tolist()))
    assert counted.keys() <= exact.keys()
    return sum((counted[text] - rows * chance) ** 2 / (rows * chance) for text, chance in exact.items())


def in_two_threads(work: Callable[[int], None]) -> None:
    """Runs `work(0)` and `work(1)` at once, changing between them as often as Python can."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(2) as pool:
            list(pool.map(work, range(2)))
    finally:
        sys.setswitchinterval(interval)
