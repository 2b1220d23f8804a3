"""SuffixLookup against a search through the texts, its index against counting, and its store."""

from __future__ import annotations

import json
import random
import time
import tracemalloc
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import tiny

from hf_specgen.draft import Context, Draft, Limit, Node, Request
from hf_specgen.drafters.suffix_lookup import SuffixLookup, SuffixLookupSession
from hf_specgen.drafters.suffix_store import LEAST_BYTES, LONGEST, PARTS, StoredText, SuffixStore
from hf_specgen.drafters.suffixes import BEGIN, SuffixAutomaton

EOS = 0
VOCABULARY = 50_000
TARGET = cast(Any, SimpleNamespace(config=SimpleNamespace(get_text_config=lambda: SimpleNamespace(vocab_size=50_000))))


def start(drafter: SuffixLookup, batch: int = 1, **request: Any) -> SuffixLookupSession:
    return drafter.start(TARGET, Request(batch, **request))


def propose(
    session: SuffixLookupSession, *rows: list[int], depth: Any = 10, nodes: int = 64, chain: bool = False
) -> Draft:
    depths = (depth,) * len(rows) if isinstance(depth, int) else depth
    return session.propose(Context(rows, [len(ids) for ids in rows]), Limit(depths, nodes, chain))


def nodes_of(draft: Draft, row: int = 0) -> list[Node]:
    assert draft.confidence is not None or draft.nodes == 0
    if draft.confidence is None:
        return []
    columns = (draft.tokens[row].tolist(), draft.parents[row].tolist(), draft.confidence[row].tolist())
    return [node for node in zip(*columns, strict=True) if node[1] >= 0]


def chain_of(draft: Draft, row: int = 0) -> list[int]:
    """The tokens of a draft without branches."""
    nodes = nodes_of(draft, row)
    assert [parent for _, parent, _ in nodes] == list(range(len(nodes)))
    return [token for token, _, _ in nodes]


# --------------------------------------------------------------------------------------------------- the reference

# Texts that were read in turns: tokens, and for each the number of tokens of all the texts before it.
Corpus = list[tuple[list[int], list[int]]]


def occurrences(corpus: Corpus, wanted: Sequence[int]) -> list[tuple[int, int]]:
    """Text and place behind every occurrence."""
    size = len(wanted)
    return [
        (number, end)
        for number, (text, _) in enumerate(corpus)
        for end in range(size, len(text) + 1)
        if text[end - size : end] == list(wanted)
    ]


def searched_contexts(corpus: Corpus, written: list[int], shortest: int) -> list[tuple[int, dict[int, list[int]]]]:
    """Lengths and followers (token: the places where it followed) of the two longest suffixes that something followed.

    Of suffixes with the same occurrences the longest counts.
    """
    longest: dict[tuple[tuple[int, int], ...], int] = {}
    for length in range(1, min(LONGEST, len(written)) + 1):
        found = tuple(occurrences(corpus, written[-length:]))
        if not found:
            break
        longest[found] = length
    contexts = []
    for found, length in sorted(longest.items(), key=lambda item: -item[1]):
        followers: dict[int, list[int]] = {}
        for number, end in found:
            text, places = corpus[number]
            if end < len(text):
                followers.setdefault(text[end], []).append(places[end])
        if followers and length >= shortest:
            contexts.append((length, followers))
    return contexts[:2]


def searched_children(corpora: list[Corpus], written: list[int], shortest: int) -> list[tuple[int, float]]:
    contexts = []
    for number, corpus in enumerate(corpora):
        contexts += searched_contexts(corpus, written, shortest + (number > 0))
    contexts.sort(key=lambda context: -context[0])
    chances: dict[int, float] = {}
    left = 1.0
    for length, followers in contexts:
        fresh = [(max(places), token, len(places)) for token, places in followers.items() if token not in chances]
        if not fresh:
            continue
        total = sum(times for _, _, times in fresh)
        evidence = length + 3 * (total - len(fresh)) / total
        share = left * (evidence - 0.3) / (evidence + 1.2)
        left -= share
        for _, token, times in sorted(fresh, reverse=True):
            latest = max(fresh)[1] == token
            chances[token] = share / (total + 0.5) * (times + 0.5 * latest)
    return sorted(chances.items(), key=lambda item: -item[1])


def searched_tree(
    corpora: list[Corpus], ids: list[int], drafter: SuffixLookup, limit: Limit, eos: frozenset[int]
) -> list[Node]:
    branches = 1 if limit.chain else drafter.branches
    paths: list[list[int]] = [[]]
    tree: list[Node] = []
    waiting: list[tuple[float, int, int, int, float]] = []
    above, place = 1.0, 0
    while len(tree) < limit.nodes:
        if len(paths[place]) < limit.depth[0] and not eos.intersection(paths[place][-1:]):
            children = searched_children(corpora, [*ids, *paths[place]], drafter.min_match)
            for rank, (token, confidence) in enumerate(children[:branches]):
                if above * confidence >= drafter.min_token_prob:
                    waiting.append((-above * confidence, place, rank, token, confidence))
        if not waiting:
            break
        best = min(waiting)
        waiting.remove(best)
        minus_above, parent, _, token, confidence = best
        above = -minus_above
        tree.append((token, parent, confidence))
        paths.append([*paths[parent], token])
        place = len(tree)
    return tree


def random_text(rng: random.Random, letters: int) -> list[int]:
    text = [rng.randrange(letters) for _ in range(rng.randrange(1, 45))]
    for _ in range(rng.randrange(3)):
        begin = rng.randrange(len(text))
        text += text[begin : begin + rng.randrange(1, 40)]
    return text


def settings(seed: int, count: int) -> Iterator[tuple[random.Random, SuffixLookup, list[list[int]]]]:
    """A drafter and growing prefixes of a random text over few letters."""
    rng = random.Random(seed)
    for _ in range(count):
        text = random_text(rng, rng.choice([1, 2, 3, 5, 12]))
        ends = sorted({rng.randrange(1, len(text) + 1) for _ in range(rng.randrange(1, 8))})
        drafter = SuffixLookup(
            branches=rng.randrange(1, 5), min_match=rng.randrange(1, 4), min_token_prob=rng.choice([0.0, 0.02, 0.2])
        )
        yield rng, drafter, [text[:end] for end in ends]


def random_limit(rng: random.Random) -> Limit:
    return Limit((rng.randrange(1, 9),), rng.randrange(1, 13), rng.random() < 0.3)


@pytest.mark.parametrize("eos", [frozenset(), frozenset({EOS})])
def test_a_draft_is_the_tree_that_a_search_through_the_text_finds(eos: frozenset[int]) -> None:
    seen = branching = 0
    for rng, drafter, prefixes in settings(1, 200):
        session = start(drafter, eos=eos)
        for ids in prefixes:
            limit = random_limit(rng)
            expected = searched_tree([[(ids, list(range(len(ids))))]], ids, drafter, limit, eos)
            for reader in session, start(drafter, eos=eos):  # as it grew, and read at once
                nodes = nodes_of(reader.propose(Context([ids], [len(ids)]), limit))
                assert [node[:2] for node in nodes] == [node[:2] for node in expected]
                assert [node[2] for node in nodes] == pytest.approx([node[2] for node in expected])
            seen += len(expected)
            branching += len({parent for _, parent, _ in expected}) < len(expected)
    assert seen > 800
    assert branching > 40


def test_so_it_is_with_a_store_of_texts_that_grew_in_turns() -> None:
    helped = 0
    for rng, plain, prefixes in settings(2, 40):
        store, texts = SuffixStore(), [([], []) for _ in range(3)]
        written: list[StoredText | None] = [None] * 3
        letters = max(max(ids) for ids in prefixes) + 1
        for place in range(60):
            one = rng.randrange(3)
            token = rng.randrange(letters)
            written[one] = store.add([token], written[one])
            cast(list[int], texts[one][0]).append(token)
            cast(list[int], texts[one][1]).append(place)
        drafter = SuffixLookup(plain.branches, store, plain.min_match, plain.min_token_prob)
        for ids in prefixes[-1:]:
            limit = random_limit(rng)
            # The session adds the last id as the first token of its own output.
            corpora = [[(ids, list(range(len(ids))))], [*texts, (ids[-1:], [60])]]
            expected = searched_tree(corpora, ids, drafter, limit, frozenset())
            nodes = nodes_of(start(drafter).propose(Context([ids], [len(ids)]), limit))
            assert [node[:2] for node in nodes] == [node[:2] for node in expected]
            assert [node[2] for node in nodes] == pytest.approx([node[2] for node in expected])
            helped += expected != searched_tree(corpora[:1], ids, drafter, limit, frozenset())
    assert helped > 15


def test_the_index_knows_every_substring_of_texts_that_grow_in_turns() -> None:
    rng = random.Random(0)
    for _ in range(150):
        longest, letters = rng.randrange(2, 10), rng.choice([1, 2, 3, 6])
        automaton, ends, texts = SuffixAutomaton(longest), [BEGIN] * 3, [[] for _ in range(3)]
        places: dict[tuple[int, ...], list[int]] = {}
        for _ in range(rng.randrange(1, 20)):
            one, tokens = rng.randrange(3), [rng.randrange(letters) for _ in range(rng.randrange(4))]
            text = cast(list[int], texts[one])
            for offset, token in enumerate(tokens):
                text.append(token)
                for length in range(1, min(longest, len(text)) + 1):
                    places.setdefault(tuple(text[-length:]), []).append(automaton.size + offset)
            ends[one] = automaton.grow(ends[one], tokens)
        for wanted, found in places.items():
            if len(wanted) < longest:
                state, length = automaton.find(wanted)
                assert length == len(wanted)
                assert (automaton.count[state], automaton.end[state]) == (len(found), max(found))
                followers = {
                    token: (automaton.count[to], automaton.end[to]) for token, to in automaton.edges[state].items()
                }
                assert followers == {
                    token: (len(places[(*wanted, token)]), max(places[(*wanted, token)]))
                    for token in range(letters)
                    if (*wanted, token) in places
                }
        assert automaton.edge_count == sum(map(len, automaton.edges))
        assert len(automaton.edges) <= max(2, 2 * automaton.size)


# ------------------------------------------------------------------------------------------------- what is drafted


def test_what_followed_more_often_comes_first_and_of_equals_the_latest() -> None:
    often = [1, 2, 7, 20, 1, 2, 7, 21, 1, 2, 8, 22, 1, 2]
    once = [1, 2, 7, 20, 1, 2, 8, 22, 1, 2]
    for ids, best in (often, 7), (once, 8):
        nodes = nodes_of(propose(start(SuffixLookup()), ids, depth=1))
        assert [token for token, _, _ in nodes] == [best, 15 - best]
        assert chain_of(propose(start(SuffixLookup(branches=1)), ids, depth=1)) == [best]
        assert chain_of(propose(start(SuffixLookup()), ids, depth=1, chain=True)) == [best]


def test_confidence_grows_with_the_match_and_with_repetition_and_is_shared_by_siblings() -> None:
    def first(ids: list[int]) -> float:
        return nodes_of(propose(start(SuffixLookup(branches=1)), ids))[0][2]

    source = list(range(20, 60))
    by_length = [first([*source, 1, *source[8 - matched : 8]]) for matched in (1, 2, 3, 4, 8)]
    assert by_length == pytest.approx([0.7 / 2.2, 1.7 / 3.2, 2.7 / 4.2, 3.7 / 5.2, 7.7 / 9.2])
    assert first([5, 6, 7, 1, 6, 7, 2, 6]) > first([5, 6, 7, 1, 9, 8, 2, 6])
    assert first([5, 6, 7, 1, 6, 8, 2, 6]) < first([5, 6, 7, 1, 9, 8, 2, 6])
    for _, drafter, prefixes in settings(3, 60):
        for ids in prefixes:
            sums: dict[int, float] = {}
            nodes = nodes_of(propose(start(drafter), ids))
            assert len({node[:2] for node in nodes}) == len(nodes)
            for _, parent, confidence in nodes:
                assert confidence > 0
                sums[parent] = sums.get(parent, 0.0) + confidence
            assert max(sums.values(), default=0.0) < 1


def test_a_repeating_text_goes_on_beyond_its_end() -> None:
    chains = SuffixLookup(branches=1)
    assert chain_of(propose(start(chains), [9, 1, 2, 3, 1, 2, 3, 1, 2], depth=7)) == [3, 1, 2, 3, 1, 2, 3]
    assert chain_of(propose(start(chains), [4] * 100, depth=40)) == [4] * 40


def test_nothing_is_drafted_after_a_copied_eos_nor_for_rows_that_may_not() -> None:
    ids = [5, 6, EOS, 7, 8, 5]
    assert chain_of(propose(start(SuffixLookup(branches=1), eos=frozenset({EOS})), ids)) == [6, EOS]
    draft = propose(start(SuffixLookup(branches=1), batch=2), ids, ids, depth=(0, 2))
    assert nodes_of(draft, 0) == []
    assert chain_of(draft, 1) == [6, EOS]


@pytest.mark.parametrize("ids", [[], [3], [3, 4], [3, 4, 5, 6]])
def test_a_text_without_a_match_has_an_empty_draft(ids: list[int]) -> None:
    draft = propose(start(SuffixLookup(store=SuffixStore())), ids)
    assert draft.tokens.shape == draft.parents.shape == (1, 0)


def test_the_encoders_text_counts_as_the_prompt() -> None:
    source = cast(Any, SimpleNamespace(ids=lambda: [[5, 6, 7, 8], [15, 16, 17, 18]]))
    session = start(SuffixLookup(branches=1), batch=2, source=source)
    rows = [[1, 5], [1, 16]]
    drafts = [propose(session, *rows, depth=2)]
    rows[0] += [6, 7]
    rows[1] += [99, 15]
    drafts.append(propose(session, *rows, depth=2))
    assert [[chain_of(draft, row) for row in (0, 1)] for draft in drafts] == [[[6, 7], [17, 18]], [[8, 1], [16, 17]]]


def test_a_match_bounds_the_depth_where_that_is_asked_for() -> None:
    ids = [*range(20, 60), 1, *range(20, 24)]
    for factor, depth in ((None, 30), (1.0, 4), (2.5, 10), (0.1, 0)):
        drafter = SuffixLookup(branches=1, max_spec_factor=factor, min_token_prob=0)
        assert propose(start(drafter), ids, depth=30).nodes == depth


def test_unlikely_nodes_are_not_drafted() -> None:
    for least in 0.05, 0.3, 0.6:
        smallest = 1.0
        for _, _, prefixes in settings(4, 40):
            for ids in prefixes:
                chances = [1.0]
                for _, parent, confidence in nodes_of(propose(start(SuffixLookup(min_token_prob=least)), ids)):
                    chances.append(chances[parent] * confidence)
                smallest = min(smallest, *chances)
        assert least <= smallest + 1e-6 < 1.5 * least


def test_what_anything_may_follow_predicts_nothing() -> None:
    for followers, nodes in ((32, 4), (33, 0)):
        ids = [token for follower in range(followers) for token in (7, 100 + follower)]
        assert propose(start(SuffixLookup(min_token_prob=0)), [*ids, 7], depth=1).nodes == nodes


@pytest.mark.parametrize(
    "arguments",
    [{"branches": 0}, {"min_match": 0}, {"min_match": 32}, {"min_token_prob": 1.5}, {"max_spec_factor": 0.0}],
)
def test_settings_that_cannot_work_are_refused(arguments: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(arguments))):
        SuffixLookup(**arguments)


# ------------------------------------------------------------------------------------------------------- the store


def write(drafter: SuffixLookup, output: list[int], prompt: list[int]) -> None:
    """A call that generates `output`, two tokens a round; the loop asks no more after the last."""
    session = start(drafter)
    ids = [*prompt, output[0]]
    for place in range(1, len(output), 2):
        propose(session, ids)
        ids.extend(output[place : place + 2])
    propose(session, ids)


def random_ids(seed: int, count: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(1000, 49_000) for _ in range(count)]


def test_a_store_drafts_from_other_calls_and_rows_but_not_from_prompts() -> None:
    drafter = SuffixLookup(branches=1, store=SuffixStore(), min_token_prob=0)
    output, prompt = list(range(30, 60)), list(range(200, 230))
    write(drafter, output, prompt)
    assert chain_of(propose(start(drafter), [1, *output[:4]], depth=30)) == output[4:]
    assert propose(start(drafter), [1, *prompt[:4]]).nodes == 0
    rows = [[1], [9]]
    session = start(drafter, batch=2)
    propose(session, *rows)
    rows[0].extend([102, 103, 104])
    rows[1].extend([102, 103])
    assert chain_of(propose(session, *rows, depth=3), row=1) == [104]


def test_one_stored_text_is_not_continued_by_another() -> None:
    drafter = SuffixLookup(branches=1, store=SuffixStore())
    write(drafter, [21, 22, 23], prompt=[1])
    write(drafter, [31, 32, 33], prompt=[2])
    assert chain_of(propose(start(drafter), [9, 31, 32])) == [33]
    assert propose(start(drafter), [9, 22, 23]).nodes == propose(start(drafter), [9, 23, 31]).nodes == 0


def test_the_store_of_another_vocabulary_is_refused() -> None:
    store = SuffixStore()
    drafter = SuffixLookup(store=store)
    store.add([VOCABULARY - 1])
    start(drafter)
    store.add([VOCABULARY])
    with pytest.raises(ValueError, match=f"holds id {VOCABULARY}"):
        start(drafter)
    store.clear()
    start(drafter)


@pytest.mark.parametrize(
    "text",
    [
        random_ids(1, 9000),
        [1000 + place % 50 for place in range(9000)],
        [1000 + token % 2 for token in random_ids(2, 9000)],
    ],
    ids=["random", "loop", "two letters"],
)
def test_the_estimate_of_its_bytes_is_right(text: list[int]) -> None:
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        store = SuffixStore()
        store.add(token + 0 for token in text)
        after, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert store.bytes == pytest.approx(after - before, rel=0.2)


def test_a_store_never_takes_more_than_it_may_and_forgets_the_oldest_first() -> None:
    store = SuffixStore(LEAST_BYTES)
    outputs = [random_ids(seed, 200) for seed in range(40)]
    for output in outputs:
        store.add(output)
        assert store.bytes <= LEAST_BYTES
    assert store.bytes > 0.7 * LEAST_BYTES
    known = [any(match[1] >= 3 for _, match in store.find(output[:3])) for output in outputs]
    assert known == sorted(known), "what is gone is older than what stays"
    assert known[-1]
    assert not known[0]


def test_one_text_without_an_end_goes_on_from_part_to_part() -> None:
    store = SuffixStore(LEAST_BYTES)
    text = random_ids(1, 6000)
    written = None
    for place in range(0, len(text), 3):
        written = store.add(text[place : place + 3], written)
        assert store.bytes <= LEAST_BYTES
    assert len(store._parts) >= PARTS
    held = store._parts[0].texts[0]
    begin = text.index(held[0])
    assert begin > 0
    # Every place that is left is found with what stood before it, across the seams too.
    for place in range(begin + LONGEST, len(text) - 1):
        assert max(match[1] for _, match in store.find(text[place - LONGEST : place])) == LONGEST


def test_a_cleared_store_is_empty_and_calls_go_on_without_what_was_cleared() -> None:
    store = SuffixStore()
    drafter = SuffixLookup(branches=1, store=store)
    output = list(range(30, 60))
    session = start(drafter)
    ids = output[:1]
    propose(session, ids)
    ids.extend(output[1:20])
    propose(session, ids)
    assert len(store) == 20
    store.clear()
    assert len(store) == store.bytes - store._parts[0].bytes == 0
    assert propose(start(drafter), [1, *output[:8]]).nodes == 0
    store.clear()
    ids.extend(output[20:])
    propose(session, ids)
    assert len(store) == 10
    assert chain_of(propose(start(drafter), [1, *output[20:25]], depth=2)) == output[25:27]
    assert propose(start(drafter), [1, *output[:8]]).nodes == 0


def test_a_saved_store_drafts_as_before(tmp_path: Path) -> None:
    store = SuffixStore()
    for seed in range(5):
        store.add([token % 7 for token in random_ids(seed, 80)])
    store.save(tmp_path / "store.json")
    assert [file.name for file in tmp_path.iterdir()] == ["store.json"]
    loaded = SuffixStore.load(tmp_path / "store.json")
    assert (len(loaded), loaded.bytes, loaded.largest_id) == (len(store), store.bytes, store.largest_id)
    for seed in range(20):
        ids = [token % 7 for token in random_ids(seed + 100, 30)]
        drafts = [nodes_of(propose(start(SuffixLookup(store=one)), ids)) for one in (store, loaded)]
        assert drafts[0] == drafts[1] != []


def test_a_loaded_store_is_bounded_too_and_keeps_the_latest(tmp_path: Path) -> None:
    store = SuffixStore()
    outputs = [random_ids(seed, 500) for seed in range(20)]
    for output in outputs:
        store.add(output)
    store.save(tmp_path / "store.json")
    loaded = SuffixStore.load(tmp_path / "store.json", LEAST_BYTES)
    assert 0.7 * LEAST_BYTES < loaded.bytes <= LEAST_BYTES
    assert max(match[1] for _, match in loaded.find(outputs[-1][:9])) == 9
    assert not any(match[1] == 9 for _, match in loaded.find(outputs[0][:9]))


@pytest.mark.parametrize(
    "written",
    [
        "",
        "[]",
        '{"texts": [[1]]}',
        *(
            json.dumps({"format": "hf_specgen.SuffixStore 1", "texts": texts})
            for texts in (None, [1], [["a"]], [[-1]], [[1.5]], [[True]])
        ),
    ],
)
def test_what_is_no_saved_store_is_refused(written: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text(written)
    with pytest.raises(ValueError, match=r"file was not written by SuffixStore\.save"):
        SuffixStore.load(tmp_path / "file")


def test_a_store_too_small_is_refused() -> None:
    with pytest.raises(ValueError, match="max_bytes must be at least"):
        SuffixStore(LEAST_BYTES - 1)


def test_two_threads_lose_nothing_of_what_they_store() -> None:
    store = SuffixStore()

    def work(thread: int) -> None:
        text = None
        for place in range(2000):
            text = store.add([2 * place + thread], text)

    tiny.in_two_threads(work)
    assert len(store) == 4000
    drafter = SuffixLookup(branches=1, store=store, min_token_prob=0)
    for text in list(range(0, 4000, 2)), list(range(1, 4000, 2)):
        assert chain_of(propose(start(drafter), text[1000:1003], depth=40)) == text[1003:1043]


def test_every_use_of_a_store_waits_for_the_others(tmp_path: Path) -> None:
    store = SuffixStore()
    session = start(SuffixLookup(store=store))
    with ThreadPoolExecutor(4) as pool:
        with store.lock:
            uses = [
                pool.submit(store.add, [1]),
                pool.submit(store.clear),
                pool.submit(store.save, tmp_path / "store.json"),
                pool.submit(propose, session, [1]),
            ]
            assert not wait(uses, timeout=0.1).done
        assert len(wait(uses, timeout=10).done) == 4


def test_an_index_is_read_under_the_lock_of_its_store(monkeypatch: pytest.MonkeyPatch) -> None:
    store, reads = SuffixStore(), []
    store.add([1, 2, 3, 4])
    step, contexts = SuffixAutomaton.step, SuffixAutomaton.contexts

    def watched(read: Callable[..., Any]) -> Callable[..., Any]:
        def reading(*arguments: Any) -> Any:
            reads.append(store.lock.locked())
            return read(*arguments)

        return reading

    monkeypatch.setattr(SuffixAutomaton, "step", watched(step))
    monkeypatch.setattr(SuffixAutomaton, "contexts", watched(contexts))
    assert propose(start(SuffixLookup(store=store)), [9, 1, 2]).nodes == 2
    assert len(reads) > 4
    assert all(reads)
    assert not store.lock.locked()


def test_two_threads_share_a_drafter_and_its_store_while_it_is_cleared_and_overflows() -> None:
    store = SuffixStore(LEAST_BYTES)
    drafter = SuffixLookup(store=store)

    def work(thread: int) -> None:
        rng = random.Random(thread)
        for _ in range(10):
            ids = [rng.randrange(9)]
            session = start(drafter)
            for _ in range(15):
                propose(session, ids, nodes=8)
                ids.extend(rng.randrange(rng.choice([9, 40_000])) for _ in range(9))
            if rng.random() < 0.1:
                store.clear()
            assert store.bytes <= LEAST_BYTES

    tiny.in_two_threads(work)
    store.clear()
    write(drafter, list(range(30, 50)), prompt=[1])
    assert chain_of(propose(start(drafter), [2, *range(30, 36)], depth=3)) == [36, 37, 38]


# ------------------------------------------------------------------------------------------------------- its cost


@pytest.mark.timing
@pytest.mark.parametrize("letters", [1, 2, 40, 49_152])
def test_a_proposal_does_not_grow_with_the_text(letters: int) -> None:
    rng = random.Random(0)

    def seconds(context: int) -> float:
        text = [rng.randrange(letters) for _ in range(context // 2)] * 2
        session = start(SuffixLookup(store=SuffixStore()))
        propose(session, text)
        took = []
        for _ in range(100):
            text.extend(text[-4000:-3996])
            begin = time.thread_time()
            propose(session, text, depth=32)
            took.append(time.thread_time() - begin)
        return sorted(took)[50]

    assert seconds(8_000) < 0.002  # a fiftieth of a pass of SmolLM2 on one thread
    assert seconds(40_000) < 3 * seconds(8_000)
