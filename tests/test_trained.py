"""Trained heads of every kind alike: what they draw from, and how they fare where costs decide."""

from __future__ import annotations

import functools
from typing import Any

import heads
import pytest
import tiny
import torch
from heads import babble, speaker
from torch.nn.functional import cross_entropy
from transformers import PreTrainedModel

import hf_specgen as sg

METHODS = ["medusa", "eagle", "eagle3"]


@functools.cache
def target() -> PreTrainedModel:
    return sg.enable(tiny.llama())


@functools.cache
def drafter(method: str) -> Any:
    return heads.warm_of(target(), method)


@pytest.mark.parametrize("rule", ["rejection", "block"])
@pytest.mark.parametrize("method", METHODS)
def test_the_first_tokens_have_the_distribution_of_the_target(rule, method):
    """Report 43."""
    assert tiny.misfit(target(), drafter(method), rule, rows=4000) < tiny.FITS


@pytest.mark.parametrize("rule", ["rejection", "block"])
@pytest.mark.parametrize("method", METHODS)
def test_another_q_than_was_drawn_from_would_show(rule, method):
    assert tiny.misfit(target(), heads.Misquoting(drafter(method)), rule, rows=4000) > tiny.FITS


@pytest.mark.parametrize("rule", ["rejection", "block"])
@pytest.mark.parametrize("kind", ["head", "model"])
def test_a_drafter_that_can_say_nothing_that_is_allowed_biases_nothing(rule, kind):
    # 0 is what is drafted where nothing can be drawn.
    allowed = [0, 7, 9] if kind == "head" else [91, 93, 95]
    head = sg.EagleHead.fresh(target(), feature_layers=[0, 1, -1], token_map=[1, 2, 3, 5]).eval()
    drafter = sg.Eagle(head) if kind == "head" else sg.DraftModel(tiny.llama(vocab_size=90))
    suppressed = [token for token in range(tiny.VOCAB) if token not in allowed]
    ids = torch.tensor([tiny.ONE.rows[0]] * 600)
    kwargs = {"do_sample": True, "temperature": 60.0, "suppress_tokens": suppressed, "seed": 11, "max_new_tokens": 3}
    drawn = target().generate(ids, assistant=drafter, acceptance=rule, **kwargs)[:, -3:]
    for place in drawn.T.tolist():
        # At such a temperature all three are nearly alike: 200 each, and a count has a deviation of 12.
        assert min(place.count(token) for token in allowed) > 140
        assert sum(place.count(token) for token in allowed) == 600


def trained(method: str, steps: int = 150) -> sg.EagleHead:
    """A head that learned the language of `babble`, two steps deep into its own guesses (training-time test)."""
    model = speaker()
    token_map = None if method == "eagle" else list(range(1, 18))  # all ids that are ever said
    head = sg.EagleHead.fresh(
        model, method, feature_layers=None if method == "eagle" else [0, 1, -1], token_map=token_map
    )
    optimizer = torch.optim.Adam(head.parameters(), lr=5e-3)
    for step in range(steps):
        texts = babble(16, 32, 1000 + step)
        with torch.no_grad():
            hidden = model(texts, output_hidden_states=True).hidden_states
            states = torch.cat([hidden[layer] for layer in head.config.layers_of(2)], dim=-1)
            embeds = model.get_input_embeddings()(texts[:, 1:-1])
        features, loss = head.fuse(states[:, :-2]), torch.zeros(())
        lm_head = model.lm_head if token_map is None else head.lm_head
        for ahead in range(2):
            output = head(embeds[:, ahead:], features)
            follows = texts[:, 2 + ahead :] - (0 if token_map is None else 1)
            loss = loss + cross_entropy(lm_head(output.hidden).flatten(0, 1), follows.flatten())
            features = output.features[:, :-1]
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return head.eval()


@pytest.mark.parametrize("method", ["eagle", "eagle3"])
def test_a_head_trained_for_seconds_reaches_two_tokens_a_round(method):
    with torch.random.fork_rng():
        torch.manual_seed(1)
        head = trained(method)
    prompts = babble(2, 10, 5)
    kwargs = {"max_new_tokens": 64, "do_sample": False, "return_dict_in_generate": True, "num_assistant_tokens": 4}
    plain = speaker().generate(prompts, assistant=sg.Plain(), **kwargs)
    for top_k in (1, 4):
        output = speaker().generate(prompts, assistant=sg.Eagle(head, top_k=top_k), **kwargs)
        assert torch.equal(output.sequences, plain.sequences)
        assert output.speculation.mean_accepted_tokens >= 2.0
