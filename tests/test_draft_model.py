"""A causal LM that drafts: whatever it is, where it is and how it is configured, the text is the target's own."""

import copy
import logging
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial

import pytest
import tiny
import torch
from generating import BATCHES, said, same_as_stock, tokenizer
from test_generate_processors import ALWAYS, SAMPLED, WARPERS
from tokenizers import Tokenizer
from transformers import GPT2Config, GPT2LMHeadModel
from two_devices import AWAY, HERE, TwoDevices, send_away

import hf_specgen as sg
from hf_specgen.draft import Context, Limit, Request
from hf_specgen.sampling import Noise, Processors
from hf_specgen.vocabulary import compare

ONE, RAGGED = tiny.ONE, tiny.RAGGED
BRANCHES = pytest.mark.parametrize("branches", [1, 3], ids=["chain", "tree"])
HOT = {"max_new_tokens": 16, "do_sample": True, "temperature": 3.0, "seed": 3}


def assisted(model, prompt, assistant, **kwargs):
    """The rows that an enabled model says, and what it took."""
    stats = sg.Stats()
    kwargs = {"max_new_tokens": 16, "do_sample": False, **kwargs}
    ids = sg.enable(model).generate(**prompt.inputs(), **kwargs, assistant=assistant, stats=stats)
    return ids[:, prompt.columns :].tolist(), stats


# Vocabularies


def test_equal_vocabularies_are_equal_token_by_token(model):
    assert compare(model, model, tokenizer(), tokenizer()) == "equal, token by token"


def test_without_both_tokenizers_only_sizes_are_compared_and_the_verdict_says_so(model):
    for known in ({}, {"tokenizer": tokenizer()}, {"drafter_tokenizer": tokenizer()}):
        verdict = compare(model, tiny.llama(vocab_size=104), **known)
        assert verdict.startswith("96 and 104 token ids: not verified")
    with pytest.raises(
        ValueError, match="target has 96 token ids and the drafter 1200: .* pass tokenizer= and".replace(".", r".")
    ):
        compare(model, tiny.llama(vocab_size=1200))


def test_the_size_is_that_of_the_text_model(model):
    """Report 85: a composite config, whose text model's table is padded."""

    class Composite(type(model.config)):
        text_config = tiny.llama(vocab_size=128).config
        vocab_size = None

        def get_text_config(self, *args, **kwargs):
            return self.text_config

    other = copy.deepcopy(model)
    other.config = Composite()
    assert compare(model, other).startswith("96 and 128 token ids")


def test_padded_tables_do_not_matter_where_the_tokenizers_agree(model):
    assert compare(model, tiny.llama(vocab_size=2000), tokenizer(), tokenizer()) == "equal, token by token"


@pytest.mark.parametrize("whose", ["target", "drafter"])
def test_two_unused_special_tokens_are_tolerated_with_one_warning(model, caplog, whose):
    """Report 88."""
    longer = tokenizer()
    longer.add_special_tokens({"additional_special_tokens": ["<one>", "<two>"]})
    pair = (longer, tokenizer()) if whose == "target" else (tokenizer(), longer)
    with caplog.at_level(logging.WARNING, logger="hf_specgen"):
        assert compare(model, model, *pair) == "equal but for special tokens"
    assert [record.message for record in caplog.records] == [
        "the vocabularies are equal but for special tokens; drafts that use those are lost"
    ]


def renamed(**names):
    """The shared tokenizer with some of its tokens called otherwise."""
    other = tokenizer()
    state = other.backend_tokenizer.to_str()
    for old, new in names.items():
        state = state.replace(f'"{old}"', f'"{new}"')
    special = {"pad_token": "<pad>", "bos_token": "<bos>", "eos_token": "<eos>"}
    return type(other)(tokenizer_object=Tokenizer.from_str(state), **special)


DOORS = pytest.mark.parametrize("door", ["call", "drafter", "partial"])


@DOORS
def test_another_vocabulary_is_refused_and_the_first_token_named(model, door):
    small, own = tiny.sibling(model), tokenizer()
    first, second = own.convert_ids_to_tokens([31, 40])
    other = renamed(**{second: "xyz", first: "uvw"})
    message = f"id 31 is {first!r} for the target and 'uvw' for the drafter .2 ids differ in all"
    kwargs = {"tokenizer": own, "assistant_tokenizer": other, "assistant": small}
    if door == "drafter":
        kwargs = {"tokenizer": own, "assistant": sg.DraftModel(small, tokenizer=other)}
    for module in (model, small):
        module.register_forward_pre_hook(lambda *_: pytest.fail("a forward pass was made"))
    if door == "partial":
        bound = {name: kwargs.pop(name) for name in ("tokenizer", "assistant_tokenizer")}
        kwargs["custom_generate"] = partial(sg.speculate, **bound)
    else:
        sg.enable(model)
    with pytest.raises(ValueError, match=message):
        model.generate(**ONE.inputs(), max_new_tokens=8, **kwargs)


def test_a_token_that_one_side_lacks_is_named(model):
    with pytest.raises(ValueError, match="only the target knows id 95"):
        compare(model, model, tokenizer(), tokenizer(95))
    with pytest.raises(ValueError, match="only the drafter knows id 95"):
        compare(model, model, tokenizer(95), tokenizer())


@BRANCHES
@BATCHES
@pytest.mark.parametrize("size", [60, 90, 104, 150])
@pytest.mark.parametrize("kwargs", [{}, {"forced_eos_token_id": 95}], ids=["", "forced"])
def test_a_wider_or_narrower_table_changes_no_text(model, prompt, branches, size, kwargs):
    """Reports 85 and 92. The narrower ones do not hold all of the prompt's ids, nor all that is said."""
    small = tiny.llama(vocab_size=size)
    with torch.no_grad():
        for name, weight in small.named_parameters():
            own = dict(model.named_parameters())[name]
            shared = min(len(weight), len(own))
            weight[:shared] = own[:shared]
    drafter = sg.DraftModel(small, branches=branches)
    expected = said(model, prompt, 16)
    rows, stats = assisted(model, prompt, drafter)
    assert rows == expected
    # With two ids in five unknown its guesses are poor.
    assert stats.accepted > 0 or size == 60
    plain, _ = assisted(model, prompt, sg.Plain(), **HOT, **kwargs)
    rows, _ = assisted(model, prompt, drafter, **HOT, **kwargs)
    assert rows == plain


@pytest.mark.parametrize("acceptance", ["rejection", "block"])
@pytest.mark.parametrize("size", [60, 104])
def test_rejection_aligns_unequal_widths(model, acceptance, size):
    """Report 86: what the drafter lacks has no draft probability, what the target lacks no place."""
    small = tiny.llama(vocab_size=size)
    drawn = []

    def watch(draft):
        drawn.append(draft)
        return draft

    rows, stats = assisted(model, RAGGED, Altered(sg.DraftModel(small), watch), **HOT, acceptance=acceptance)
    assert stats.tokens == 16 * 3
    assert max(max(row) for row in rows) < tiny.VOCAB
    for draft in drawn:
        assert draft.probs.shape == (3, draft.nodes, tiny.VOCAB)
        assert torch.allclose(draft.probs.sum(-1), torch.ones(()))
        assert int(draft.tokens.max()) < min(size, tiny.VOCAB)
        assert float(draft.probs[..., size:].sum()) == 0


# What the drafter is and how it is set up


@dataclass
class Altered:
    """Another drafter, whose drafts are passed through a function."""

    drafter: object
    change: object
    num_assistant_tokens: int = 5
    sessions: list = field(default_factory=list)

    def start(self, target, request):
        self.sessions.append(self.drafter.start(target, request))
        return AlteredSession(self.sessions[-1], self.change)


@dataclass
class AlteredSession:
    session: object
    change: object
    needs: object = sg.Needs()

    def propose(self, context, limit):
        return self.change(self.session.propose(context, limit))


@BRANCHES
@BATCHES
def test_a_target_that_drafts_for_itself_is_always_right(model, prompt, branches):
    """The same object on both sides, with a cache each. A beam may lose the best path, so trees come close."""
    expected = said(model, prompt)
    rows, stats = assisted(model, prompt, sg.DraftModel(model, branches=branches), max_new_tokens=24)
    assert rows == expected
    # One token from the prompt, then 6, 6, 6 and 5.
    assert stats.rounds - 4 in range(branches - 1 or 1)
    assert stats.accepted == 24 * prompt.batch - stats.first_tokens - stats.row_rounds


@pytest.mark.parametrize("every", [1, 2, 3])
@BATCHES
def test_the_drafter_s_cache_follows_what_was_decided(model, prompt, every):
    """Reports 19 and 20: after forced rejections the rest is still right, so the drafter saw the true text in place."""
    kept = []

    def spoil(draft):
        tokens = draft.tokens.clone()
        tokens[:, every::4] = (tokens[:, every::4] + 1) % tiny.VOCAB
        kept.append(min(every, draft.nodes))
        return sg.Draft(tokens, draft.parents, is_chain=True)

    altered = Altered(sg.DraftModel(model), spoil)
    rows, stats = assisted(model, prompt, altered, max_new_tokens=60)
    assert rows == said(model, prompt, 60)
    assert stats.accepted == sum(kept) * prompt.batch
    (session,) = altered.sessions
    # Before the last round's tokens, of which there may be six.
    for row, held in enumerate(session.runner.cache.lengths):
        whole = len(prompt.rows[row]) + 60
        assert whole - 6 - 6 <= held <= whole


@contextmanager
def fed(model):
    """(ids, positions) of every pass."""
    passes = []

    def note(module, args, kwargs):
        passes.append((kwargs["input_ids"], kwargs["position_ids"]))

    handle = model.register_forward_pre_hook(note, with_kwargs=True)
    try:
        yield passes
    finally:
        handle.remove()


@BRANCHES
@BATCHES
def test_the_drafter_sees_every_token_at_its_true_position(model, prompt, branches):
    """Reports 20 and 71, report 116 for the padded rows: never an empty pass, never a place that is not the token's."""
    small, rows = tiny.sibling(model), said(model, prompt)
    kwargs = {**prompt.inputs(), "max_new_tokens": 24, "do_sample": False}
    decided, used = [0] * prompt.batch, 0
    with fed(small) as passes:
        for step in sg.stream(sg.enable(model), **kwargs, assistant=sg.DraftModel(small, branches=branches)):
            decided = [before + len(tokens) for before, tokens in zip(decided, step.tokens, strict=True)]
            if used and max(decided) == 24:
                break  # a row that has ended takes part with a stand-in
            used = len(passes)
    assert all(ids.shape[1] >= 1 for ids, _ in passes)
    for row, (before, after) in enumerate(zip(prompt.rows, rows, strict=True)):
        seen = {
            (int(position), int(token))
            for ids, positions in passes[:used]
            for position, token in zip(positions.expand(len(ids), -1)[row], ids[row], strict=True)
        }
        text = [*before, *after]
        # All of the text but what the last round decided; what else was shown was guessed, and lies behind the prompt.
        assert seen >= set(enumerate(text[: len(before) + decided[row] - 12]))
        padded = {0} if len(before) < prompt.columns or prompt.batch > 1 else set()
        assert {place for place, token in seen if token not in text[place : place + 1]} - padded <= set(
            range(len(before), len(text) + 5)
        )


@BRANCHES
@BATCHES
@pytest.mark.parametrize("mode", ["greedy", "sampled"])
def test_a_drafter_in_train_mode_drafts_in_eval_mode_and_stays_as_it_is(model, prompt, branches, mode):
    """Report 83. With dropout its drafts would be worse, and not the same twice."""
    small = tiny.llama(attention_dropout=0.5).train()
    small.model.layers[0].eval()
    flags = [module.training for module in small.modules()]
    parameters = [(id(tensor), tensor.data_ptr()) for tensor in small.parameters()]
    kwargs = {"max_new_tokens": 16, "num_assistant_tokens": 3}
    if mode == "sampled":
        kwargs |= HOT
    expected, _ = assisted(model, prompt, sg.Plain(), **kwargs)
    for _ in range(2):
        rows, stats = assisted(model, prompt, sg.DraftModel(small, branches=branches), **kwargs)
        assert rows == expected
        assert stats.acceptance_rate * branches > (0.9 if branches > 1 else 0.99)
    assert [module.training for module in small.modules()] == flags
    assert [(id(tensor), tensor.data_ptr()) for tensor in small.parameters()] == parameters
    # The view shares the parameters: after a training step it drafts with the new ones.
    with torch.no_grad():
        small.lm_head.weight.neg_()
    _, stats = assisted(model, prompt, sg.DraftModel(small, branches=branches), **kwargs)
    assert stats.acceptance_rate < 0.2


def test_the_view_of_a_drafter_in_train_mode_holds_no_copy_of_its_weights(model):
    small = tiny.llama(attention_dropout=0.5).train()
    session = sg.DraftModel(small).start(model, Request(batch=1))
    assert session.model is not small
    own = {tensor.data_ptr() for tensor in (*small.parameters(), *small.buffers())}
    assert {tensor.data_ptr() for tensor in (*session.model.parameters(), *session.model.buffers())} == own
    assert sg.DraftModel(small.eval()).start(model, Request(batch=1)).model is small


def test_a_drafter_s_own_generation_config_is_neither_read_nor_written(model, caplog):
    """Reports 70 and 74: no message that plain decoding does not give either."""
    small = tiny.sibling(model)
    config = small.generation_config
    config.max_length, config.do_sample, config.top_k, config.eos_token_id = 3, True, 1, list(range(96))
    config.num_assistant_tokens, config.num_assistant_tokens_schedule = 2, "heuristic"
    before = config.to_dict()
    expected = said(model, ONE)
    with caplog.at_level(logging.WARNING):
        rows, stats = assisted(model, ONE, small, max_new_tokens=24)
    assert rows == expected
    assert stats.accepted > 5
    assert config.to_dict() == before
    assert caplog.records == []


def test_num_assistant_tokens_of_a_config_is_not_read(model):
    """Only the call's argument counts: every generation config carries stock's 20."""
    model.generation_config.num_assistant_tokens = 9
    drafted = []
    small = Altered(sg.DraftModel(model), lambda draft: drafted.append(draft.nodes) or draft)
    assisted(model, ONE, small, max_new_tokens=30)
    assert max(drafted) == 5
    drafted.clear()
    assisted(model, ONE, small, max_new_tokens=30, num_assistant_tokens=2)
    assert max(drafted) == 2


def test_generate_of_the_drafter_is_never_called(model, monkeypatch):
    small = tiny.sibling(model)
    monkeypatch.setattr(small, "generate", lambda *_, **__: pytest.fail("generate was called"))
    rows, stats = assisted(model, RAGGED, small)
    assert rows == said(model, RAGGED, 16)
    assert stats.accepted > 0


def gpt2(positions):
    """A drafter with a table of positions, beyond which a pass fails."""
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=tiny.VOCAB,
        n_embd=32,
        n_layer=1,
        n_head=4,
        n_positions=positions,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=0,
    )
    return GPT2LMHeadModel(config).double().eval()


@BRANCHES
@pytest.mark.parametrize("positions", [5, 8, 20, 21, 22, 23, 24, 30, 64])
def test_beyond_the_drafter_s_positions_rows_are_decoded_plainly(model, branches, positions, caplog):
    """Reports 109 and 110: row by row, with one warning."""
    prompt = tiny.Prompt.random((20, 1), (4, 2), (17, 3))
    depths = []

    def note(draft):
        depths.append((draft.parents >= 0).any(1).tolist() if draft.nodes else [False] * 3)
        return draft

    with caplog.at_level(logging.WARNING, logger="hf_specgen"):
        small = Altered(sg.DraftModel(gpt2(positions), branches=branches), note)
        rows, _ = assisted(model, prompt, small)
    assert rows == said(model, prompt, 16)
    assert len(caplog.records) == (positions < 36)
    if positions < 20:
        assert not any(long for long, _, _ in depths)
    if positions in (8, 20):
        # The long row has no drafts and the short one goes on with its own.
        assert any(short and not long for long, short, _ in depths)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@BRANCHES
@BATCHES
def test_a_drafter_with_a_sliding_window_goes_on_beyond_it(prompt, attention, branches):
    """Report 8; it drafts for a twin, and so is right every time, but for what a beam loses."""
    model, small = tiny.mistral(attention), tiny.mistral(attention)
    rows, stats = assisted(model, prompt, sg.DraftModel(small, branches=branches), max_new_tokens=24)
    assert rows == said(model, prompt)
    assert stats.rounds - 4 in range(branches - 1 or 1)


# Sampling


@torch.no_grad()
def first_draft(model, drafter, noise, **request):
    """What a drafter proposes behind the one prompt of a sampled call."""
    session = drafter.start(model, Request(batch=1, sampled=True, **request))
    context = Context(ids=[list(ONE.rows[0])], positions=[ONE.columns], noise=noise)
    return session.propose(context, Limit((4,), nodes=12, chain=request.get("chain", False)))


@BRANCHES
def test_drafts_are_sampled_or_the_most_likely_tokens(model, branches):
    """Report 41: with `sample` they vary with the seed, and q is soft where it is wanted; without they never do."""
    drafts = {True: set(), False: set()}
    for sample, found in drafts.items():
        for seed in range(5):
            drafter = sg.DraftModel(model, sample=sample, branches=branches)
            request = {"chain": branches == 1, "wants_probs": branches == 1}
            draft = first_draft(model, drafter, Noise.of(seed, 1, "cpu"), **request)
            found.add(tuple(draft.tokens[0].tolist()))
            assert (draft.probs is not None) == (sample and branches == 1)
    assert len(drafts[True]) > 1
    assert len(drafts[False]) == 1
    if branches == 1:
        assert drafts[False] == {tuple(said(model, ONE)[0][:4])}


@BRANCHES
@BATCHES
@pytest.mark.parametrize("sample", [False, True])
def test_sampled_text_does_not_depend_on_how_drafts_are_chosen(model, prompt, branches, sample):
    """Report 44: not on the branches of a tree either."""
    drafter = sg.DraftModel(tiny.sibling(model), sample=sample, branches=branches)
    expected, _ = assisted(model, prompt, sg.Plain(), **HOT)
    rows, stats = assisted(model, prompt, drafter, **HOT)
    assert rows == expected
    assert 0 < stats.accepted < stats.drafted


def test_q_is_what_the_draft_was_drawn_from(model):
    """Report 40: after top-k and temperature, in float32, and the very numbers that the noise was added to."""
    config = type(model.generation_config)(do_sample=True, top_k=5, temperature=2.0)
    warpers = model._get_logits_processor(config, input_ids_seq_length=ONE.columns)
    wishes = {"wants_probs": True, "processors": Processors(warpers), "chain": True}
    ids = torch.tensor(ONE.rows)
    places = ONE.columns + torch.arange(4).unsqueeze(0)
    drawn = set()
    for seed in range(20):
        noise = Noise.of(seed, 1, "cpu").stream("draft", torch.tensor([ONE.columns]))
        draft = first_draft(model, sg.DraftModel(model), noise, **wishes)
        assert draft.probs.dtype == torch.float32
        assert ((draft.probs > 0).sum(-1) == 5).all()
        assert torch.equal(noise.at(places, places[:, 0]).argmax(draft.probs.log()), draft.tokens)
        with torch.no_grad():
            logits = model(torch.cat([ids, draft.tokens], dim=1)).logits[0, ONE.columns - 1 : -1].float()
        torch.testing.assert_close(draft.probs[0], warpers(ids, logits).softmax(-1), rtol=1e-4, atol=1e-6)
        drawn.add(int(draft.tokens[0, 0]))
    assert len(drawn) > 1


@pytest.mark.parametrize("acceptance", ["matching", "rejection", "block"])
def test_other_seeds_say_other_things_and_the_same_seed_the_same(model, acceptance):
    """Reports 46 and 47, under the rules that draw their own numbers too."""
    small = tiny.sibling(model)

    def spoken():
        kwargs = {**HOT, "acceptance": acceptance}
        return [assisted(model, RAGGED, small, **{**kwargs, "seed": seed})[0] for seed in range(5)]

    once = spoken()
    assert once == spoken()
    assert len({str(rows) for rows in once}) == 5


UNPADDED = tiny.Prompt.random((9, 1), (9, 2), (9, 3))
# A drafter may not run these, or not exactly: they keep a state, or look at the whole batch.
TARGET_S_OWN = {
    "UnbatchedClassifierFreeGuidanceLogitsProcessor",
    "EncoderRepetitionPenaltyLogitsProcessor",
    "EncoderNoRepeatNGramLogitsProcessor",
    "PrefixConstrainedLogitsProcessor",
    "WatermarkLogitsProcessor",
    "SynthIDTextWatermarkLogitsProcessor",
}


@BRANCHES
@pytest.mark.parametrize("prompt", [ONE, UNPADDED], ids=["one", "three"])
@pytest.mark.parametrize("name", sorted({*ALWAYS, *WARPERS} - TARGET_S_OWN))
def test_draft_processors_are_the_target_s(model, prompt, branches, name):
    """Report 55: a target that drafts for itself is right, but for what a beam loses, whatever the processors do."""
    if name in WARPERS:
        kwargs = {**SAMPLED, **WARPERS[name], "seed": 3}
    else:
        kwargs = {"do_sample": False, **ALWAYS[name](said(model, prompt, 16), prompt.columns)}
    drafter = sg.DraftModel(model, branches=branches)
    rows, stats = assisted(model, prompt, drafter, **kwargs)
    assert rows == assisted(model, prompt, sg.Plain(), **kwargs)[0]
    # One token from the prompt, then 6, 6 and 3.
    assert stats.rounds - -(-(max(map(len, rows)) - 1) // 6) in range(branches - 1 or 1)


def test_two_identical_calls_draft_the_same(model):
    """Reports 70 and 143: nothing is learned from one call to the next."""
    small = tiny.sibling(model)
    counts = []
    for prompt in (ONE, RAGGED, ONE, RAGGED, ONE):
        _, stats = assisted(model, prompt, small)
        counts.append((stats.rounds, stats.drafted, stats.accepted))
    assert counts[0] == counts[2] == counts[4]
    assert counts[1] == counts[3]


# Devices

MODES = {
    "greedy": {},
    "sampled": HOT,
    "at once": {**HOT, "min_p": 0.01, "suppress_tokens": [5, 6]},
    "by step": {
        "repetition_penalty": 1.2,
        "min_new_tokens": 9,
        "bad_words_ids": [[8], [3, 4]],
        "eos_token_id": [7, 60],
    },
    "penalties": {"exponential_decay_length_penalty": (3, 1.2), "eos_token_id": 7, "begin_suppress_tokens": [4]},
    "rejection": {**HOT, "acceptance": "rejection"},
    "block": {**HOT, "acceptance": "block"},
}


@BRANCHES
@pytest.mark.parametrize("mode", MODES)
def test_a_drafter_on_another_device(model, branches, mode):
    """Report 79: ids go to it, drafts come back, and nothing else meets."""
    small = tiny.sibling(model)
    drafter = sg.DraftModel(small, branches=branches)
    expected, near = assisted(model, RAGGED, drafter, **MODES[mode])
    send_away(small)
    with TwoDevices() as world:
        assert (small.device, model.device) == (AWAY, HERE)
        rows, far = assisted(model, RAGGED, drafter, **MODES[mode])
    assert rows == expected
    assert (near.drafted, near.accepted, near.rounds) == (far.drafted, far.accepted, far.rounds)
    assert {away for away, _ in world.moves} == {True, False}
    assert all(len(shape) < 3 or "rejection" in mode or "block" in mode for away, shape in world.moves if not away)


@pytest.mark.cuda
@BRANCHES
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("where", ["cpu to cuda", "cuda to cpu", "cuda to cuda"])
def test_a_drafter_on_another_real_device(branches, mode, where):
    """Report 79."""
    home, away = where.split(" to ")
    model, small = tiny.llama().to(home), tiny.sibling(tiny.llama()).to(away)
    inputs = {name: tensor.to(home) for name, tensor in RAGGED.inputs().items()}
    kwargs = {**inputs, "max_new_tokens": 16, "do_sample": False, **MODES[mode]}
    stats = sg.Stats()
    drafter = sg.DraftModel(small, branches=branches)
    ids = sg.enable(model).generate(**kwargs, assistant=drafter, stats=stats)
    assert ids.device == model.device
    assert stats.accepted > 0
    if "acceptance" not in kwargs:
        assert torch.equal(ids, model.generate(**kwargs, assistant=sg.Plain()))
    if not kwargs["do_sample"]:
        same_as_stock(model, drafter, **{name: value for name, value in kwargs.items() if name != "do_sample"})
