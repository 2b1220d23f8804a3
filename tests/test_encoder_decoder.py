"""Encoder-decoders: the rows of a prompt are what the encoder reads, and the loop sees what the decoder writes."""

from __future__ import annotations

import copy
import functools
import logging
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import tiny
import torch
import transformers as hf
from generating import EOS, Recorded, tokenizer
from tiny import MODES, ONE, RAGGED, VOCAB, AlwaysWrong, Prompt, Scripted
from torch import Tensor
from transformers import DynamicCache, LogitsProcessor, LogitsProcessorList, PreTrainedModel
from transformers.cache_utils import EncoderDecoderCache

import hf_specgen as sg
from hf_specgen.draft import Context, Limit, Request
from hf_specgen.encoder import Source

NEW, BEYOND = 24, 16
START = 1
ROWS = {"one": ONE, "ragged": RAGGED}
BATCHES = pytest.mark.parametrize("rows", ROWS)

IDS = {"vocab_size": VOCAB, "pad_token_id": 0, "bos_token_id": None, "eos_token_id": None}
IDS |= {"decoder_start_token_id": START, "tie_word_embeddings": False}
BART = {"d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4, **IDS}
BART |= {"decoder_attention_heads": 4, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48, "forced_eos_token_id": None}
BART_LIKE = {**BART, "max_position_embeddings": 128}
T5 = {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_decoder_layers": 2, "num_heads": 4, **IDS}
SPARSE = {"num_experts": 2, "num_sparse_encoder_layers": 1, "num_sparse_decoder_layers": 1}


def _t5gemma() -> hf.PreTrainedConfig:
    side = hf.T5GemmaModuleConfig(
        **{**IDS, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4},
        num_key_value_heads=2,
        head_dim=8,
        sliding_window=8,
        layer_types=["sliding_attention", "full_attention"],
        query_pre_attn_scalar=8,
    )
    return hf.T5GemmaConfig(encoder=side, decoder=copy.deepcopy(side), **{**IDS, "bos_token_id": START})


CONFIGS: dict[str, Callable[[], hf.PreTrainedConfig]] = {
    "t5": lambda: hf.T5Config(**T5),
    "mt5": lambda: hf.MT5Config(**T5),
    "umt5": lambda: hf.UMT5Config(**T5),
    "longt5": lambda: hf.LongT5Config(**T5),
    "switch_transformers": lambda: hf.SwitchTransformersConfig(**T5, **SPARSE),
    "t5gemma": _t5gemma,
    "bart": lambda: hf.BartConfig(**BART_LIKE),
    "mbart": lambda: hf.MBartConfig(**BART_LIKE),
    "plbart": lambda: hf.PLBartConfig(**BART_LIKE),
    "mvp": lambda: hf.MvpConfig(**BART_LIKE),
    "pegasus": lambda: hf.PegasusConfig(**BART_LIKE),
    "pegasus_x": lambda: hf.PegasusXConfig(**BART_LIKE),
    "bigbird_pegasus": lambda: hf.BigBirdPegasusConfig(**BART_LIKE, attention_type="original_full"),
    "marian": lambda: hf.MarianConfig(**BART_LIKE),
    "blenderbot": lambda: hf.BlenderbotConfig(**BART_LIKE),
    "blenderbot-small": lambda: hf.BlenderbotSmallConfig(**BART_LIKE),
    "m2m_100": lambda: hf.M2M100Config(**BART_LIKE),
    "nllb-moe": lambda: hf.NllbMoeConfig(**BART_LIKE, num_experts=2, expert_capacity=64),
    "led": lambda: hf.LEDConfig(
        **BART, max_encoder_position_embeddings=128, max_decoder_position_embeddings=128, attention_window=4
    ),
}


# Standard deviations of weights by a part of their names: what the encoder says does not drown the rest.
SCALES = {
    **dict.fromkeys(("position", "relative_attention_bias"), 4.0),
    **dict.fromkeys(("encoder_attn", "EncDecAttention", "cross_attn"), 0.1),
    **dict.fromkeys(("q_proj", "k_proj", ".q.", ".k."), 0.4),
    **dict.fromkeys(("embed", "lm_head", "proj_out"), 1.0),
    "shared": 0.2,
}
# Where texts of the usual seed and scale loop.
SEEDS = {"plbart": 3, "t5gemma": 3}
GAINS = {"nllb-moe": 0.35, "t5gemma": 0.35}


def strengthen(model: PreTrainedModel, seed: int = 4, gain: float = 0.25) -> PreTrainedModel:
    """Larger weights, in float64: with `tiny.sharpen`'s the texts of these models run into loops at once."""
    generator = torch.Generator().manual_seed(seed)
    model.double().eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.dim() > 1:
                scale = next((scale for part, scale in SCALES.items() if part in name), gain)
                weight.copy_(scale * torch.randn(weight.shape, generator=generator, dtype=weight.dtype))
    return model


def build(name: str) -> PreTrainedModel:
    """A stock model, nobody else's; equal names make equal weights."""
    with torch.random.fork_rng():
        torch.manual_seed(1)
        model = hf.AutoModelForSeq2SeqLM.from_config(CONFIGS[name]())
    model.generation_config = hf.GenerationConfig(pad_token_id=0, decoder_start_token_id=START)
    strengthen(model, SEEDS.get(name, 4), GAINS.get(name, 0.25))
    # Gemma's eager attention softmaxes in float32, where float64's mask is -inf and padding NaN.
    return model.float() if name == "t5gemma" else model


@functools.cache
def target(name: str) -> PreTrainedModel:
    return sg.enable(build(name))


def source(prompt: Prompt) -> dict[str, Tensor]:
    """What the encoder reads, padded on the right."""
    padding = [prompt.columns - len(row) for row in prompt.rows]
    return {
        "input_ids": torch.tensor([[*row, *[0] * pad] for row, pad in zip(prompt.rows, padding, strict=True)]),
        "attention_mask": torch.tensor([[1] * (prompt.columns - pad) + [0] * pad for pad in padding]),
    }


def noisy(model: PreTrainedModel, noise: float = 0.05) -> PreTrainedModel:
    """A drafter of the same class that often agrees."""
    other = sg.disable(copy.deepcopy(model))
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for weight in other.parameters():
            if weight.dim() > 1:
                weight.add_(noise * weight.std() * torch.randn(weight.shape, generator=generator, dtype=weight.dtype))
    return other


def say(model: PreTrainedModel, prompt: Prompt, mode: str = "greedy", **kwargs: Any) -> Tensor:
    """What `generate` returns in one of `MODES`; with `assistant=` under seed 7 where the mode samples."""
    given = {**source(prompt), **MODES[mode](), "max_new_tokens": NEW, **kwargs}
    if "assistant" in given and given["do_sample"]:
        given["seed"] = 7
    out: Tensor = model.generate(**given)
    return out


@functools.cache
def truth(name: str, rows: str, mode: str = "greedy") -> Tensor:
    """What plain decoding gives, and some tokens more."""
    return say(target(name), ROWS[rows], mode, max_new_tokens=NEW + BEYOND, assistant=sg.Plain())


# ----------------------------------------------------------------------------------------------------- equality


MOST_USED = ("t5", "umt5", "bart", "mbart", "pegasus", "marian", "m2m_100", "t5gemma")


@pytest.mark.parametrize(
    ("name", "rows"),
    [
        pytest.param(name, rows, marks=[] if rows == "ragged" and name in MOST_USED else pytest.mark.slow)
        for name in CONFIGS
        for rows in ROWS
    ],
)
def test_every_family_says_what_stock_says(name, rows):
    """Report 17."""
    known = truth(name, rows)
    assert torch.equal(say(build(name), ROWS[rows], max_new_tokens=NEW + BEYOND), known)
    script, stats = Scripted(known.tolist()), sg.Stats()
    actual = say(target(name), ROWS[rows], assistant=script, stats=stats)
    assert torch.equal(actual, known[:, : 1 + NEW])
    assert script.seen.share("mixed") > 0.5
    assert all(script.seen.chains)
    assert stats.tokens == NEW * ROWS[rows].batch
    assert min(len({tuple(row[i : i + 3]) for i in range(NEW)}) for row in known.tolist()) > 6  # no text of one word


DRAFTERS: dict[str, Callable[[PreTrainedModel, Any], Any]] = {
    "scripted": lambda model, texts: Scripted(texts),
    "tree": lambda model, texts: Scripted(texts, "tree"),
    "overlong": lambda model, texts: Scripted(texts, overlong=True),
    "wrong": lambda model, texts: AlwaysWrong(texts),
    "sibling": lambda model, texts: noisy(model),
    "unsampled": lambda model, texts: sg.DraftModel(noisy(model), sample=False),
    "causal": lambda model, texts: tiny.llama(),
    "lookup": lambda model, texts: sg.PromptLookup(1),
    "store": lambda model, texts: sg.PromptLookup(store=tiny.store_of(texts)),
}


QUICK = {"mode": ("greedy", "hash-sampled"), "drafter": ("scripted", "wrong", "sibling", "causal", "lookup")}


@pytest.mark.parametrize(
    ("drafter", "name", "mode", "rows"),
    [
        pytest.param(
            drafter,
            name,
            mode,
            rows,
            marks=[] if mode in QUICK["mode"] and drafter in QUICK["drafter"] else pytest.mark.slow,
        )
        for drafter in DRAFTERS
        for name in ("t5", "bart")
        for mode in MODES
        for rows in ROWS
    ],
)
def test_the_text_is_that_of_plain_decoding(drafter, name, mode, rows):
    model, prompt, known = target(name), ROWS[rows], truth(name, rows, mode)
    if mode.endswith("greedy"):
        assert torch.equal(say(build(name), prompt, mode), known[:, : 1 + NEW])
    assistant, stats = DRAFTERS[drafter](model, known.tolist()), sg.Stats()
    assert torch.equal(say(model, prompt, mode, assistant=assistant, stats=stats), known[:, : 1 + NEW])
    if isinstance(assistant, Scripted):
        assert assistant.seen.share("mixed") > 0.5
    elif drafter in ("sibling", "store") and not mode.startswith("hash"):
        assert 0 < stats.accepted < stats.drafted


@BATCHES
def test_static_caches_are_cropped_as_well(rows):
    """Stock's EncoderDecoderCache crops dynamic layers only."""
    for name in ("t5", "bart"):
        known = say(build(name), ROWS[rows], cache_implementation="static", max_new_tokens=NEW + BEYOND)
        script = Scripted(known.tolist())
        actual = say(target(name), ROWS[rows], assistant=script, cache_implementation="static")
        assert torch.equal(actual, known[:, : 1 + NEW])
        assert script.seen.share("mixed") > 0.5


@BATCHES
def test_a_cache_of_the_caller_s_is_filled_as_stock_fills_it(rows):
    caches = [EncoderDecoderCache(DynamicCache(), DynamicCache()) for _ in range(2)]
    known = say(build("bart"), ROWS[rows], cache=caches[0])
    script = Scripted(truth("bart", rows).tolist())
    assert torch.equal(say(target("bart"), ROWS[rows], cache=caches[1], assistant=script), known)
    for part in ("self_attention_cache", "cross_attention_cache"):
        for ours, stocks in zip(getattr(caches[1], part).layers, getattr(caches[0], part).layers, strict=True):
            torch.testing.assert_close(ours.keys, stocks.keys)
            torch.testing.assert_close(ours.values, stocks.values)


# ------------------------------------------------------------------------------------------------- the decoder's prompt

PROMPTED = {
    "longer": {"decoder_input_ids": torch.tensor([[START, 7, 8, 9, 30]])},
    "without its start": {"decoder_input_ids": torch.tensor([[7, 8, 9]])},
    "padded": {
        "decoder_input_ids": torch.tensor([[START, 7, 8, 9], [0, 0, 0, START], [0, START, 5, 6]]),
        "decoder_attention_mask": torch.tensor([[1, 1, 1, 1], [0, 0, 0, 1], [0, 1, 1, 1]]),
    },
}


@pytest.mark.parametrize("given", PROMPTED)
@pytest.mark.parametrize("name", ["t5", "bart"])
def test_the_decoder_goes_on_from_a_prompt(name, given):
    kwargs = PROMPTED[given]
    prompt = RAGGED if given == "padded" else ONE
    known = say(build(name), prompt, max_new_tokens=NEW + BEYOND, **kwargs)
    end = known.shape[1] - BEYOND
    mask = kwargs.get("decoder_attention_mask", torch.ones_like(known[:, :1]))
    shown = torch.nn.functional.pad(mask, (0, known.shape[1] - mask.shape[1]), value=1).bool()
    script = Scripted([row[keep].tolist() for row, keep in zip(known, shown, strict=True)])
    assert torch.equal(say(target(name), prompt, assistant=script, **kwargs), known[:, :end])
    assert script.seen.share("mixed") > 0.5
    stats = sg.Stats()
    assert torch.equal(say(target(name), prompt, assistant=noisy(target(name)), stats=stats, **kwargs), known[:, :end])
    assert 0 < stats.accepted < stats.drafted


def test_the_encoder_s_outputs_may_be_given():
    model, stats = target("bart"), sg.Stats()
    given = source(RAGGED)
    outputs = model.get_encoder()(**given, return_dict=True)
    kwargs = {"encoder_outputs": outputs, "attention_mask": given["attention_mask"], "max_new_tokens": NEW}
    script = Scripted(truth("bart", "ragged").tolist())
    assert torch.equal(
        model.generate(**kwargs, assistant=script, do_sample=False, stats=stats), truth("bart", "ragged")[:, : 1 + NEW]
    )
    assert 0 < stats.accepted < stats.drafted
    assert torch.equal(
        model.generate(**kwargs, assistant=sg.PromptLookup(1), do_sample=False), truth("bart", "ragged")[:, : 1 + NEW]
    )
    with pytest.raises(ValueError, match="its encoder needs the inputs that encoder_outputs= stands in for"):
        model.generate(**kwargs, assistant=build("bart"))


# --------------------------------------------------------------------------------------- processors, criteria, outputs

ARGUMENTS: dict[str, dict[str, Any]] = {
    "forced_bos": {"forced_bos_token_id": 40},
    "forced_eos": {"forced_eos_token_id": EOS, "eos_token_id": EOS},
    "min_new_tokens": {"min_new_tokens": 12, "eos_token_id": list(range(2, VOCAB, 3))},
    "eos": {"eos_token_id": list(range(2, VOCAB, 7))},
    "encoder_repetition_penalty": {"encoder_repetition_penalty": 3.0},
    "encoder_no_repeat_ngram_size": {"encoder_no_repeat_ngram_size": 1},
    "num_return_sequences": {"num_return_sequences": 3, "do_sample": True},
    "max_length": {"max_length": 14, "max_new_tokens": None},
    "stop_strings": {"stop_strings": ["gfc"], "tokenizer": tokenizer()},
}


@BATCHES
@pytest.mark.parametrize("which", ARGUMENTS)
def test_processors_and_criteria_do_what_they_do_in_stock(which, rows):
    model, prompt, kwargs = target("bart"), ROWS[rows], ARGUMENTS[which]
    plain = {"assistant": sg.Plain()} if kwargs.get("do_sample") else {}
    known = say(model if plain else build("bart"), prompt, **kwargs, **plain)
    # The script goes on where the text has ended.
    behind = torch.full((len(known), BEYOND), 5)
    script, stats = Scripted(torch.cat([known, behind], 1).tolist()), sg.Stats()
    assert torch.equal(say(model, prompt, **kwargs, assistant=script, stats=stats), known)
    assert 0 < stats.accepted < stats.drafted
    assert torch.equal(say(model, prompt, **kwargs, assistant=noisy(model)), known)


@BATCHES
def test_an_end_at_every_place_of_a_block(rows):
    model, known = target("bart"), truth("bart", rows)
    for place in range(2, 8):
        eos = int(known[0, 1 + place])
        expected = say(build("bart"), ROWS[rows], eos_token_id=eos)
        for script in (Scripted(known.tolist(), spoiled=0), noisy(model)):
            assert torch.equal(say(model, ROWS[rows], eos_token_id=eos, assistant=script), expected)


OUTPUTS = dict.fromkeys(("output_scores", "output_logits", "output_hidden_states", "return_dict_in_generate"), True)


@BATCHES
@pytest.mark.parametrize("name", ["t5", "bart"])
def test_what_is_returned_has_stock_s_names_shapes_and_values(name, rows):
    known = say(build(name), ROWS[rows], **OUTPUTS)
    stats = sg.Stats()
    actual = say(target(name), ROWS[rows], **OUTPUTS, assistant=Scripted(truth(name, rows).tolist()), stats=stats)
    assert isinstance(actual, hf.generation.GenerateEncoderDecoderOutput)
    assert list(actual.keys()) == list(known.keys())
    assert actual.speculation is stats
    assert 0 < stats.accepted < stats.drafted
    for key in known:
        if key == "cache":
            assert actual.cache.get_seq_length() == known.cache.get_seq_length() == NEW
            for part in ("self_attention_cache", "cross_attention_cache"):
                pairs = zip(getattr(actual.cache, part).layers, getattr(known.cache, part).layers, strict=True)
                for ours, stocks in pairs:
                    torch.testing.assert_close((ours.keys, ours.values), (stocks.keys, stocks.values))
        else:
            torch.testing.assert_close(actual[key], known[key])


@BATCHES
def test_streams_and_steps_give_the_same_text(rows):
    model, prompt, known = target("bart"), ROWS[rows], truth("bart", rows)[:, : 1 + NEW]
    streamer = Recorded()
    script = Scripted(truth("bart", rows).tolist())
    say(model, prompt, streamer=streamer, assistant=script)
    assert torch.equal(torch.tensor(streamer.puts[0]), known[:, :1])
    assert torch.equal(torch.tensor(streamer.puts[1:]).T, known[:, 1:])
    assert streamer.ends == 1
    steps = sg.stream(model, **source(prompt), assistant=script, max_new_tokens=NEW, do_sample=False)
    said: list[list[int]] = [[] for _ in prompt.rows]
    for step in steps:
        for row, tokens in zip(said, step.tokens, strict=True):
            row.extend(tokens)
    assert said == known[:, 1:].tolist()
    stock = say(build("bart"), prompt, custom_generate=sg.speculate, assistant=script)
    assert torch.equal(stock, known)


def test_an_encoder_runs_once_a_call():
    model, drafter = sg.enable(build("bart")), noisy(target("bart"))
    passes: Counter[PreTrainedModel] = Counter()
    for one in (model, drafter):
        one.get_encoder().register_forward_hook(lambda *_, one=one: passes.update([one]))
    say(model, RAGGED, assistant=drafter)
    assert dict(passes) == {model: 1, drafter: 1}


# ------------------------------------------------------------------------------------------------------ drafters


@BATCHES
@pytest.mark.parametrize("given", ["nothing", "a longer prompt", "an end of one row"])
@pytest.mark.parametrize("name", ["t5", "bart"])
def test_a_target_that_drafts_for_itself_is_always_right(name, given, rows):
    """Its own cache has the right columns in every round; a row that has ended holds nobody up."""
    model, prompt, stats = target(name), ROWS[rows], sg.Stats()
    kwargs = {}
    if given == "a longer prompt":
        kwargs = {"decoder_input_ids": PROMPTED["longer"]["decoder_input_ids"].expand(prompt.batch, -1)}
    elif given == "an end of one row":
        kwargs = {"eos_token_id": int(truth(name, rows)[-1, 8])}
    known = say(build(name), prompt, **kwargs)
    assert torch.equal(say(model, prompt, assistant=model, num_assistant_tokens=5, stats=stats, **kwargs), known)
    if given == "an end of one row":
        # Where it ends within a draft, the others lose the rest of that.
        assert stats.accepted >= stats.drafted - 2 * 5 * prompt.batch
    else:
        assert stats.accepted == stats.drafted
        assert stats.mean_accepted_tokens > 4


@pytest.mark.parametrize("ended", [False, True])
def test_a_drafter_is_fed_what_is_new(ended):
    """Of five drafts that were right the last one, and the token after them; a row that has ended changes nothing."""
    model, drafter = target("bart"), sg.disable(copy.deepcopy(target("bart")))
    widths: list[int] = []
    drafter.register_forward_pre_hook(
        lambda module, args, kwargs: widths.append(kwargs["decoder_input_ids"].shape[1]), with_kwargs=True
    )
    kwargs = {"eos_token_id": int(truth("bart", "ragged")[-1, 3])} if ended else {}
    said = say(model, RAGGED, assistant=drafter, num_assistant_tokens=5, **kwargs)
    assert bool((said[:, 4:] == 0).all(1).any()) == ended
    assert (widths[0], set(widths[1:])) == (2, {1, 2})


def test_a_text_may_hold_padding_ids():
    """M2M100 leaves them out where it counts the positions of a pass."""
    known = truth("m2m_100", "ragged")
    assert bool((known[:, 2:NEW] == 0).any())
    for assistant in (Scripted(known.tolist(), spoiled=0), target("m2m_100")):
        stats = sg.Stats()
        actual = say(target("m2m_100"), RAGGED, assistant=assistant, stats=stats)
        assert torch.equal(actual, known[:, : 1 + NEW])
        assert stats.mean_accepted_tokens > 2


def test_a_drafter_of_another_size():
    """It runs an encoder of its own."""
    small = hf.AutoModelForSeq2SeqLM.from_config(hf.BartConfig(**{**BART_LIKE, "d_model": 16, "decoder_layers": 1}))
    small = strengthen(small)
    for rows in ROWS:
        actual = say(target("bart"), ROWS[rows], assistant=small)
        assert torch.equal(actual, truth("bart", rows)[:, : 1 + NEW])


def test_a_drafter_with_fewer_positions_stops_drafting():
    small = hf.AutoModelForSeq2SeqLM.from_config(hf.BartConfig(**{**BART_LIKE, "max_position_embeddings": 30}))
    small, stats = strengthen(small), sg.Stats()
    actual = say(target("bart"), RAGGED, max_new_tokens=NEW + BEYOND, assistant=small, stats=stats)
    assert torch.equal(actual, truth("bart", "ragged"))
    assert stats.drafted > 0


class Copying(LogitsProcessor):
    """Makes every row repeat its source."""

    def __init__(self, prompt: Prompt) -> None:
        self.rows = prompt.rows

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        place = input_ids.shape[1] - 1
        for row, ids in zip(scores, self.rows, strict=True):
            row[ids[place % len(ids)]] += 1000
        return scores


@BATCHES
def test_prompt_lookup_copies_from_the_source(rows):
    """The source has no token twice, so that the decoder's own text is of no help."""
    prompt = Prompt(tuple(tuple(range(3 + 30 * i, 3 + 30 * i + 26)) for i in range(ROWS[rows].batch)))
    kwargs = {"logits_processor": LogitsProcessorList([Copying(prompt)]), "do_sample": False}
    stats = sg.Stats()
    lookup = sg.PromptLookup(2, num_assistant_tokens=8)
    actual = target("bart").generate(**source(prompt), max_new_tokens=24, assistant=lookup, stats=stats, **kwargs)
    assert actual[:, 1:].tolist() == [list(row[:24]) for row in prompt.rows]
    assert stats.mean_accepted_tokens > 4


def test_a_lookup_sees_no_padding_of_the_source():
    ids = torch.tensor([[7, 8, 9, 5, 0, 0], [5, 6, 7, 8, 9, 4]])
    read = Source(ids, torch.tensor([[1, 1, 1, 1, 0, 0], [1] * 6]), None)
    session = sg.PromptLookup(2).start(target("bart"), Request(batch=2, source=read))
    draft = session.propose(Context([[1, 7, 8], [1, 8, 9]], [3, 3]), Limit((3, 3), 3, chain=True))
    assert draft.tokens.tolist() == [[9, 5, 1], [4, 1, 8]]
    assert Source(torch.randn(2, 6), None, None).ids() is None
    assert Source(torch.randn(2, 6, 3), None, None).ids() is None
    assert Source(None, None, None).ids() is None


# ------------------------------------------------------------------------------------------------------ refusals


def refused(model: PreTrainedModel, message: str, **kwargs: Any) -> None:
    """Raises by name before the model or its encoder makes a pass."""
    for module in (model, model.get_encoder()):
        module.register_forward_pre_hook(lambda *_: pytest.fail("a forward pass was made"))
    with pytest.raises(ValueError, match=message):
        say(model, ONE, **{"assistant": sg.Plain(), **kwargs})


@pytest.mark.parametrize(
    ("message", "kwargs"),
    [
        ("takes greedy decoding and sampling, but the arguments ask for beam_search", {"num_beams": 2}),
        ("output_attentions=True is not supported", {"output_attentions": True, "return_dict_in_generate": True}),
        ("use_cache=False is not supported", {"use_cache": False}),
        ("assistant_model= asks for stock assisted generation", {"assistant_model": build("t5")}),
    ],
)
def test_arguments_are_refused_before_the_encoder_runs(message, kwargs):
    refused(sg.enable(build("t5")), message, **kwargs)


def prophetnet() -> PreTrainedModel:
    """Its decoder takes one token at a time."""
    sizes = {"hidden_size": 16, "encoder_ffn_dim": 16, "decoder_ffn_dim": 16, "max_position_embeddings": 64}
    config = hf.ProphetNetConfig(**sizes, num_encoder_layers=1, num_decoder_layers=1, **IDS)
    return hf.ProphetNetForConditionalGeneration(config).eval()


def fsmt() -> PreTrainedModel:
    """With a cache its decoder has no mask at all."""
    sizes = {key: value for key, value in BART_LIKE.items() if key != "vocab_size"}
    config = hf.FSMTConfig(**sizes, langs=["en", "de"], src_vocab_size=VOCAB, tgt_vocab_size=VOCAB)
    return hf.FSMTForConditionalGeneration(config).eval()


@pytest.mark.parametrize(("make", "kind"), [(prophetnet, "prophetnet"), (fsmt, "fsmt")])
def test_families_are_refused_before_their_encoder_runs(make, kind):
    refused(sg.enable(make()), rf"ForConditionalGeneration \({kind}\) cannot check several tokens", num_beams=1)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("t5gemma", "T5GemmaForConditionalGeneration cannot draft for this BartForConditionalGeneration: its sliding"),
        ("whisper", "cannot draft for this Bart.*: its encoder reads input_features, and the target's input_ids"),
        ("whisper decoder", "cannot draft for this Bart.*: it attends to states of size 16, and the target's have 32"),
    ],
)
def test_drafters_that_cannot_read_the_source(name, message):
    drafter = {"t5gemma": lambda: build("t5gemma"), "whisper": whisper, "whisper decoder": lambda: decoder_of(16)}[
        name
    ]()
    with pytest.raises(ValueError, match=message):
        say(target("bart"), ONE, assistant=drafter)


# ------------------------------------------------------------------------------------------------------- Whisper


def _whisper_config(size: int = 32) -> hf.WhisperConfig:
    sizes = {**BART, "d_model": size, "eos_token_id": EOS, "bos_token_id": START}
    del sizes["forced_eos_token_id"]
    positions = {"num_mel_bins": 8, "max_source_positions": 20, "max_target_positions": 64}
    return hf.WhisperConfig(**sizes, **positions, suppress_tokens=None, begin_suppress_tokens=None)


def whisper() -> PreTrainedModel:
    """Hears 40 frames at once; knows two languages, timestamps from id 70 on."""
    with torch.random.fork_rng():
        torch.manual_seed(1)
        model = strengthen(hf.WhisperForConditionalGeneration(_whisper_config()))
    known: Any = model.generation_config
    known.max_length, known.is_multilingual, known.alignment_heads = None, True, [[0, 0], [1, 1]]
    known.no_timestamps_token_id, known.prev_sot_token_id, known.max_initial_timestamp_index = 69, 64, 10
    known.lang_to_id, known.task_to_id = {"<|en|>": 60, "<|de|>": 61}, {"transcribe": 62, "translate": 63}
    return model


def decoder_of(size: int, weights: PreTrainedModel | None = None) -> PreTrainedModel:
    """A Whisper decoder that attends to another's encoder, as Distil-Whisper's does."""
    model = hf.WhisperForCausalLM(_whisper_config(size)).double().eval()
    if weights is not None:
        found = weights.state_dict()
        model.load_state_dict({name: found[name] for name in model.state_dict()})
    return model


HEARD = torch.randn(2, 8, 90, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
LONG = {"return_timestamps": True, "max_new_tokens": 16, "language": "en"}
UNEVEN = {"attention_mask": torch.tensor([[1] * 90, [1] * 60 + [0] * 30])}
WHISPERS: dict[str, dict[str, Any]] = {
    "one": {"frames": (1, 40), "language": "en", "max_new_tokens": 30},
    "two": {"frames": (2, 40), "language": "de", "task": "translate", "max_new_tokens": 30},
    "detected language": {"frames": (2, 40), "max_new_tokens": 30},
    "prompted": {"frames": (2, 40), "language": "en", "max_new_tokens": 30, "prompt_ids": torch.tensor([64, 5, 6])},
    "static": {"frames": (2, 40), "language": "en", "max_new_tokens": 30, "cache_implementation": "static"},
    "timestamps": {**LONG, "frames": (2, 40)},
    "long": {**LONG, "frames": (1, 90)},
    "long, two": {**LONG, **UNEVEN, "frames": (2, 90)},
    "long, two, conditioned": {**LONG, **UNEVEN, "frames": (2, 90), "condition_on_prev_tokens": True},
}
# The last two as people run it: hot again where a text is unlikely or repeats itself.
FALLBACK = {"temperature": (0.0, 0.4, 0.8), "logprob_threshold": -0.1, "compression_ratio_threshold": 1.35}
FALLBACK |= {"no_speech_threshold": 0.6, "seed": 3}


def transcribe(model: PreTrainedModel, case: dict[str, Any], **kwargs: Any) -> Any:
    batch, frames = case["frames"]
    given = {key: value for key, value in case.items() if key != "frames"}
    return model.generate(HEARD[:batch, :, :frames], **given, **kwargs)


@pytest.fixture
def hushed() -> Iterator[None]:
    """Transformers deprecates a way to call `generate` that its own Whisper uses, and says so once a process."""
    logger = logging.getLogger("transformers.generation.utils")

    def of_ours(record: logging.LogRecord) -> bool:
        return "Passing `generation_config` together" not in record.getMessage()

    logger.addFilter(of_ours)
    yield
    logger.removeFilter(of_ours)


@pytest.mark.usefixtures("hushed")
@pytest.mark.parametrize("case", WHISPERS)
def test_whisper_writes_what_stock_writes(case):
    """Segment by segment: its own `generate` calls the common one for each."""
    known = transcribe(whisper(), WHISPERS[case])
    model = sg.enable(whisper())
    shaken = noisy(model, 0.1)
    drafters = {"sibling": shaken, "distilled": decoder_of(32, shaken)}
    if not WHISPERS[case].get("return_timestamps"):
        drafters |= {"itself": model, "lookup": sg.PromptLookup(1)}
    for name, assistant in drafters.items():
        kwargs = {"assistant": assistant, "stats": sg.Stats(), "num_assistant_tokens": 5}
        stats = kwargs["stats"]
        assert torch.equal(transcribe(model, WHISPERS[case], **kwargs), known), name
        if name != "lookup":  # random texts seldom repeat
            assert stats.accepted > 0
            assert stats.accepted < stats.drafted or name == "itself"
        if name == "itself":
            assert stats.accepted >= stats.drafted - 5 * known.shape[0]  # what was drafted beyond an end


@pytest.mark.usefixtures("hushed")
def test_whisper_falls_back_as_with_plain_decoding():
    model = sg.enable(whisper())
    case = {**WHISPERS["long, two"], **FALLBACK}
    known = transcribe(model, case, assistant=sg.Plain())
    stats = sg.Stats()
    assert torch.equal(transcribe(model, case, assistant=noisy(model, 0.1), stats=stats), known)
    assert 0 < stats.accepted < stats.drafted
    assert not torch.equal(transcribe(model, WHISPERS["long, two"], assistant=sg.Plain()), known)


@pytest.mark.usefixtures("hushed")
def test_whisper_returns_what_stock_returns():
    stock, model, stats = whisper(), sg.enable(whisper()), sg.Stats()
    for one in (stock, model):
        one.generation_config.update(**OUTPUTS)
    known = transcribe(stock, WHISPERS["two"])
    actual = transcribe(model, WHISPERS["two"], assistant=noisy(model, 0.1), stats=stats)
    assert list(actual.keys()) == list(known.keys())
    assert 0 < stats.accepted < stats.drafted
    for key in set(known.keys()) - {"cache"}:
        torch.testing.assert_close(actual[key], known[key])


def test_whisper_s_timestamps_of_tokens_are_refused():
    model = sg.enable(whisper())
    model.register_forward_pre_hook(lambda *_: pytest.fail("a forward pass was made"))
    with pytest.raises(ValueError, match="return_token_timestamps= reads the attentions of every token"):
        transcribe(model, WHISPERS["two"], return_token_timestamps=True, assistant=sg.Plain())
    assert model.config._attn_implementation != "eager"


@pytest.mark.parametrize("kind", [hf.DynamicCache, hf.StaticCache])
def test_a_cache_without_a_part_for_the_encoder_is_refused(kind):
    """Stock's own text is wrong with one."""
    model = target("t5")
    kwargs = {"max_cache_len": 64} if kind is hf.StaticCache else {}
    cache = kind(config=model.config, **kwargs)
    refused(model, "mixes what T5ForConditionalGeneration keeps of its text", cache=cache, max_new_tokens=4)
