"""Logits processors: each that a generation config can build, and the user's own, see and do what they do in stock."""

import ast
import copy
import inspect
import textwrap

import pytest
import tiny
import torch
from generating import BATCHES, EOS, KINDS, SHAPES, drafter, said, same_as_stock, truth, whole
from transformers import (
    GenerationConfig,
    GenerationMixin,
    LogitsProcessor,
    LogitsProcessorList,
    StoppingCriteria,
    SynthIDTextWatermarkingConfig,
    WatermarkingConfig,
)
from transformers.generation import logits_process
from transformers.generation.logits_process import (
    InfNanRemoveLogitsProcessor,
    UnbatchedClassifierFreeGuidanceLogitsProcessor,
)

import hf_specgen as sg

ONE, RAGGED = tiny.ONE, tiny.RAGGED
GUESSERS = pytest.mark.parametrize("kind", ["chain", "tree", "model"])
SYNTH_ID = {"ngram_len": 3, "keys": [654, 400, 836, 123], "context_history_size": 16, "sampling_table_size": 256}


def first(rows, place):
    return [row[place] for row in rows]


# Class by class: arguments that make `generate` build it, from what is said without any.
ALWAYS = {
    "UnbatchedClassifierFreeGuidanceLogitsProcessor": lambda rows, columns: {"guidance_scale": 1.7},
    "SequenceBiasLogitsProcessor": lambda rows, columns: {
        "sequence_bias": [[[rows[-1][0]], -30.0], [[rows[0][1], rows[0][2]], -40.0], [[7], 2.0]]
    },
    "EncoderRepetitionPenaltyLogitsProcessor": lambda rows, columns: {"encoder_repetition_penalty": 3.0},
    "RepetitionPenaltyLogitsProcessor": lambda rows, columns: {"repetition_penalty": 4.0},
    "NoRepeatNGramLogitsProcessor": lambda rows, columns: {"no_repeat_ngram_size": 1},
    "EncoderNoRepeatNGramLogitsProcessor": lambda rows, columns: {"encoder_no_repeat_ngram_size": 1},
    "NoBadWordsLogitsProcessor": lambda rows, columns: {"bad_words_ids": [[rows[-1][2]], [rows[0][3], rows[0][4]]]},
    "MinLengthLogitsProcessor": lambda rows, columns: {"min_length": columns + 7, "eos_token_id": first(rows, 2)},
    "MinNewTokensLengthLogitsProcessor": lambda rows, columns: {"min_new_tokens": 7, "eos_token_id": first(rows, 4)},
    "PrefixConstrainedLogitsProcessor": lambda rows, columns: {
        "prefix_allowed_tokens_fn": lambda row, ids: [(int(ids[-1]) * 7 + 3 * row + i) % tiny.VOCAB for i in range(20)]
    },
    "ForcedBOSTokenLogitsProcessor": lambda rows, columns: {"forced_bos_token_id": 33},
    "ForcedEOSTokenLogitsProcessor": lambda rows, columns: {"forced_eos_token_id": 44},
    "InfNanRemoveLogitsProcessor": lambda rows, columns: {
        "remove_invalid_values": True,
        "sequence_bias": [[[rows[-1][1]], float("inf")], [[rows[0][2]], float("nan")]],
    },
    "ExponentialDecayLengthPenalty": lambda rows, columns: {
        "exponential_decay_length_penalty": (3, 1.6),
        "eos_token_id": EOS,
    },
    "SuppressTokensLogitsProcessor": lambda rows, columns: {"suppress_tokens": first(rows, 1)},
    "SuppressTokensAtBeginLogitsProcessor": lambda rows, columns: {"begin_suppress_tokens": first(rows, 0)},
    "LogitNormalization": lambda rows, columns: {"renormalize_logits": True},
    "WatermarkLogitsProcessor": lambda rows, columns: {
        "watermarking_config": WatermarkingConfig(bias=12.0, seeding_scheme="selfhash", context_width=2)
    },
    "SynthIDTextWatermarkLogitsProcessor": lambda rows, columns: {
        "watermarking_config": SynthIDTextWatermarkingConfig(**SYNTH_ID)
    },
}
# Built for sampling only.
WARPERS = {
    "TemperatureLogitsWarper": {"temperature": 2.5},
    "TopHLogitsWarper": {"top_h": 0.5},
    "TopKLogitsWarper": {"top_k": 3},
    "TopPLogitsWarper": {"top_p": 0.7},
    "MinPLogitsWarper": {"min_p": 0.1},
    "TypicalLogitsWarper": {"typical_p": 0.6},
    "EpsilonLogitsWarper": {"epsilon_cutoff": 0.02},
    "EtaLogitsWarper": {"eta_cutoff": 0.2},
}
# What sampling needs to have something to choose from.
SAMPLED = {"do_sample": True, "top_k": 0, "temperature": 4.0}
# Of these the text does not tell that they were there.
SILENT = {"LogitNormalization"}
# One token long, as a forced BOS wants it.
SHORT = {1: tiny.Prompt(((61,),)), 3: tiny.Prompt(((61,), (40,), (8,)))}


def prompt_for(name, prompt):
    return SHORT[prompt.batch] if name == "ForcedBOSTokenLogitsProcessor" else prompt


@pytest.fixture
def built(monkeypatch):
    """The processors of the latest call."""
    latest = []
    build = GenerationMixin._get_logits_processor

    def watched(self, *args, **kwargs):
        latest[:] = build(self, *args, **kwargs)
        return LogitsProcessorList(latest)

    monkeypatch.setattr(GenerationMixin, "_get_logits_processor", watched)
    return latest


def names(processors):
    return {type(processor).__name__ for processor in processors}


def test_the_tables_hold_every_processor_that_stock_can_build():
    """Walks through the source of what builds them, so that a newer transformers cannot add one unnoticed."""
    source = textwrap.dedent(inspect.getsource(GenerationMixin._get_logits_processor))
    appended = [
        ast.unparse(call.args[0].func)
        for call in ast.walk(ast.parse(source))
        if isinstance(call, ast.Call) and ast.unparse(call.func) == "processors.append"
    ]
    by_config = [name for name in appended if not hasattr(logits_process, name)]
    assert by_config == ["generation_config.watermarking_config.construct_processor"]
    watermarks = {"WatermarkLogitsProcessor", "SynthIDTextWatermarkLogitsProcessor"}
    assert {*appended, *watermarks} - {*by_config} == {*ALWAYS, *WARPERS}


@GUESSERS
@BATCHES
@pytest.mark.parametrize("name", ALWAYS)
def test_greedy_text_under_each_processor_equals_stock(model, prompt, name, kind, built):
    """Reports 55, 58 and 64."""
    prompt = prompt_for(name, prompt)
    plain = said(model, prompt, 14)
    kwargs = {**prompt.inputs(), "max_new_tokens": 14, **ALWAYS[name](plain, prompt.columns)}
    expected = model.generate(**copy.deepcopy(kwargs), do_sample=False)
    assert name in names(built)
    assert (expected[:, prompt.columns :].tolist() != plain) == (name not in SILENT)
    script = drafter(kind, model, truth(expected, kwargs["attention_mask"]))
    actual = sg.enable(model).generate(**kwargs, do_sample=False, assistant=script)
    assert torch.equal(actual, expected)


@pytest.mark.parametrize("kind", ["chain", "model"])
@BATCHES
@pytest.mark.parametrize("name", [*ALWAYS, *WARPERS])
def test_sampled_text_under_each_processor_equals_plain_s(model, prompt, name, kind, built):
    """The one seed, with a drafter and without."""
    prompt = prompt_for(name, prompt)
    kwargs = {**prompt.inputs(), "max_new_tokens": 14, **SAMPLED, "seed": 3}
    plain = sg.enable(model).generate(**kwargs, assistant=sg.Plain())
    rows = plain[:, prompt.columns :].tolist()
    kwargs |= WARPERS[name] if name in WARPERS else ALWAYS[name](rows, prompt.columns)
    expected = model.generate(**copy.deepcopy(kwargs), assistant=sg.Plain())
    assert name in names(built)
    assert torch.equal(expected, plain) == (name in SILENT)
    stats = sg.Stats()
    script = drafter(kind, model, truth(expected, kwargs["attention_mask"]))
    assert torch.equal(model.generate(**kwargs, assistant=script, stats=stats), expected)
    assert 0 < stats.accepted < stats.drafted or kind == "model"


@SHAPES
@BATCHES
@pytest.mark.parametrize("name", [*WARPERS, "all", "with a penalty"])
def test_the_scores_of_every_token_are_what_stock_s_processors_make_of_its_logits(model, prompt, name, shape, built):
    """Report 52: the whole chain of processors, for the token's own prefix, wherever in a block it came."""
    special = WARPERS.get(name, {k: v for warper in WARPERS.values() for k, v in warper.items()})
    if name == "with a penalty":
        special = {"repetition_penalty": 1.3, "sequence_bias": [[[5], 3.0], [[8, 9], -4.0]], "min_p": 0.1}
    kwargs = {**prompt.inputs(), "max_new_tokens": 12, **SAMPLED, **special, "seed": 3}
    kwargs |= {"return_dict_in_generate": True, "output_scores": True, "output_logits": True}
    plain = sg.enable(model).generate(**kwargs, assistant=sg.Plain()).sequences
    output = model.generate(**kwargs, assistant=drafter(shape, model, truth(plain, kwargs["attention_mask"])))
    assert torch.equal(output.sequences, plain)
    assert 0 < output.speculation.accepted < output.speculation.drafted
    chain = LogitsProcessorList(built)
    for step, (scores, logits) in enumerate(zip(output.scores, output.logits, strict=True)):
        expected = chain(output.sequences[:, : prompt.columns + step], logits.clone())
        torch.testing.assert_close(scores, expected)


NEGATIVE = {1: tiny.Prompt.random((6, 3)), 3: tiny.Prompt.random((6, 3), (6, 4), (4, 5))}


@GUESSERS
@BATCHES
@pytest.mark.parametrize("sampled", [False, True], ids=["greedy", "sampled"])
def test_guidance_by_a_negative_prompt(model, prompt, kind, sampled, built):
    negative = NEGATIVE[prompt.batch].inputs()
    kwargs = {**prompt.inputs(), "max_new_tokens": 12, "guidance_scale": 2.0, "do_sample": sampled}
    kwargs |= {
        "negative_prompt_ids": negative["input_ids"],
        "negative_prompt_attention_mask": negative["attention_mask"],
    }
    sg.enable(model)
    if sampled:
        kwargs |= {"temperature": 4.0, "seed": 1}
    expected = model.generate(**kwargs, assistant=sg.Plain() if sampled else None)
    assert [type(processor) for processor in built][:1] == [UnbatchedClassifierFreeGuidanceLogitsProcessor]
    script = drafter(kind, model, truth(expected, kwargs["attention_mask"]))
    assert torch.equal(model.generate(**kwargs, assistant=script), expected)
    del kwargs["negative_prompt_ids"], kwargs["negative_prompt_attention_mask"]
    assert not torch.equal(model.generate(**kwargs, assistant=sg.Plain()), expected)


def test_allowed_tokens_are_asked_for_by_prompt_when_several_sequences_are_returned(model):
    asked = []

    def allowed(row, ids):
        asked.append(row)
        return [(int(ids[-1]) * 7 + 31 * row + i) % tiny.VOCAB for i in range(12)]

    kwargs = {**RAGGED.inputs(), "max_new_tokens": 10, **SAMPLED, "num_return_sequences": 2, "seed": 2}
    expected = sg.enable(model).generate(**kwargs, prefix_allowed_tokens_fn=allowed, assistant=sg.Plain())
    assert asked == [0, 0, 1, 1, 2, 2] * 10
    mask = kwargs["attention_mask"].repeat_interleave(2, dim=0)
    script = drafter("chain", model, truth(expected, mask))
    assert torch.equal(model.generate(**kwargs, prefix_allowed_tokens_fn=allowed, assistant=script), expected)


@pytest.mark.parametrize("sampled", [False, True], ids=["greedy", "sampled"])
@BATCHES
def test_several_processors_run_in_stock_s_order(model, prompt, sampled, built):
    own = LogitsProcessorList([tiny.PrefixHash(), InfNanRemoveLogitsProcessor()])
    kwargs = {**prompt.inputs(), "max_new_tokens": 14, "logits_processor": own, "renormalize_logits": True}
    kwargs |= {"repetition_penalty": 1.2, "suppress_tokens": [7, 8], "no_repeat_ngram_size": 2, "do_sample": sampled}
    sg.enable(model)
    if sampled:
        kwargs |= {"temperature": 3.0, "top_k": 20, "top_p": 0.9, "seed": 4}
    expected = model.generate(**kwargs, assistant=sg.Plain() if sampled else None)
    script = drafter("tree", model, truth(expected, kwargs["attention_mask"]))
    assert torch.equal(model.generate(**kwargs, assistant=script), expected)


@pytest.mark.parametrize("temperature", [1e-8, 1e-6, 1e-4])
@pytest.mark.parametrize("acceptance", ["matching", "rejection", "block"])
def test_a_tiny_temperature_is_greedy(model, temperature, acceptance):
    """Report 50."""
    rows = said(model, RAGGED, 14)
    kwargs = {**RAGGED.inputs(), "max_new_tokens": 14, "do_sample": True, "temperature": temperature}
    for script in (drafter("chain", model, whole(RAGGED, rows)), drafter("model", model, [])):
        answer = sg.enable(model).generate(**kwargs, assistant=script, acceptance=acceptance)
        assert answer[:, RAGGED.columns :].tolist() == rows


@pytest.mark.parametrize("cleared", [None, []], ids=["None", "empty"])
def test_what_a_call_clears_of_a_saved_generation_config_is_cleared_as_in_stock(model, cleared, tmp_path):
    """Report 59."""
    rows = said(model, ONE)
    model.generation_config.suppress_tokens = rows[0][1:3]
    model.generation_config.save_pretrained(tmp_path)
    model.generation_config = GenerationConfig.from_pretrained(tmp_path)
    kwargs = {**ONE.inputs(), "max_new_tokens": 14}
    saved = same_as_stock(model, drafter("model", model, []), **kwargs)
    assert saved[0, ONE.columns :].tolist() != rows[0][:14]
    same_as_stock(model, drafter("model", model, []), **kwargs, suppress_tokens=cleared)


class Counting(LogitsProcessor):
    """Refuses to be called but once for each token, in order."""

    def __init__(self, columns):
        self.next = columns

    def __call__(self, input_ids, scores):
        assert input_ids.shape[1] == self.next
        self.next += 1
        return scores


class Digits(LogitsProcessor):
    """A grammar with a state a row: two to four digits, then a comma, over and over. It reads the last token only."""

    def __init__(self):
        self.run = None

    def __call__(self, input_ids, scores):
        digits, comma = list(range(40, 50)), 60
        if self.run is None:
            self.run = [0] * len(input_ids)
        else:
            last = input_ids[:, -1].tolist()
            self.run = [run + 1 if token in digits else 0 for run, token in zip(self.run, last, strict=True)]
        allowed = torch.full_like(scores, -torch.inf)
        for row, run in enumerate(self.run):
            if run < 4:
                allowed[row, digits] = 0
            if run >= 2:
                allowed[row, comma] = 0
        return scores + allowed


class InPlace(tiny.PrefixHash):
    """Writes into the scores that it is given."""

    def __call__(self, input_ids, scores):
        return scores.copy_(super().__call__(input_ids, scores))


class Drifting(LogitsProcessor):
    """Adds noise hashed from a running sum over everything it was ever shown, scores included."""

    def __init__(self):
        self.sum = 0.0

    def __call__(self, input_ids, scores):
        self.sum = (self.sum * 31 + float(input_ids[:, -1].sum()) + round(float(scores[0].max()), 2)) % 1009
        generator = torch.Generator().manual_seed(int(self.sum))
        return scores + 4 * torch.randn(scores.shape, generator=generator)


@GUESSERS
@BATCHES
@pytest.mark.parametrize("sampled", [False, True], ids=["greedy", "sampled"])
@pytest.mark.parametrize("processor", ["counting", "digits", "drifting", "in place"])
def test_a_processor_with_a_state_of_its_own_is_shown_what_stock_shows_it(model, prompt, kind, sampled, processor):
    """Reports 53, 56 and 61."""
    makers = {"counting": lambda: Counting(prompt.columns), "digits": Digits, "drifting": Drifting, "in place": InPlace}
    make = makers[processor]
    kwargs = {**prompt.inputs(), "max_new_tokens": 16, "do_sample": sampled}
    sg.enable(model)
    if sampled:
        kwargs |= {"temperature": 3.0, "seed": 4}
    plain = sg.Plain() if sampled else None
    expected = model.generate(**kwargs, logits_processor=[make()], assistant=plain)
    script = drafter(kind, model, truth(expected, kwargs["attention_mask"]))
    assert torch.equal(model.generate(**kwargs, logits_processor=[make()], assistant=script), expected)
    if processor == "digits":
        assert set(expected[:, prompt.columns :].flatten().tolist()) <= {*range(40, 50), 60}


class Noted(LogitsProcessor):
    """Notes every call and changes nothing."""

    def __init__(self):
        self.calls = []
        self.scores = []

    def __call__(self, input_ids, scores):
        self.calls.append((input_ids.tolist(), tuple(scores.shape), scores.dtype))
        self.scores.append(scores.clone())
        return scores


class NotedEnd(StoppingCriteria):
    """Notes every call and never stops."""

    def __init__(self):
        self.calls = []

    def __call__(self, input_ids, scores, **kwargs):
        self.calls.append((input_ids.tolist(), scores and [tuple(score.shape) for score in scores]))
        return torch.zeros(len(input_ids), dtype=torch.bool)


@pytest.mark.parametrize("kind", KINDS)
@BATCHES
@pytest.mark.parametrize("scores", [False, True], ids=["", "scores"])
@pytest.mark.parametrize("eos", [False, True], ids=["", "eos"])
def test_calls_of_a_processor_and_a_criterion_are_stock_s(model, prompt, kind, scores, eos):
    """The same ids and shapes, call by call, to the end of the last row."""
    rows = said(model, prompt)
    kwargs = {**prompt.inputs(), "max_new_tokens": 16, "do_sample": False, "return_dict_in_generate": True}
    stops = [row[3 + 4 * i] for i, row in enumerate(rows)] if eos else []
    kwargs |= {"output_scores": scores, "eos_token_id": stops or None}
    sg.enable(model)
    notes = []
    for assistant in (None, drafter(kind, model, whole(prompt, rows))):
        processor, criterion = Noted(), NotedEnd()
        notes.append((processor, criterion))
        model.generate(**kwargs, logits_processor=[processor], stopping_criteria=[criterion], assistant=assistant)
    (theirs, their_end), (mine, my_end) = notes
    assert mine.calls == theirs.calls
    assert my_end.calls == their_end.calls
    for step, (score, reference) in enumerate(zip(mine.scores, theirs.scores, strict=True)):
        live = [i for i, row in enumerate(rows) if not set(row[:step]) & set(stops)]
        torch.testing.assert_close(score[live], reference[live], rtol=1e-5, atol=1e-4)


def test_min_new_tokens_holds_the_end_back_exactly_until_then(model):
    """Report 53: EOS is what the target likes best at every place."""
    rows = said(model, ONE)
    kwargs = {**ONE.inputs(), "max_new_tokens": 16, "eos_token_id": EOS, "min_new_tokens": 5}
    kwargs |= {"sequence_bias": [[[EOS], 1e4]]}
    answer = same_as_stock(model, drafter("chain", model, whole(ONE, rows)), **kwargs)
    assert answer[0, ONE.columns :].tolist() == [*rows[0][:5], EOS]
