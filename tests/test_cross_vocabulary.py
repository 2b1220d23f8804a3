"""A drafter with another tokenizer: what is shared, the two texts kept in step, and what is carried back."""

from __future__ import annotations

import codecs
import copy
import itertools
import random
from collections.abc import Sequence
from typing import Any

import families
import pytest
import tiny
import tongues
import torch
from generating import counted
from tiny import Prompt
from tongues import OTHER, TEXT, reader, tokenizer

import hf_specgen as sg
from hf_specgen.draft import Context, Draft, DraftSession, Limit, Request
from hf_specgen.drafters.carry import NGrams, by_place, by_warping, unlike
from hf_specgen.drafters.cross_vocabulary import CrossVocabulary, CrossVocabularySession
from hf_specgen.drafters.retokenize import Translation
from hf_specgen.sampling import Noise
from hf_specgen.spelling import Pair, Piece, Speller

METHODS = ["tli", "slem", "timing", "ngram"]
LOSSLESS = ["small", "large", "spaced", "llama"]
# The target's tokenizer and the drafter's.
PAIRS = [
    ("large", "small"),
    ("small", "large"),
    ("large", "llama"),
    ("llama", "spaced"),
    ("llama", "llama"),
    ("large", "unigram"),
    ("unigram", "spaced"),
    ("large", "lower"),
    ("lower", "small"),
]
NEW = 24
# Samples of a distribution; with so many a wrong one is found out.
ROWS = 3_000


def pair_of(target: str, drafter: str) -> Pair:
    words = tokenizer(target), tokenizer(drafter)
    return Pair.of(words, (len(words[0]), len(words[1])))


def ids_of(name: str, text: str = TEXT) -> list[int]:
    ids: list[int] = tokenizer(name)(text)["input_ids"]
    return ids


def read(name: str, *starts: tuple[int, int]) -> Prompt:
    """Rows that are parts of the text, from and to the given token."""
    return Prompt(tuple(tuple(ids_of(name)[start:end]) for start, end in starts))


def crossed(drafter: str, method: str = "auto", text: str = OTHER, **changed: Any) -> CrossVocabulary:
    return CrossVocabulary(reader(drafter, text), tokenizer(drafter), method=method, **changed)  # type: ignore[arg-type]


def generate(target: str, prompt: Prompt, assistant: Any, **kwargs: Any) -> torch.Tensor:
    arguments = {"max_new_tokens": NEW, "do_sample": False, "num_assistant_tokens": 6, "tokenizer": tokenizer(target)}
    ids: torch.Tensor = reader(target).generate(**{**prompt.inputs(), **arguments, **kwargs}, assistant=assistant)
    return ids


# ------------------------------------------------------------------------------------------------ the slow, obvious way


def text_of_all(ids: Sequence[int], speller: Speller) -> list[str | int]:
    """Runs of text and the special tokens between them; half a character at the end is left out."""
    parts: list[str | int] = []
    run = b""
    for token in [*ids, None]:
        said = None if token is None else speller.spelled[token]
        if said is not None:
            run += said
            continue
        if run:
            parts.append(codecs.getincrementaldecoder("utf-8")("replace").decode(run, final=token is not None))
        if token is not None:
            parts.append(token)
        run = b""
    texts = [place for place, part in enumerate(parts) if isinstance(part, str)]
    for later, place in enumerate(texts):
        if speller.inserts[later > 0]:
            parts[place] = str(parts[place]).removeprefix(" ")
    return parts


def all_over_again(ids: Sequence[int], pair: Pair) -> list[int]:
    """The whole text decoded, and the whole of it encoded."""
    translated = list(pair.drafter.lead)
    for part in text_of_all(ids, pair.target):
        if isinstance(part, str):
            translated += [piece.id for piece in pair.drafter.encode(part)]
        elif (partner := pair.shared.to_drafter.get(part)) is not None and translated != [partner]:
            translated.append(partner)
    return translated


def slowly(drafter: CrossVocabulary, target: str, ids: Sequence[int], depth: int) -> list[int]:
    """What a session of greedy decoding drafts behind `ids`, from nothing that was kept."""
    words = drafter.tokenizer
    pair = Pair.of((tokenizer(target), words), (len(tokenizer(target)), len(words)))
    translated, drafted = all_over_again(ids, pair), []
    for _ in range(depth):
        logits = drafter.model(torch.tensor([[*translated, *drafted]])).logits[0, -1]
        if drafter.method == "tli":
            known = logits.new_full(logits.shape, -torch.inf)
            known[list(pair.shared.to_target)] = 0
            logits = logits + known
        drafted.append(int(logits.argmax()))
    if drafter.method == "tli":
        return [pair.shared.to_target[token] for token in drafted]
    if drafter.method == "ngram":
        ngrams = NGrams(pair)
        ngrams.learn(ids)
        return [token for token, _ in ngrams.merged(drafted, [1.0] * depth)]
    before, drawn = text_of_all(ids, pair.target), b""
    for token in drafted:
        if pair.drafter.spelled[token] is None:
            break
        drawn += pair.drafter.spelled[token] or b""
    text = codecs.getincrementaldecoder("utf-8")("replace").decode(drawn)
    last = str(before[-1]) if isinstance(before[-1], str) else ""
    pieces = pair.target.encode(last + text)
    if any(piece.start < len(last) < piece.end for piece in pieces):
        pieces = [piece for piece in pair.target.encode(f"\n{text}") if piece.start]
        last = "\n"
    words_of_text = [piece.id for piece in pieces if piece.start >= len(last)]
    unknown = [place for place, token in enumerate(words_of_text) if pair.target.spelled[token] is None]
    return words_of_text[: min([depth, *unknown])]


# --------------------------------------------------------------------------------------------------- what ids stand for


@pytest.mark.parametrize("name", LOSSLESS)
def test_report_91_what_tokens_stand_for_adds_up_to_the_text(name):
    """Double spaces, line ends and what is not ASCII come back as they went in."""
    speller = Speller.of(tokenizer(name))
    said = b"".join(speller.spelled[token] or b"" for token in ids_of(name))
    assert said.decode().removeprefix(" " if speller.inserts[0] else "") == TEXT


@pytest.mark.parametrize("name", ["small", "large", "llama", "lower"])
def test_what_a_token_stands_for_is_what_it_decodes_to_behind_another(name):
    words, speller = tokenizer(name), Speller.of(tokenizer(name))
    first = next(i for i, said in enumerate(speller.spelled) if said and words.decode([i]).isalnum())
    before = words.decode([first])
    for i, said in enumerate(speller.spelled):
        if said is not None and "�" not in words.decode([i]):
            both = words.decode([first, i], clean_up_tokenization_spaces=False)
            assert both == before + said.decode(), words.convert_ids_to_tokens(i)
    for i in words.all_special_ids:
        assert speller.spelled[i] is None


def test_a_speller_is_made_once_and_anew_when_tokens_were_added():
    words = copy.deepcopy(tokenizer("small"))
    known = Speller.of(words)
    assert Speller.of(words) is known
    words.add_tokens(["other thing"])
    assert Speller.of(words).spelled[-1] == b"other thing"
    words.add_special_tokens({"additional_special_tokens": ["<|turn|>"]})
    assert Speller.of(words).special["<|turn|>"] == len(words) - 1


def test_the_users_tokenizer_is_neither_used_nor_changed():
    words = copy.deepcopy(tokenizer("small"))
    words.backend_tokenizer.enable_truncation(3)
    words.backend_tokenizer.enable_padding(length=9)
    before = words.backend_tokenizer.to_str()
    assert [piece.id for piece in Speller.of(words).encode(TEXT)] == ids_of("small")
    assert words.backend_tokenizer.to_str() == before


def test_a_special_token_that_is_spelled_out_is_text():
    speller = Speller.of(tokenizer("small"))
    assert all(speller.spelled[piece.id] is not None for piece in speller.encode("a</s>b"))


@pytest.mark.parametrize("names", PAIRS)
def test_shared_ids_stand_for_the_same_and_have_one_partner(names):
    pair = pair_of(*names)
    pairs = list(pair.shared.to_target.items())
    assert len({ours for _, ours in pairs}) == len(pairs) == len(pair.shared.to_drafter) > 20
    for theirs, ours in pairs:
        said = pair.drafter.spelled[theirs]
        assert said == pair.target.spelled[ours] if said is not None else pair.target.spelled[ours] is None
    rest = set(filter(None, pair.target.spelled)) - {pair.target.spelled[ours] for ours in pair.shared.to_drafter}
    assert not rest & {pair.drafter.spelled[i] for i in pair.shared.alone.tolist()}, "a partner was overlooked"


# ----------------------------------------------------------------------------------------------------- the text in step


@pytest.mark.parametrize("names", PAIRS)
@pytest.mark.parametrize("seed", range(3))  # the last shuffles
def test_a_translation_that_grows_is_that_of_the_whole_text(names, seed):
    pair, chance = pair_of(*names), random.Random(seed)
    ids = [token for _ in range(3) for token in ids_of(names[0])]
    if seed == 2:  # words in any order, so that they are cut and joined in many ways
        chance.shuffle(ids)
    translation, read_so_far = Translation(pair), chance.randrange(1, 30)
    while read_so_far < len(ids):
        before = list(translation.ids)
        stayed = translation.update(ids[:read_so_far])
        assert translation.ids[:stayed] == before[:stayed]
        assert stayed == len(before) or translation.ids[stayed : stayed + 1] != before[stayed : stayed + 1]
        assert translation.ids == all_over_again(ids[:read_so_far], pair) or translation.pending
        read_so_far += chance.choice([1, 1, 1, 2, 3, 7])


def test_what_is_frozen_stays():
    pair = pair_of("small", "large")
    translation, ids = Translation(pair), ids_of("small")
    for end in range(1, len(ids)):
        before = list(translation.ids)
        assert translation.update(ids[:end], frozen=len(before)) == len(before)
        assert translation.ids[: len(before)] == before
    said = b"".join(pair.drafter.spelled[token] or b"" for token in translation.ids)
    assert TEXT.startswith(said.decode())


@pytest.mark.parametrize("names", [("llama", "llama"), ("llama", "lower"), ("large", "llama"), ("small", "llama")])
def test_report_91_there_is_one_bos_at_most(names):
    """And it is the first that the drafter is fed, in every round."""
    drafter, seen = crossed(names[1], "slem"), []
    hook = drafter.model.register_forward_pre_hook(
        lambda module, args, kwargs: seen.extend(kwargs["input_ids"][0].tolist()), with_kwargs=True
    )
    try:
        generate(names[0], read(names[0], (0, 12)), drafter)
    finally:
        hook.remove()
    lead = Speller.of(tokenizer(names[1])).lead
    assert seen[: len(lead)] == lead
    assert not set(lead) & set(seen[len(lead) :])


def test_special_tokens_have_partners_of_their_own_or_none():
    ours, theirs = copy.deepcopy(tokenizer("small")), copy.deepcopy(tokenizer("large"))
    for words, more in (ours, ["<|turn|>", "<|mine|>"]), (theirs, ["<|yours|>", "<|turn|>"]):
        words.add_special_tokens({"additional_special_tokens": more})
    pair = Pair.of((ours, theirs), (len(ours), len(theirs)))
    ids = ours("<|turn|>user the<|turn|><|mine|> thing</s>")["input_ids"]
    translation = Translation(pair)
    translation.update(ids)
    assert translation.ids == theirs("<|turn|>user the<|turn|> thing</s>")["input_ids"]


def test_half_a_character_is_waited_for():
    pair, ids = pair_of("small", "large"), ids_of("small", "oh 🙂 the")
    translation, waited = Translation(pair), []
    for end in range(1, len(ids) + 1):
        translation.update(ids[:end])
        waited.append(translation.pending)
    said = [pair.target.spelled[token] or b"" for token in ids]
    assert waited == ["�" in b"".join(said[:end]).decode(errors="replace") for end in range(1, len(ids) + 1)]
    assert sum(waited) > 1
    assert translation.ids == ids_of("large", "oh 🙂 the")
    session = crossed("large").start(reader("small"), Request(1, tokenizer=tokenizer("small")))
    for end, waits in enumerate(waited, 1):
        draft = session.propose(Context([ids[:end]], [end]), Limit((4,), 4, True))
        assert (draft.nodes == 0) == waits


@pytest.mark.parametrize("method", METHODS)
def test_the_work_of_a_round_does_not_grow_with_the_text(method, monkeypatch):
    # counted, not timed: characters that are tokenised again, and tokens that the drafter is fed
    encoded: list[int] = []
    encode = Speller.encode
    monkeypatch.setattr(Speller, "encode", lambda self, text: encoded.append(len(text)) or encode(self, text))
    ids = ids_of("small")
    most = []
    for length in 1_000, 8_000:
        row = (ids * 40)[:length]
        session = crossed("large", method).start(reader("small"), Request(1, tokenizer=tokenizer("small")))
        counts = []
        with counted(session.model) as fed:
            for end in range(length - 40, length, 2):
                encoded.clear(), fed.clear()
                session.propose(Context([row[:end]], [end]), Limit((4,), 4, True))
                counts.append((sum(encoded), sum(fed)))
        most.append(tuple(map(max, zip(*counts[1:], strict=True))))
    (few_characters, few_tokens), (characters, tokens) = most
    assert characters <= 1.5 * few_characters < 1_000
    assert tokens <= few_tokens + 4 < 40


# --------------------------------------------------------------------------------------------------------- carried back


def test_chances_go_to_the_token_in_which_they_begin():
    pieces = [Piece(0, 0, 3), Piece(1, 3, 4), Piece(2, 4, 9)]
    assert by_place([0, 1, 5, 8], [0.5, 0.5, 0.25, 0.5], pieces) == [0.25, 1.0, 0.125]


def test_warping_takes_the_cheapest_of_all_paths():
    def paths(i, j):
        """Every way to (i, j), as pairs."""
        if i == j == 0:
            return [[(0, 0)]]
        steps = [(i - 1, j - 1), (i - 1, j), (i, j - 1)]
        return [[*path, (i, j)] for a, b in steps if min(a, b) >= 0 for path in paths(a, b)]

    chance = random.Random(0)
    for _ in range(60):
        words = ["".join(chance.choices("ab", k=chance.randint(1, 3))) for _ in range(chance.randint(1, 4))]
        others = ["".join(chance.choices("ab", k=chance.randint(1, 3))) for _ in range(chance.randint(1, 4))]
        chances = [chance.random() for _ in words]
        cost = {
            tuple(path): sum(unlike(words[i], others[j]) for i, j in path)
            for path in paths(len(words) - 1, len(others) - 1)
        }
        allowed = []
        for path, total in cost.items():
            if total <= min(cost.values()) + 1e-9:
                carried = [1.0] * len(others)
                for i in range(len(words)):
                    carried[min(b for a, b in path if a == i)] *= chances[i]
                allowed.append(carried)
        found = by_warping(words, chances, others)
        assert any(found == pytest.approx(carried) for carried in allowed)


def test_warping_pairs_what_looks_alike():
    words, others = ["The", " quick", " bro", "wn"], ["the", " qu", "ick", " brown"]
    assert by_warping(words, [0.9, 0.8, 0.7, 0.6], others) == pytest.approx([0.9, 0.8, 1.0, 0.42])


def test_ngrams_are_learned_and_the_longest_is_merged():
    pair = pair_of("large", "small")
    ngrams, words, long = NGrams(pair), tokenizer("small"), tokenizer("large")
    token = max(long.get_vocab().items(), key=lambda known: len(known[0]) * known[0][1:].isascii())[1]
    drafted = words(long.decode([token]), add_special_tokens=False)["input_ids"]
    chances = [0.5] * len(drafted)
    singly = [pair.shared.to_target[i] for i in drafted]
    assert ngrams.merged(drafted, chances) == [(i, 0.5) for i in singly]
    ngrams.learn([token, token, *ids_of("large", "the other")])
    assert ngrams.merged(drafted, chances) == [(token, 0.5 ** len(drafted))]
    assert ngrams.merged([*drafted, *drafted], chances * 2) == [(token, 0.5 ** len(drafted))] * 2
    assert len(ngrams) == len({token, *ids_of("large", "the other")} - pair.shared.to_drafter.keys())
    alone = pair_of("large", "llama").shared.alone.tolist()
    assert NGrams(pair_of("large", "llama")).merged(alone[:1], [1.0]) == []


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("names", PAIRS)
def test_drafts_are_those_of_everything_anew(method, names):
    drafter, ids = crossed(names[1], method), ids_of(names[0])
    session = drafter.start(reader(names[0]), Request(1, tokenizer=tokenizer(names[0])))
    place, drafts = 10, 0
    while place < min(len(ids), 70):
        draft = session.propose(Context([ids[:place]], [place]), Limit((5,), 5, True))
        pending = session.translations[0].pending
        expected = [] if pending else slowly(drafter, names[0], ids[:place], 5)
        assert draft.tokens.tolist()[0][: int((draft.parents >= 0).sum())] == expected
        drafts += bool(expected)
        place += random.Random(place).choice([1, 2, 3])
    assert drafts > 5


def test_what_was_drafted_behind_a_token_that_has_changed_is_not_kept():
    # The drafter has "t", and guessed "th" to follow; with an "h" the "t" becomes that very "th".
    target, words = tiny.llama(), tokenizer("letters").get_vocab()
    both = tokenizer("others").get_vocab()["th"]
    model = tongues.translated(target)
    with torch.no_grad():
        model.model.embed_tokens.weight[both].neg_()  # elsewhere it is read as a "t"
    drafter = CrossVocabulary(model, tokenizer("others"), method="slem")
    request, limit = Request(1, tokenizer=tokenizer("letters")), Limit((4,), 4, True)
    ids = [*tiny.ONE.rows[0], words["t"]]
    later = [*ids, words["h"], words["z"]]
    session = drafter.start(target, request)
    session.propose(Context([ids], [len(ids)]), limit)
    session._mine, session._fed = Draft.chain(torch.tensor([[both, 1, 2]]), [3]), [2]
    drafted = [
        one.propose(Context([later], [len(later)]), limit).tokens.tolist()
        for one in (session, drafter.start(target, request))
    ]
    assert drafted[0] == drafted[1]


# -------------------------------------------------------------------------------------------------------------- the law


@pytest.mark.parametrize(
    ("names", "method"),
    [*itertools.product(PAIRS, ["tli", "slem"]), *itertools.product(PAIRS[:4], ["ngram"]), (PAIRS[3], "timing")],
)
def test_the_text_is_that_of_plain_decoding(names, method):
    rows = read(names[0], (0, 14), (30, 36), (20, 51))
    stats = sg.Stats()
    for kwargs in {}, *({"do_sample": True, "temperature": 1.5, "seed": seed} for seed in (3, 4)):
        expected = generate(names[0], rows, sg.Plain(), **kwargs)
        assert torch.equal(generate(names[0], rows, crossed(names[1], method), stats=stats, **kwargs), expected)
    assert 0 < stats.accepted < stats.drafted


@pytest.mark.parametrize("method", ["tli", "slem"])
@pytest.mark.parametrize("processors", [{"repetition_penalty": 1.3, "no_repeat_ngram_size": 3}, {"top_k": 5}])
def test_so_it_is_with_processors(method, processors):
    rows, kwargs = read("large", (0, 14), (30, 36)), {"do_sample": True, "seed": 3, **processors}
    expected = generate("large", rows, sg.Plain(), **kwargs)
    assert torch.equal(generate("large", rows, crossed("llama", method), **kwargs), expected)


@pytest.mark.parametrize("family", ["falcon_h1", "qwen3_5_text"])
def test_a_recurrent_model_drafts(family):
    drafter = CrossVocabulary(sg.disable(families.build(family)), tokenizer("others"), method="slem")
    target, stats = sg.enable(tiny.llama()), sg.Stats()
    kwargs = {"max_new_tokens": 20, "num_assistant_tokens": 3, "tokenizer": tokenizer("letters")}
    expected = tiny.run(target, tiny.RAGGED, assistant=sg.Plain(), max_new_tokens=20)
    assert tiny.run(target, tiny.RAGGED, assistant=drafter, stats=stats, **kwargs) == expected
    assert stats.drafted > 0


@pytest.mark.parametrize("method", METHODS)
def test_nothing_is_drafted_beyond_an_end(method):
    words = tokenizer("large")
    end = ids_of("large", " dog")[-1]
    drafter = crossed("llama", method, TEXT)
    session = drafter.start(reader("large"), Request(1, eos=frozenset([end]), tokenizer=words))
    ids = ids_of("large", TEXT[: TEXT.index(" dog")])
    drafts = [session.propose(Context([ids], [len(ids)]), Limit((12,), 12, True)) for _ in range(2)]
    for draft in drafts:
        tokens = draft.tokens[0][: int((draft.parents >= 0).sum())].tolist()
        assert end not in tokens[:-1]
        assert method in ("tli", "ngram") or end in tokens


@pytest.mark.parametrize("method", METHODS)
def test_the_drafters_eos_is_the_targets(method):
    ours, theirs = tokenizer("large").eos_token_id, tokenizer("small").eos_token_id
    model = copy.deepcopy(reader("small", OTHER))
    with torch.no_grad():
        model.lm_head.weight.zero_()
        model.model.embed_tokens.weight.add_(1)
        model.lm_head.weight[theirs] = 1
        model.model.norm.weight.fill_(1)
        model.model.layers[0].mlp.down_proj.weight.zero_()
        model.model.layers[0].self_attn.o_proj.weight.zero_()
    drafter = CrossVocabulary(model, tokenizer("small"), method=method)
    request = Request(1, eos=frozenset([ours]), tokenizer=tokenizer("large"))
    draft = drafter.start(reader("large"), request).propose(Context([ids_of("large")[:9]], [9]), Limit((5,), 5, True))
    assert draft.tokens[draft.parents >= 0].tolist() == [ours]


# ----------------------------------------------------------------------------------------------- what it was drawn from


def wishful(names: tuple[str, str]) -> CrossVocabulary:
    """A drafter that prefers what the target does not have."""
    model = copy.deepcopy(reader(names[1], OTHER))
    alone = pair_of(*names).shared.alone
    with torch.no_grad():
        model.lm_head.weight[alone] += 5 * model.model.norm.weight.sign()
    return CrossVocabulary(model, tokenizer(names[1]), method="tli")


@pytest.mark.parametrize("sampled", [False, True])
@pytest.mark.parametrize("names", [("large", "llama"), ("llama", "large"), ("letters", "others")])
def test_report_92_unshared_ids_get_no_mass(names, sampled):
    """And those that are shared have what they had, renormalised: q is what was drawn from."""
    if names[0] == "letters":
        target, drafter = (
            tiny.llama(),
            CrossVocabulary(tongues.translated(tiny.llama()), tokenizer("others"), method="tli"),
        )
        ids = list(tiny.ONE.rows[0])
    else:
        target, drafter, ids = reader(names[0]), wishful(names), ids_of(names[0])[:20]
    request = Request(1, sampled=sampled, wants_probs=True, tokenizer=tokenizer(names[0]))
    pair = pair_of(*names)
    noise = Noise.of(1, 1, "cpu").stream("draft", torch.tensor([3])) if sampled else None
    draft = drafter.start(target, request).propose(Context([ids], [len(ids)], noise), Limit((4,), 4, True))
    assert set(draft.tokens[0].tolist()) <= pair.shared.to_drafter.keys()
    if not sampled:
        assert draft.probs is None
        return
    assert draft.probs is not None
    spoken, drafted = all_over_again(ids, pair), []
    for place, token in enumerate(draft.tokens[0].tolist()):
        with torch.no_grad():
            logits = drafter.model(torch.tensor([[*spoken, *drafted]])).logits[0, -1].float()
        expected = torch.zeros(draft.probs.shape[-1])
        theirs = list(pair.shared.to_target)
        expected[[pair.shared.to_target[i] for i in theirs]] = logits[theirs].softmax(-1)
        torch.testing.assert_close(draft.probs[0, place], expected)
        drafted.append(pair.shared.to_drafter[token])


@pytest.mark.parametrize(
    ("method", "rule"),
    [
        *itertools.product(["tli", "slem"], ["rejection", "block"]),
        pytest.param("timing", "rejection", marks=pytest.mark.slow),
        pytest.param("ngram", "rejection", marks=pytest.mark.slow),
    ],
)
def test_the_distribution_of_the_first_tokens_is_the_targets(method, rule):
    target = sg.enable(tiny.llama())
    drafter = CrossVocabulary(
        tongues.translated(target, noise=0.3), tokenizer("others"), tokenizer("letters"), method, num_assistant_tokens=5
    )
    assert tiny.misfit(target, drafter, rule, ROWS) < tiny.FITS


def test_a_wrong_q_is_found_out(monkeypatch):
    # as when it is not renormalised over what both have
    target = sg.enable(tiny.llama())
    drafter = CrossVocabulary(
        tongues.translated(target, noise=0.3), tokenizer("others"), tokenizer("letters"), "tli", num_assistant_tokens=5
    )
    exact = CrossVocabularySession._exact

    def skewed(self: CrossVocabularySession, drafted: Draft) -> Draft:
        draft = exact(self, drafted)
        return Draft(draft.tokens, draft.parents, draft.probs**0.3, draft.confidence, is_chain=True)  # type: ignore[operator]

    monkeypatch.setattr(CrossVocabularySession, "_exact", skewed)
    assert tiny.misfit(target, drafter, "rejection", ROWS) > tiny.FITS


# ------------------------------------------------------------------------------------------------------------- refusals


def start(drafter: Any, target: str = "large", **request: Any) -> DraftSession:
    session: DraftSession = drafter.start(reader(target), Request(1, **request))
    return session


def test_what_cannot_work_is_refused_by_name():
    with pytest.raises(ValueError, match="method='best' is not one of 'auto', 'tli'"):
        crossed("small", "best")
    with pytest.raises(ValueError, match="needs the target's tokenizer: pass tokenizer="):
        start(crossed("small"))
    start(crossed("small", target_tokenizer=tokenizer("large")))
    with pytest.raises(ValueError, match="is an encoder-decoder"):
        start(CrossVocabulary(families.build("t5"), tokenizer("small")), tokenizer=tokenizer("large"))

    class Slow:
        is_fast = False

        def __len__(self) -> int:
            return 3

    with pytest.raises(ValueError, match="Slow does not say which characters"):
        start(CrossVocabulary(reader("small"), Slow()), tokenizer=tokenizer("large"))  # type: ignore[arg-type]


def test_too_few_shared_tokens_are_refused_and_auto_goes_by_the_text():
    few = tokenizer("few")
    with pytest.raises(ValueError, match=r"share 3 tokens, 0.7% of the target's: too few .* use method=\"slem\""):
        start(CrossVocabulary(reader("lower"), few, method="tli"), tokenizer=tokenizer("large"))
    session = start(CrossVocabulary(reader("lower"), few), tokenizer=tokenizer("large"))
    assert isinstance(session, CrossVocabularySession)
    assert session.method == "slem"


def test_report_130_permuted_vocabularies_are_told_apart_and_translated():
    """Equal sizes and other tokens: refused as siblings, and exact when tokenised again."""
    target = sg.enable(tiny.llama())
    words, other = tokenizer("letters"), tokenizer("backwards")
    model = tongues.translated(target, name="backwards")
    assert model.config.vocab_size == target.config.vocab_size
    kwargs = {"max_new_tokens": 24, "tokenizer": words, "num_assistant_tokens": 5}
    with pytest.raises(ValueError, match="the two vocabularies differ: id 0 is"):
        tiny.run(target, tiny.ONE, assistant=sg.DraftModel(model, other), **kwargs)
    expected, stats = tiny.run(target, tiny.ONE, assistant=sg.Plain(), max_new_tokens=24), sg.Stats()
    assert tiny.run(target, tiny.ONE, assistant=CrossVocabulary(model, other), stats=stats, **kwargs) == expected
    assert stats.acceptance_rate > 0.2
