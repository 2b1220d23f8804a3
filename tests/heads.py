"""Heads for tiny targets: fitted to given texts, so that what they draft is partly right, as a trained head's is."""

from __future__ import annotations

import functools
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import tiny
import torch
from tiny import ONE, WARM, wrong
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

import hf_specgen as sg
from hf_specgen.draft import Context, Draft, Limit, Request
from hf_specgen.heads.eagle import EagleConfig, EagleHead
from hf_specgen.heads.medusa import MedusaConfig, MedusaHeads

Text = Sequence[int]
# The ids that a head with a vocabulary of its own can say: all but every fifth.
SAID = 5


@torch.no_grad()
def states_of(model: PreTrainedModel, text: Text, layers: Sequence[int]) -> Tensor:
    """`(length, size)` of a text, layers side by side."""
    hidden = model(torch.tensor([text]), output_hidden_states=True, use_cache=False).hidden_states
    return torch.cat([hidden[layer][0] for layer in layers], dim=-1)


def medusa_of(model: PreTrainedModel, texts: Sequence[Text], num_heads: int = 4, steps: int = 0) -> MedusaHeads:
    """Heads of a linear map each, by least squares, with every sixth token wrong; blocks hand on what they get.

    Args:
        model: the target.
        texts: to be fitted to.
        num_heads: heads.
        steps: of training instead, for heads whose probabilities mean something.
    """
    config = model.config
    heads = MedusaHeads(MedusaConfig(hidden_size=config.hidden_size, vocab_size=config.vocab_size, num_heads=num_heads))
    heads.to(model.dtype)
    states = [states_of(model, text, (-1,)) for text in texts]
    for parameter in heads.blocks.parameters():
        nn.init.zeros_(parameter)
    for ahead, lm_head in enumerate(heads.lm_heads, 2):
        seen = torch.cat([state[:-ahead] for state in states])
        spoiled = [[wrong(t) if place % 6 == 5 and not steps else t for place, t in enumerate(text)] for text in texts]
        follows = torch.cat([torch.tensor(text[ahead:]) for text in spoiled])
        wanted = nn.functional.one_hot(follows, config.vocab_size).to(seen.dtype)
        with torch.no_grad():
            lm_head.weight.copy_(8 * torch.linalg.lstsq(seen, wanted).solution.T)
        optimizer = torch.optim.Adam(lm_head.parameters(), lr=0.3)
        for _ in range(steps):
            loss = cross_entropy(lm_head(seen), follows, label_smoothing=0.01)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return heads.requires_grad_(False).eval()


def eagle_of(model: PreTrainedModel, texts: Sequence[Text], method: str = "eagle", steps: int = 30) -> EagleHead:
    """A head trained on a few texts for a moment; that of "eagle3" has a draft vocabulary."""
    config, fused = model.config, method == "eagle3"
    said = torch.tensor([token for token in range(config.vocab_size) if token % SAID])
    with torch.random.fork_rng():
        torch.manual_seed(0)
        head = EagleHead(
            EagleConfig(
                method=method,
                hidden_size=config.hidden_size,
                intermediate_size=config.intermediate_size,
                num_attention_heads=config.num_attention_heads,
                num_key_value_heads=config.num_key_value_heads,
                vocab_size=config.vocab_size,
                draft_vocab_size=len(said) if fused else None,
                feature_layers=[0, 1, -1] if fused else None,
                own_lm_head=fused,
            )
        ).to(model.dtype)
        for name, parameter in head.named_parameters():
            nn.init.ones_(parameter) if "norm" in name else nn.init.normal_(parameter, std=0.1)
        if fused:
            head.d2t.copy_(said - torch.arange(len(said)))
    lm_head: Any = head.lm_head if fused else model.get_output_embeddings()
    weight = lm_head.weight if fused else lm_head.weight.detach()
    place = {int(token): i for i, token in enumerate(said)} if fused else {i: i for i in range(config.vocab_size)}
    rows = []
    for length in {len(text) for text in texts}:
        alike = [text for text in texts if len(text) == length]
        read = head.config.layers_of(config.num_hidden_layers)
        states = torch.stack([states_of(model, text, read)[:-2] for text in alike])
        follows = torch.tensor([[place.get(token, -100) for token in text[2:]] for text in alike])
        rows.append(
            (model.get_input_embeddings()(torch.tensor([text[1:-1] for text in alike])).detach(), states, follows)
        )
    optimizer = torch.optim.Adam(head.parameters(), lr=0.02)
    for _ in range(steps):
        loss = torch.zeros((), dtype=model.dtype)
        for embeds, states, follows in rows:
            features = head.fuse(states)
            for ahead in range(2):  # once from the target's states, once from the head's own
                output = head(embeds[:, ahead:], features)
                logits = (output.hidden @ weight.T).flatten(0, 1)
                loss = loss + cross_entropy(logits, follows[:, ahead:].flatten(), ignore_index=-100)
                features = output.features[:, :-1]
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return head.requires_grad_(False).eval()


WORDS = ((1, 2, 3, 4, 5), (6, 7, 8, 9), (10, 3, 11, 7, 12, 13), (14, 2, 15, 16, 17))


def babble(count: int, length: int, seed: int) -> Tensor:
    """Texts of words, mostly one after the other."""
    chance = random.Random(seed)
    rows = []
    for _ in range(count):
        row: list[int] = []
        word = chance.randrange(len(WORDS))
        while len(row) < length:
            row += WORDS[word]
            word = (word + 1) % len(WORDS) if chance.random() < 0.8 else chance.randrange(len(WORDS))
        rows.append(row[:length])
    return torch.tensor(rows)


@functools.cache
def speaker() -> Any:
    """A small Llama that has learned the language of `babble`."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        config = LlamaConfig(**tiny._sizes(vocab_size=20, hidden_size=48, num_attention_heads=4, num_key_value_heads=4))
        model = LlamaForCausalLM(config)
        optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
        for step in range(200):
            texts = babble(16, 32, step)
            loss = cross_entropy(model(texts).logits[:, :-1].flatten(0, 1), texts[:, 1:].flatten())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return sg.enable(model.eval())


def warm_of(model: PreTrainedModel, method: str) -> Any:
    """A drafter that knows the distribution which `tiny.misfit` looks at about as well as a trained head would."""
    prompt = torch.tensor([ONE.rows[0][:2]] * 64)
    ids = model.generate(prompt, **WARM, seed=5, assistant=sg.Plain(), max_new_tokens=8).tolist()
    if method == "medusa":
        return sg.Medusa(medusa_of(model, ids, steps=60))
    return sg.Eagle(eagle_of(model, ids, method, steps=60))


@dataclass(frozen=True)
class Misquoting:
    """Drafts as another drafter does, and says that it drew from other probabilities than it did: the cubes of those.

    So neither flat nor peaked ones stay as they are.
    """

    drafter: Any
    num_assistant_tokens: int | None = None

    def start(self, target: PreTrainedModel, request: Request) -> Any:
        session = self.drafter.start(target, request)
        propose = session.propose

        def misquoted(context: Context, limit: Limit) -> Draft:
            draft = propose(context, limit)
            if draft.probs is None:
                return draft
            cubes = draft.probs**3 + 1e-9
            return replace(draft, probs=cubes / cubes.sum(-1, keepdim=True))

        session.propose = misquoted
        return session


# For tests of trainings: ids of a batch, and rows of (length, first label, behind the last label).
VOCAB = 20
BATCH = ((14, 5, 14), (9, 3, 7), (11, 1, 3))


def batch_of(*rows: tuple[int, int, int], seed: int = 0) -> dict[str, Tensor]:
    """Rows of (length, first label, behind the last label), padded on the right."""
    generator = torch.Generator().manual_seed(seed)
    longest = max(length for length, _, _ in rows)
    ids = torch.zeros(len(rows), longest, dtype=torch.long)
    mask, labels = torch.zeros_like(ids), torch.full_like(ids, -100)
    for row, (length, start, end) in enumerate(rows):
        ids[row, :length] = torch.randint(1, VOCAB, (length,), generator=generator)
        mask[row, :length] = 1
        labels[row, start:end] = ids[row, start:end]
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}
