"""Where generation ends, and what a streamer has seen by then: exactly as in stock, wherever in a block it falls."""

import asyncio
import time
from dataclasses import dataclass, field
from functools import partial
from threading import Thread

import pytest
import tiny
import torch
from generating import (
    BATCHES,
    DRAFTERS,
    EOS,
    SHAPES,
    Recorded,
    counted,
    drafter,
    said,
    same_as_stock,
    tokenizer,
    whole,
)
from transformers import AsyncTextIteratorStreamer, StoppingCriteria, TextIteratorStreamer, TextStreamer

import hf_specgen as sg

ONE, RAGGED = tiny.ONE, tiny.RAGGED


def faultless(prompt, rows, shape="chain", depth=5):
    """A draft of the coming text without a fault: every stop falls inside of a block."""
    return tiny.Scripted(whole(prompt, rows), shape, spoiled=0, num_assistant_tokens=depth)


@SHAPES
@BATCHES
def test_eos_at_every_place_of_a_block(model, prompt, shape):
    rows = said(model, prompt)
    for place in range(12):
        kwargs = {**prompt.inputs(), "max_new_tokens": 15, "eos_token_id": rows[-1][place]}
        same_as_stock(model, faultless(prompt, rows, shape), **kwargs)


@DRAFTERS
@BATCHES
@pytest.mark.parametrize("eos", ["one", "list", "none"])
def test_eos_of_every_kind(model, prompt, kind, eos):
    """Report 26 where there is none, report 112 where rows end at different times."""
    rows = said(model, prompt)
    ids = {"one": rows[0][7], "list": [EOS, *[row[5 + 4 * i] for i, row in enumerate(rows)]], "none": None}[eos]
    script = drafter(kind, model, whole(prompt, rows))
    answer = same_as_stock(model, script, **prompt.inputs(), max_new_tokens=20, eos_token_id=ids)
    early = answer.shape[1] < prompt.columns + 20
    assert early == (eos != "none" and not (eos == "one" and prompt is RAGGED))


class Ending:
    """The second token of each draft is the end, which the target never says."""

    num_assistant_tokens = 4
    needs = sg.Needs()

    def __init__(self, truth):
        self.truth = truth

    def start(self, target, request):
        return self

    def propose(self, context, limit):
        chains = []
        for row, ids, depth in zip(self.truth, context.ids, limit.depth, strict=True):
            chain = row[len(ids) : len(ids) + depth]
            chains.append([*chain[:1], EOS, *chain[2:]][:depth])
        return sg.Draft.ragged(chains)


@BATCHES
def test_an_eos_that_only_the_drafter_says_is_a_guess_like_any_other(model, prompt):
    """Report 32."""
    rows, stats = said(model, prompt), sg.Stats()
    assert all(EOS not in row for row in rows)
    kwargs = {**prompt.inputs(), "do_sample": False, "max_new_tokens": 24, "eos_token_id": EOS, "stats": stats}
    answer = sg.enable(model).generate(**kwargs, assistant=Ending(whole(prompt, rows)))
    assert answer[:, prompt.columns :].tolist() == rows
    # One drafted token and one of the target's own a round, but where the last token leaves no room for a draft.
    assert stats.rounds == 12
    assert stats.accepted == 11 * prompt.batch


@pytest.mark.parametrize("kind", ["lookup", "model"])
def test_an_eos_in_the_prompt_is_copied_without_harm(model, kind):
    """Report 25."""
    (ids,) = ONE.rows
    prompt = tiny.Prompt(((*ids, EOS, *ids[:8]),))
    script = drafter(kind, model, [])
    same_as_stock(model, script, **prompt.inputs(), max_new_tokens=10, eos_token_id=EOS)


@DRAFTERS
@BATCHES
@pytest.mark.parametrize("count", [1, 2, 7])
def test_max_new_tokens_is_never_overshot(model, prompt, kind, count):
    script = drafter(kind, model, whole(prompt, said(model, prompt)))
    answer = same_as_stock(model, script, **prompt.inputs(), max_new_tokens=count)
    assert answer.shape[1] == prompt.columns + count


@pytest.mark.parametrize("more", [1, 2, 6])
@pytest.mark.parametrize("kind", ["plain", "tree"])
def test_max_length_is_never_overshot(model, kind, more):
    script = drafter(kind, model, whole(RAGGED, said(model, RAGGED)))
    answer = same_as_stock(model, script, **RAGGED.inputs(), max_length=RAGGED.columns + more)
    assert answer.shape[1] == RAGGED.columns + more


@dataclass
class Asked:
    """Passes on to another drafter, and keeps how deep it was to draft behind which tokens."""

    drafter: object
    num_assistant_tokens: int = 5
    questions: list = field(default_factory=list)

    def start(self, target, request):
        self.session = self.drafter.start(target, request)
        self.needs = self.session.needs
        return self

    def propose(self, context, limit):
        self.questions.append((limit.depth, [list(ids) for ids in context.ids]))
        return self.session.propose(context, limit)


@BATCHES
def test_no_more_is_asked_for_than_can_be_used(model, prompt):
    """Report 35: one token of what is left is always the target's own; nothing is asked for a row that has ended."""
    rows = said(model, prompt)
    asked = Asked(tiny.Scripted(whole(prompt, rows), spoiled=0.5))
    kwargs = {**prompt.inputs(), "max_new_tokens": 9, "eos_token_id": rows[0][6], "do_sample": False}
    with counted(model) as widths:
        sg.enable(model).generate(**kwargs, assistant=asked)
    assert max(widths[1:]) <= 6
    depths = []
    for depth, texts in asked.questions:
        for row, ids in enumerate(texts):
            new = ids[len(prompt.rows[row]) :]
            assert depth[row] == (0 if rows[0][6] in new else min(5, 9 - len(new) - 1))
            depths.append(depth[row])
    assert {5, 0 if prompt is RAGGED else 5} < set(depths)


@pytest.mark.parametrize(("stop", "limit"), [(2, 4), (4, 2), (3, 3)], ids=["stop first", "limit first", "together"])
@SHAPES
def test_the_earlier_of_stop_and_limit_wins(model, stop, limit, shape):
    """Report 29: a block that holds both."""
    rows = said(model, ONE)
    script = faultless(ONE, rows, shape, depth=8)
    kwargs = {**ONE.inputs(), "max_new_tokens": limit + 1, "eos_token_id": rows[0][stop]}
    assert same_as_stock(model, script, **kwargs).shape[1] == ONE.columns + 1 + min(stop, limit)


def stop_string(row, place, cut):
    """A string that a row's text holds first at `place`, where it ends `cut` letters into the token."""
    words = tokenizer().convert_ids_to_tokens(row)
    return words[place - 1] + words[place][:cut]


@BATCHES
@pytest.mark.parametrize("cut", [1, 2, 3])
@pytest.mark.parametrize("eos", [EOS, None])
def test_stop_strings_inside_of_a_token_and_at_every_place_of_a_block(model, prompt, cut, eos):
    """Reports 28 and 34. Without an EOS stock goes on with a row that met its stop until all rows have met theirs."""
    rows, ended = said(model, prompt), []
    for place in range(3, 9):
        stops = [stop_string(row, place + 2 * i, cut) for i, row in enumerate(rows)]
        kwargs = {**prompt.inputs(), "max_new_tokens": 20, "eos_token_id": eos}
        kwargs |= {"stop_strings": stops, "tokenizer": tokenizer()}
        ended.append(same_as_stock(model, faultless(prompt, rows, "tree"), **kwargs).shape[1] - prompt.columns)
    assert ended == [place + 2 * (prompt.batch - 1) + 1 for place in range(3, 9)]


@pytest.mark.parametrize("kind", ["plain", "model", "lookup"])
@BATCHES
def test_stop_strings_with_every_drafter(model, prompt, kind):
    """Report 28: the drafter needs no tokenizer."""
    rows = said(model, prompt)
    kwargs = {**prompt.inputs(), "max_new_tokens": 20, "eos_token_id": EOS, "tokenizer": tokenizer()}
    kwargs["stop_strings"] = stop_string(rows[-1], 6, 2)
    same_as_stock(model, drafter(kind, model, whole(prompt, rows)), **kwargs)


@pytest.mark.parametrize("home", ["the model's config", "the call's config"])
def test_stop_strings_of_a_generation_config_count_too(model, home):
    rows, kwargs = said(model, ONE), {**ONE.inputs(), "tokenizer": tokenizer()}
    model.generation_config.max_new_tokens = 20
    config = model.generation_config
    if home == "the call's config":
        config = kwargs["generation_config"] = type(config)(**config.to_dict())
    config.stop_strings = [stop_string(rows[0], 5, 1)]
    expected = model.generate(**kwargs)
    assert expected.shape[1] == ONE.columns + 6
    assert torch.equal(sg.enable(model).generate(**kwargs, assistant=faultless(ONE, rows)), expected)


class StopAfter(StoppingCriteria):
    """Ends a row once it holds one of some tokens behind the prompt."""

    def __init__(self, columns, tokens):
        self.columns = columns
        self.tokens = torch.tensor(tokens)

    def __call__(self, ids, scores, **kwargs):
        return torch.isin(ids[:, self.columns :], self.tokens).any(1)


@DRAFTERS
@BATCHES
@pytest.mark.parametrize("eos", [EOS, None])
def test_custom_criteria_are_heard_inside_of_a_block(model, prompt, kind, eos):
    rows = said(model, prompt)
    criteria = [StopAfter(prompt.columns, [row[4 + 3 * i] for i, row in enumerate(rows)])]
    kwargs = {**prompt.inputs(), "max_new_tokens": 24, "eos_token_id": eos, "stopping_criteria": criteria}
    answer = same_as_stock(model, drafter(kind, model, whole(prompt, rows)), **kwargs)
    assert answer.shape[1] < prompt.columns + 24


@BATCHES
def test_a_criterion_that_reads_the_scores_gets_all_of_them(model, prompt):
    class Fifth(StoppingCriteria):
        """Ends everything at the fifth token, by the number of scores."""

        def __call__(self, ids, scores, **kwargs):
            assert all(score.shape == (len(ids), tiny.VOCAB) for score in scores)
            return torch.full((len(ids),), len(scores) == 5)

    kwargs = {**prompt.inputs(), "max_new_tokens": 24, "do_sample": False, "stopping_criteria": [Fifth()]}
    kwargs |= {"return_dict_in_generate": True, "output_scores": True}
    rows = said(model, prompt)
    answer = sg.enable(model).generate(**kwargs, assistant=faultless(prompt, rows)).sequences
    assert answer[:, prompt.columns :].tolist() == [row[:5] for row in rows]


@BATCHES
@pytest.mark.parametrize(("seconds", "count"), [(1e-9, 1), (3600, 9)], ids=["none", "enough"])
def test_time_that_is_up_ends_all_rows_and_other_time_none(model, prompt, seconds, count):
    script = drafter("chain", model, whole(prompt, said(model, prompt)))
    answer = same_as_stock(model, script, **prompt.inputs(), max_new_tokens=9, max_time=seconds)
    assert answer.shape[1] == prompt.columns + count


@pytest.mark.parametrize("processor", [{}, {"repetition_penalty": 1.01}], ids=["at once", "by step"])
def test_time_that_is_up_in_the_middle_ends_with_the_round(model, processor, monkeypatch):
    """A clock that ticks with every pass."""
    ticks = []
    model.register_forward_hook(lambda *_: ticks.append(None))
    monkeypatch.setattr(time, "time", lambda: float(len(ticks)))
    kwargs = {**RAGGED.inputs(), **processor, "max_new_tokens": 24, "do_sample": False}
    rows = model.generate(**kwargs)[:, RAGGED.columns :].tolist()
    ticks.clear()
    script = drafter("chain", model, whole(RAGGED, rows))
    answer = sg.enable(model).generate(**kwargs, max_time=3.5, assistant=script)[:, RAGGED.columns :]
    assert len(ticks) == 4
    assert 4 < answer.shape[1] < 24
    for row, longer in zip(answer.tolist(), rows, strict=True):
        # Padding has the id 0 here, which two of the rows do not say by themselves this early.
        shown = [token for token in row if token]
        assert shown == longer[: len(shown)]
        assert len(shown) >= 4


@DRAFTERS
@BATCHES
def test_rows_that_end_early_are_filled_up_with_padding(model, prompt, kind):
    """Report 112: the rows' own answers do not depend on their company."""
    rows = said(model, prompt)
    eos = [row[3 + 6 * i] for i, row in enumerate(rows)]
    kwargs = {"max_new_tokens": 20, "eos_token_id": eos, "pad_token_id": 95}
    together = same_as_stock(model, drafter(kind, model, whole(prompt, rows)), **prompt.inputs(), **kwargs)
    for row, answer in enumerate(together[:, prompt.columns :].tolist()):
        alone = prompt.alone(row)
        own = model.generate(**alone.inputs(), **kwargs, do_sample=False)[0, alone.columns :].tolist()
        assert answer == own + [95] * (len(answer) - len(own))


def streamed(model, script, **kwargs):
    """A streamer after the assisted call and one after stock, with both answers found equal."""
    mine, theirs = Recorded(), Recorded()
    expected = model.generate(**kwargs, do_sample=False, streamer=theirs)
    actual = sg.enable(model).generate(**kwargs, do_sample=False, streamer=mine, assistant=script)
    assert torch.equal(actual, expected)
    return mine, theirs


@DRAFTERS
@BATCHES
def test_a_streamer_sees_exactly_what_stock_shows_it(model, prompt, kind):
    """Reports 31, 65 and 67: the prompt once, then token by token, nothing behind a stop, `end` once."""
    rows = said(model, prompt)
    eos = [row[4 + 5 * i] for i, row in enumerate(rows)]
    kwargs = {**prompt.inputs(), "max_new_tokens": 20, "eos_token_id": eos}
    mine, theirs = streamed(model, drafter(kind, model, whole(prompt, rows)), **kwargs)
    assert mine.puts == theirs.puts
    assert mine.shapes == theirs.shapes
    assert mine.shapes[0] == (prompt.batch, prompt.columns)
    assert set(mine.shapes[1:]) == {(prompt.batch,)}
    assert mine.ends == 1


@BATCHES
@pytest.mark.parametrize("eos", [EOS, None])
def test_a_streamer_sees_what_stock_shows_it_under_a_stop_string(model, prompt, eos):
    rows = said(model, prompt)
    stops = [stop_string(row, 6 + 2 * i, 2) for i, row in enumerate(rows)]
    kwargs = {**prompt.inputs(), "max_new_tokens": 20, "eos_token_id": eos}
    kwargs |= {"stop_strings": stops, "tokenizer": tokenizer()}
    mine, theirs = streamed(model, faultless(prompt, rows, "tree"), **kwargs)
    assert mine.puts == theirs.puts
    assert mine.ends == 1


def test_a_streamer_is_fed_as_the_rounds_go(model):
    class Timed(Recorded):
        def put(self, value):
            super().put(value)
            passes.append(len(widths))

    passes, streamer = [], Timed()
    script = drafter("chain", model, whole(ONE, said(model, ONE)))
    with counted(model) as widths:
        kwargs = {**ONE.inputs(), "max_new_tokens": 24, "do_sample": False, "streamer": streamer}
        sg.enable(model).generate(**kwargs, assistant=script)
    # The prompt before any pass, then what each pass decided right after it.
    assert sorted(set(passes)) == list(range(len(widths) + 1))
    assert len(widths) < 24


def test_text_streamer_prints_what_it_prints_for_stock(model, capsys):
    rows, kwargs = said(model, ONE), {**ONE.inputs(), "max_new_tokens": 20, "do_sample": False}
    sg.enable(model)
    printed = []
    for script in (None, drafter("chain", model, whole(ONE, rows))):
        model.generate(**kwargs, streamer=TextStreamer(tokenizer(), skip_prompt=True), assistant=script)
        printed.append(capsys.readouterr().out)
    assert printed == [tokenizer().decode(rows[0][:20]) + "\n"] * 2


@pytest.mark.parametrize("door", ["enabled", "custom_generate"])
def test_text_iterator_streamer_in_a_thread(model, door):
    rows = said(model, ONE)
    streamer = TextIteratorStreamer(tokenizer(), skip_prompt=True, timeout=60)
    kwargs = {**ONE.inputs(), "max_new_tokens": 20, "do_sample": False}
    kwargs["assistant"] = drafter("chain", model, whole(ONE, rows))
    if door == "enabled":
        sg.enable(model)
        kwargs["streamer"] = streamer
    else:
        kwargs["custom_generate"] = partial(sg.speculate, streamer=streamer)
    thread = Thread(target=model.generate, kwargs=kwargs)
    thread.start()
    text = "".join(streamer)
    thread.join()
    assert text == tokenizer().decode(rows[0][:20])


def test_async_text_iterator_streamer(model):
    rows = said(model, ONE)

    async def read():
        streamer = AsyncTextIteratorStreamer(tokenizer(), skip_prompt=True, timeout=60)
        kwargs = {**ONE.inputs(), "max_new_tokens": 20, "do_sample": False, "streamer": streamer}
        kwargs["assistant"] = drafter("chain", model, whole(ONE, rows))
        thread = Thread(target=sg.enable(model).generate, kwargs=kwargs)
        thread.start()
        text = "".join([part async for part in streamer])
        thread.join()
        return text

    assert asyncio.run(read()) == tokenizer().decode(rows[0][:20])
