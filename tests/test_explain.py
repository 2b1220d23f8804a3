"""Texts that part at a near-tie are told from texts that part for another reason."""

import families
import pytest
import tiny
import torch
from transformers import LlamaForCausalLM, LogitsProcessor

import hf_specgen as sg
from hf_specgen import explain

ONE, RAGGED = tiny.ONE, tiny.RAGGED
GREEDY = {"do_sample": False, "max_new_tokens": 20}
REPORT = "not a near-tie: this is a bug or another setting, please report"


def planted(text, row, column, token=None):
    """The text with another token at one place."""
    other = text.clone()
    other[row, column] = tiny.wrong(int(text[row, column])) if token is None else token
    return other


def test_equal_texts(model):
    text = model.generate(**RAGGED.inputs(), **GREEDY)
    found = sg.explain_difference(model, text, text.tolist(), **RAGGED.inputs(), **GREEDY)
    assert (found.verdict, found.near_tie, found.rows, str(found)) == ("same text", None, 3, "same text")


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_a_wrong_token_is_no_near_tie_and_is_shown_where_it_stands(model, dtype):
    model = model.to(dtype)
    text = model.generate(**RAGGED.inputs(), **GREEDY)
    other = planted(planted(text, 1, RAGGED.columns + 9), 2, RAGGED.columns)
    found = sg.explain_difference(model, text, other, **RAGGED.inputs(), **GREEDY)
    assert found.verdict == REPORT
    assert [(one.row, one.column) for one in found.differences] == [(1, RAGGED.columns + 9), (2, RAGGED.columns)]
    for one in found.differences:
        first, second = int(text[one.row, one.column]), int(other[one.row, one.column])
        assert one.tokens == (first, second)
        assert one.best[0] == first
        assert one.scores[0] - one.scores[1] == pytest.approx(one.shortfall)
        assert one.near_tie is False
        assert f"row {one.row} differs from column {one.column} on: {first} in the first, {second} in" in str(found)
    assert found.probe.ok


def tied(model, text, row, column):
    """The model with a twin of the token that a text has at a place: every one of its logits is the twin's, too."""
    token = int(text[row, column])
    twin = next(i for i in range(3, tiny.VOCAB) if i not in text)
    with torch.no_grad():
        model.lm_head.weight[twin] = model.lm_head.weight[token]
    return twin


def test_an_exact_tie_is_a_near_tie(model):
    text = model.generate(**ONE.inputs(), **GREEDY)
    twin = tied(model, text, 0, 20)
    found = sg.explain_difference(model, text, planted(text, 0, 20, twin), **ONE.inputs(), **GREEDY)
    assert found.verdict == "near-tie"
    (one,) = found.differences
    assert sorted(one.best) == sorted(one.tokens)
    assert one.gap == one.shortfall == 0
    # One step beyond what rounding makes there it is none any more.
    with torch.no_grad():
        model.lm_head.weight[twin] *= 1 - 1e-4
    found = sg.explain_difference(model, text, planted(text, 0, 20, twin), **ONE.inputs(), **GREEDY)
    assert found.verdict == REPORT
    assert found.differences[0].rounding < found.differences[0].shortfall / explain.FACTOR < 1e-3


@pytest.mark.parametrize("float32", [False, True])
def test_first_differences_of_half_precision_are_near_ties(float32):
    model = sg.enable(tiny.llama().to(torch.bfloat16))
    small, found = tiny.sibling(model), []
    for seed in range(0, 18, 6):
        prompt = tiny.Prompt.random(*((9 + row, seed + row) for row in range(6)))
        kwargs = {**prompt.inputs(), "do_sample": False, "max_new_tokens": 40}
        plain, assisted = model.generate(**kwargs), model.generate(**kwargs, assistant=small)
        told = sg.explain_difference(model, plain, assisted, float32=float32, **kwargs)
        assert told.near_tie is (True if told.differences else None)
        assert told.remarks == ()
        found += told.differences
    assert len(found) > 3
    assert {one.scored_in for one in found} == {"float32" if float32 else "bfloat16"}
    assert all(one.shortfall > 0 or not float32 for one in found)


def test_the_settings_of_the_call_are_part_of_the_scores(model):
    kwargs = {**RAGGED.inputs(), **GREEDY, "repetition_penalty": 1.6, "no_repeat_ngram_size": 2}
    plain, text = model.generate(**RAGGED.inputs(), **GREEDY), model.generate(**kwargs)
    other = planted(text, 1, RAGGED.columns + 12)
    assert [one.best[0] for one in sg.explain_difference(model, text, other, **kwargs).differences] == [
        int(text[1, RAGGED.columns + 12])
    ]
    # Explained as if both were of one setting, a text of another one falls short.
    found = sg.explain_difference(model, plain, text, **kwargs)
    assert found.verdict == REPORT
    assert all(one.best[0] == one.tokens[1] for one in found.differences)


class Counting(LogitsProcessor):
    """A processor with a memory: every call is pushed another way."""

    def __init__(self):
        self.calls = 0

    def __call__(self, input_ids, scores):
        self.calls += 1
        noise = torch.randn(scores.shape, generator=torch.Generator().manual_seed(self.calls))
        return scores + 4 * noise


def test_a_processor_that_remembers_is_shown_the_text_again(model):
    text = model.generate(**ONE.inputs(), **GREEDY, logits_processor=[Counting()])
    mine = Counting()
    for column in (14, 15, 27):
        kwargs = {**ONE.inputs(), **GREEDY, "logits_processor": [mine]}
        (one,) = sg.explain_difference(model, text, planted(text, 0, column), **kwargs).differences
        assert one.best[0] == one.tokens[0]
    assert mine.calls == 0


SAMPLED = {"do_sample": True, "max_new_tokens": 20, "temperature": 1.3, "top_k": 30}


def test_a_sampled_text_is_scored_with_the_noise_of_its_seed(model):
    sg.enable(model)
    kwargs = {**RAGGED.inputs(), **SAMPLED, "seed": [5, 6, 7]}
    text = model.generate(**kwargs, assistant=sg.Plain())
    other = model.generate(**{**kwargs, "seed": [5, 8, 9]}, assistant=sg.Plain())
    found = sg.explain_difference(model, text, other, **kwargs)
    assert [one.row for one in found.differences] == [1, 2]
    assert all(one.best[0] == one.tokens[0] for one in found.differences)
    assert found.verdict == REPORT


@pytest.mark.parametrize(
    ("said", "reason"),
    [
        ({}, "sampled without a seed: two texts are two draws"),
        ({"seed": 3, "acceptance": "rejection"}, "keeps the distribution and not the text"),
        ({"seed": 3, "acceptance": sg.BlockRejection()}, "keeps the distribution and not the text"),
    ],
)
def test_draws_that_need_not_agree_are_told_as_such(model, said, reason):
    text = model.generate(**ONE.inputs(), **GREEDY)
    found = sg.explain_difference(model, text, planted(text, 0, 20), **ONE.inputs(), **SAMPLED, **said)
    assert (found.verdict, found.near_tie) == ("nothing can be told from the scores", None)
    assert reason in str(found)
    assert found.differences[0].column == 20


def test_texts_of_unequal_length(model):
    text = model.generate(**RAGGED.inputs(), **GREEDY)
    longer = sg.explain_difference(model, text, text[:, :-3], **RAGGED.inputs(), **GREEDY)
    assert longer.verdict == "same text, but for where it ends"
    assert longer.longer == {0: 3, 1: 3, 2: 3}
    assert "row 2: one text goes on for 3 tokens" in str(longer)
    rows = [row[:25] if b else [*row[:25], 1] for b, row in enumerate(text.tolist())]
    parted = sg.explain_difference(model, rows, text, **RAGGED.inputs(), **GREEDY)
    assert [one.row for one in parted.differences] == [0]
    assert sorted(parted.longer) == [1, 2]


def test_rows_may_come_as_lists_without_padding_and_without_the_prompt_s_inputs(model):
    text = model.generate(**RAGGED.inputs(), **GREEDY)
    rows = [row[pad:] for pad, row in zip((23, 0, 21), text.tolist(), strict=True)]
    other = [list(row) for row in rows]
    other[2][-4] = tiny.wrong(other[2][-4])
    (one,) = sg.explain_difference(model, rows, other, do_sample=False).differences
    assert (one.row, one.column, one.near_tie) == (2, len(rows[2]) - 4, False)
    (alone,) = sg.explain_difference(model, rows[2], torch.tensor(other[2]), do_sample=False).differences
    assert (alone.row, alone.column, alone.scores) == (0, one.column, one.scores)


def test_texts_that_cannot_be_compared(model):
    text = model.generate(**ONE.inputs(), **GREEDY)
    with pytest.raises(ValueError, match="the first text has 1 rows and the second 3"):
        sg.explain_difference(model, text, text.expand(3, -1))
    with pytest.raises(ValueError, match="texts of row 0 have no common prompt: they differ at token 5"):
        sg.explain_difference(model, text, planted(text, 0, 5), **ONE.inputs())
    with pytest.raises(ValueError, match="texts of row 0 have no common prompt: they differ at token 0"):
        sg.explain_difference(model, text, planted(text, 0, 0))


def test_the_model_is_only_read():
    model = tiny.llama().to(torch.bfloat16).train()
    text = sg.disable(model).eval().generate(**ONE.inputs(), **GREEDY)
    model.train()
    before, held = {key: value.clone() for key, value in model.state_dict().items()}, set(vars(model))
    state = torch.get_rng_state()
    found = sg.explain_difference(model, text, planted(text, 0, 20), float32=True, **ONE.inputs(), **GREEDY)
    assert found.differences[0].scored_in == "float32"
    assert "the model is in training mode" in str(found)
    after = model.state_dict()
    assert all(after[key].dtype == value.dtype and torch.equal(after[key], value) for key, value in before.items())
    assert (model.dtype, model.training, set(vars(model))) == (torch.bfloat16, True, held)
    assert torch.equal(torch.get_rng_state(), state)


def test_a_float32_copy_that_does_not_fit_is_not_made(monkeypatch):
    model = tiny.llama().to(torch.bfloat16)
    text = model.generate(**ONE.inputs(), **GREEDY)
    monkeypatch.setattr(explain, "_room", lambda device: 1000)
    found = sg.explain_difference(model, text, planted(text, 0, 20), float32=True, **ONE.inputs(), **GREEDY)
    assert found.differences[0].scored_in == "bfloat16"
    assert found.remarks[0].startswith("no float32 copy: it takes ")
    monkeypatch.undo()
    assert 0 < explain._room(torch.device("cpu")) < 2**50


def test_a_model_whose_own_passes_differ_is_named_as_the_reason():
    model = families.build("jamba")
    prompt = tiny.Prompt.random((20, 4))
    text = model.generate(**prompt.inputs(), **GREEDY)
    found = sg.explain_difference(model, text, planted(text, 0, 30), **prompt.inputs(), **GREEDY)
    assert found.verdict == "this model's own multi-token cached forward differs from token-by-token decoding"


@pytest.mark.parametrize("name", ["t5", "bart", "llava"])
def test_models_that_need_more_than_ids_are_given_it(name):
    model = families.build(name)
    inputs = families.inputs(name, ONE)
    text = model.generate(**inputs, **GREEDY)
    column = text.shape[1] - 8
    found = sg.explain_difference(model, text, planted(text, 0, column), **inputs, **GREEDY)
    (one,) = found.differences
    assert (one.column, one.best[0], one.near_tie) == (column, int(text[0, column]), False)
    assert one.rounding < 1e-4


def test_inputs_that_cannot_be_divided_into_rows_are_named():
    model = families.build("llava")
    text = torch.tensor([[5, 6, 7], [5, 6, 7]])
    with pytest.raises(ValueError, match="pixel_values cannot be divided into 2 rows: explain one row at a time"):
        sg.explain_difference(model, text, planted(text, 1, 2), pixel_values=torch.zeros((3, 3, 8, 8)), do_sample=False)


class Shifting(LlamaForCausalLM):
    """A fault as another setting makes it: whatever is cached turns the logits a little."""

    def forward(self, *args, cache=None, **kwargs):
        out = super().forward(*args, cache=cache, **kwargs)
        if cache is not None and cache.get_seq_length() > out.logits.shape[1]:
            out.logits[..., 0] += 40
        return out


def test_passes_that_differ_by_much_are_no_rounding(model):
    broken = Shifting(model.config).double()
    broken.load_state_dict(model.state_dict())
    text = model.generate(**ONE.inputs(), **GREEDY)
    found = sg.explain_difference(broken.eval(), text, planted(text, 0, 25, 0), **ONE.inputs(), **GREEDY)
    assert found.verdict.endswith("both differ from a pass without a cache")


def test_tokens_are_shown_by_the_tokenizer(model):
    from generating import tokenizer

    text = model.generate(**ONE.inputs(), **GREEDY)
    known = tokenizer()
    found = sg.explain_difference(model, text, planted(text, 0, 20), tokenizer=known, **ONE.inputs(), **GREEDY)
    first = int(text[0, 20])
    assert f"{first} {known.decode([first])!r} in the first" in str(found)
