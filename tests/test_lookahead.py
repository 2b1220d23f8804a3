"""Lookahead against the paper's window written out as texts, over passes of a made-up target."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Sequence
from typing import Any, cast

import pytest
import tiny
from passes import Language, nodes_of, sums_of_siblings, verify

import hf_specgen as sg
from hf_specgen.draft import Context, Draft, Limit, Needs, Request, Verified
from hf_specgen.drafters.lookahead import FIRST, Lookahead, LookaheadSession

EOS = 0
TARGET = cast(Any, None)  # no session of this drafter looks at the target


def start(drafter: Lookahead | None = None, batch: int = 1, **request: Any) -> LookaheadSession:
    return (drafter or Lookahead()).start(TARGET, Request(batch, **request))


def propose(
    session: LookaheadSession,
    *rows: list[int],
    last: Verified | None = None,
    depth: Any = 12,
    nodes: int = 64,
    chain: bool = False,
) -> Draft:
    depths = (depth,) * len(rows) if isinstance(depth, int) else depth
    return session.propose(Context(rows, [len(ids) for ids in rows], None, last), Limit(depths, nodes, chain))


# ------------------------------------------------------------------------------------------------------ the reference


class Paper:
    """One row. The window by columns, oldest guess first; what a guess sees is written out as a text, not as a tree."""

    def __init__(self, drafter: Lookahead, language: Language, eos: frozenset[int]) -> None:
        self.drafter, self.language, self.eos = drafter, language, eos
        self.window: list[list[int]] = []
        self.used = 0  # columns that are in the last draft
        self.ngrams: list[tuple[int, ...]] = []  # all there ever were
        self.read = 0
        self.random = random.Random(0)

    def step(self, text: Sequence[int]) -> None:
        """Jacobi: every column's next guess from the text, the oldest guesses up to it, and its own later ones."""
        columns = []
        for place in range(self.used):
            oldest = [column[0] for column in self.window[: place + 1]]
            columns.append([*self.window[place], self.language.best([*text, *oldest, *self.window[place][1:]], 1)[0]])
        self.ngrams += map(tuple, columns)
        restarted = [[] if column[-1] in self.eos else column for column in columns]
        self.window = [column[1:] if len(column) == self.drafter.levels else column for column in restarted]

    def see(self, text: Sequence[int]) -> None:
        levels = self.drafter.levels
        while self.read + levels <= len(text):
            self.ngrams.append(tuple(text[self.read : self.read + levels]))
            self.read += 1

    def candidates(self, root: int) -> list[tuple[int, ...]]:
        """What followed the root in n-grams, the most recent first, each once."""
        tails: dict[tuple[int, ...], None] = {}
        for first, *tail in reversed(self.ngrams):
            if first == root and first not in self.eos:
                end = next((i for i, token in enumerate(tail, 1) if token in self.eos), len(tail))
                tails[tuple(tail[:end])] = None
        return list(tails)[: self.drafter.candidates]

    def draft(self, text: Sequence[int], depth: int, most: int, chain: bool) -> tuple[set[Any], set[Any]]:
        """All nodes, each by its path: those of n-grams, and those of the window."""
        branches: list[tuple[int, ...]] = []
        self.used = 0
        if not depth:
            return set(), set()
        for tail in self.candidates(text[-1])[: 1 if chain else None]:
            for end in range(1, min(depth, len(tail)) + 1):
                if tail[:end] not in branches:
                    branches.append(tail[:end])
        branches = branches[:most]
        nodes = set(branches)
        self.window += [[] for _ in range(self.drafter.window - len(self.window))]
        for place in range(0 if chain else self.drafter.window):
            column = self.window[place]
            choices = [token for token in text[-256:] if token not in self.eos]
            if not column and choices:
                column.append(self.random.choice(choices))
            if not column or place + len(column) > depth or len(nodes) + len(column) > most:
                break
            trunk = [self.window[i][0] for i in range(place + 1)]
            nodes |= {(*trunk, *column[1:end]) for end in range(1, len(column) + 1)}
            self.used += 1
        return set(branches), nodes - set(branches)


@pytest.mark.parametrize(
    "drafter", [Lookahead(), Lookahead(1, 2, 1), Lookahead(7, 5, 7), Lookahead(3, 3, 2), Lookahead(4, 2, 3)], ids=str
)
@pytest.mark.parametrize("seed", range(3))
def test_every_draft_is_the_papers(drafter: Lookahead, seed: int) -> None:
    rng, eos = random.Random(seed), frozenset({EOS}) if seed else frozenset()
    language = Language(vocab=(20, 8, 12)[seed], seed=seed)
    rows = [[rng.randrange(1, 8) for _ in range(length)] for length in (9, 1, 3)]
    session = start(drafter, 3, eos=eos)
    papers = [Paper(drafter, language, eos) for _ in rows]
    draft, accepted, window, drafted = Draft.empty(3), 0, 0, 0
    for _ in range(70):
        # Checked as a whole or not at all.
        checked = draft if rng.random() < 0.9 else Draft.empty(3)
        before = [list(ids) for ids in rows]
        last = verify(language, rows, draft, 1, checked)
        depth = tuple(rng.choice([12, 12, 5, rng.randrange(4)]) for _ in rows)
        nodes, chain = rng.choice([64, 64, rng.randrange(1, 40)]), rng.random() < 0.1
        draft = propose(session, *rows, last=last, depth=depth, nodes=nodes, chain=chain)
        assert draft.whole == (not chain)
        assert draft.nodes <= nodes
        for row, paper in enumerate(papers):
            if checked.nodes:
                paper.step(before[row])
            paper.see(rows[row])
            branches, guesses = paper.draft(rows[row], depth[row], nodes, chain)
            found = dict(nodes_of(draft, row))
            assert found.keys() == branches | guesses
            assert all((path in branches) == (along[-1] > 0) for path, along in found.items())
            accepted += len(rows[row]) - len(before[row]) - 1
            window, drafted = window + len(guesses), drafted + len(branches)
    assert accepted > 10
    assert drafted > 50
    assert window > 50


# --------------------------------------------------------------------------------------------------------- the session


def test_it_asks_for_the_best_id_at_every_node_and_in_chains_for_nothing() -> None:
    assert start().needs == Needs(top_k=1)
    assert start(chain=True).needs == Needs()


class Counting(Language):
    """Each number is followed by the next one, so that nothing ever repeats."""

    def best(self, text: Sequence[int], count: int) -> list[int]:
        return [text[-1] + 1 + i for i in range(count)]


def count_up(ids: list[int], rounds: int, **options: Any) -> int:
    """Decodes some rounds; how many tokens were drafted right."""
    session, rows, draft = start(), [list(ids)], Draft.empty(1)
    for _ in range(rounds):
        last = verify(Counting(surprise=0), rows, draft, 1)
        draft = propose(session, *rows, last=last, **options)
    return len(rows[0]) - len(ids) - rounds


def test_the_window_drafts_what_never_stood_in_the_text() -> None:
    # Guesses begin with tokens of the text and run ahead of it, and the text comes to where they were.
    assert count_up([30, 40, 50, 60, 20], rounds=25) > 10
    assert count_up([30, 40, 50, 60, 20], rounds=25, chain=True) == 0, "without a window the text must repeat"


def test_a_chain_is_the_most_recent_n_gram() -> None:
    ids = [7, 1, 2, 3, 9, 7, 4, 5, 6, 7]
    for draft in propose(start(), ids, chain=True), propose(start(chain=True), ids):
        assert [path for path, _ in nodes_of(draft)] == [(4,), (4, 5), (4, 5, 6)]
        assert draft.is_chain
        assert not draft.whole
    assert nodes_of(propose(start(), ids, depth=2, chain=True))[-1][0] == (4, 5)
    tree = propose(start(), ids)
    assert {path[0] for path, along in nodes_of(tree) if along[-1]} == {4, 1}
    assert not tree.is_chain


def test_confidences_are_shares_of_certainty_and_the_most_recent_has_the_first() -> None:
    rng, language = random.Random(0), Language()
    session, rows, draft = start(Lookahead(4, 3, 7)), [[1, 2]], Draft.empty(1)
    for _ in range(80):
        last = verify(language, rows, draft, 1)
        draft = propose(session, *rows, last=last, nodes=rng.randrange(1, 64))
        found = nodes_of(draft)
        assert all(0 <= total < 1 for total in sums_of_siblings(found))
        if found and found[0][1][0]:
            assert found[0][1][0] == pytest.approx(FIRST)


def test_near_the_end_of_a_row_the_window_shrinks() -> None:
    language, deepest = Language(vocab=40), []
    for room in (9, 7, 6, 4, 1, 0):
        session, rows, draft = start(Lookahead(4, 4, 1)), [[1, 2, 3]], Draft.empty(1)
        for _ in range(6):
            last = verify(language, rows, draft, 1)
            draft = propose(session, *rows, last=last, depth=room)
        deepest.append(max((len(path) for path, _ in nodes_of(draft)), default=0))
    assert deepest == [6, 6, 6, 4, deepest[4], 0]


def test_no_guess_and_no_n_gram_goes_on_behind_an_eos() -> None:
    language, ends = Language(vocab=6, order=1), 0
    session, rows, draft = start(Lookahead(5, 4, 4), eos=frozenset({EOS})), [[1, 2, 3, EOS, 4]], Draft.empty(1)
    for _ in range(40):
        last = verify(language, rows, draft, 1)
        draft = propose(session, *rows, last=last)
        for path, _ in nodes_of(draft):
            assert EOS not in path[:-1]
            ends += path[-1] == EOS
    assert ends > 10, "it may be the last token of a draft"
    assert propose(start(eos=frozenset({EOS})), [EOS, EOS]).nodes == 0, "there is nothing to begin a column with"


def test_rows_have_windows_and_pools_of_their_own() -> None:
    language = Language(vocab=40)
    together, rows = start(batch=2), [[1, 2, 3], [4, 5]]
    alone, other = [start(), start()], [[1, 2, 3], [4, 5]]
    draft, drafts = Draft.empty(2), [Draft.empty(1), Draft.empty(1)]
    for _ in range(30):
        draft = propose(together, *rows, last=verify(language, rows, draft, 1))
        for row in range(2):
            last = verify(language, [other[row]], drafts[row], 1)
            drafts[row] = propose(alone[row], other[row], last=last)
            assert nodes_of(draft, row) == nodes_of(drafts[row])
    assert rows == other


def test_a_row_that_has_ended_has_no_node() -> None:
    session, rows, draft = start(batch=2), [[1, 2, 3], [4, 5]], Draft.empty(2)
    for _ in range(3):
        draft = propose(session, *rows, last=verify(Language(), rows, draft, 1))
    last = verify(Language(), rows, draft, 1)
    last.top[1], last.tokens[1] = [], []
    draft = propose(session, *rows, last=last, depth=(9, 0))
    assert nodes_of(draft, 0)
    assert not nodes_of(draft, 1)


def test_what_became_of_anothers_draft_does_not_move_the_window() -> None:
    session, ids = start(), [1, 2, 3]
    draft = propose(session, ids)
    columns = [list(column) for column in session.rows[0]._columns]
    tokens, parents = draft.tokens.tolist(), draft.parents.tolist()
    last = Verified(dataclasses.replace(draft), tokens, parents, [[[9]] * (draft.nodes + 1)])
    propose(session, [*ids, 4], last=last)
    assert session.rows[0]._columns == columns
    again = propose(session, [*ids, 4, 5])
    cut = again.up_to(2)  # a model that takes no deeper paths just now
    last = Verified(again, cut.tokens.tolist(), cut.parents.tolist(), [[[9]] * (again.nodes + 1)])
    propose(session, [*ids, 4, 5, 6], last=last)
    assert [column[-1] == 9 for column in session.rows[0]._columns] == [True, True, False, False, False]


def test_nothing_leaks_between_calls() -> None:
    drafter = Lookahead()
    first = propose(start(drafter), [7, 1, 2, 3, 7], chain=True)
    assert first.nodes == 3
    assert propose(start(drafter), [3, 7], chain=True).nodes == 0
    with pytest.raises(dataclasses.FrozenInstanceError):
        drafter.window = 2  # type: ignore[misc]


@pytest.mark.parametrize("arguments", [{"window": 0}, {"levels": 1}, {"candidates": 0}])
def test_settings_that_cannot_work_are_refused(arguments: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="=".join(map(str, next(iter(arguments.items()))))):
        Lookahead(**arguments)


# ------------------------------------------------------------------------------------------------------- with a model


def test_guesses_are_those_of_the_model() -> None:
    """Every n-gram that a window gives is what the model says after the text, the trunk and the column before it."""
    model = sg.enable(tiny.llama())
    known = tiny.truth_of(model, tiny.ONE, "greedy", 40)[0]
    reference, seen = tiny.llama(), 0

    def best(text: Sequence[int], count: int) -> list[int]:
        logits = reference(tiny.torch.tensor([list(text)])).logits[0, -1]
        return cast(list[int], logits.topk(count).indices.tolist())

    language = cast(Language, type("Model", (), {"best": staticmethod(best)}))
    drafter, sessions = Lookahead(3, 3, 2, num_assistant_tokens=6), cast(list[LookaheadSession], [])
    paper, lengths = Paper(drafter, language, frozenset()), cast(list[int], [])

    class Watched:
        num_assistant_tokens = 6

        def start(self, target: Any, request: Request) -> Any:
            sessions.append(drafter.start(target, request))
            return self

        needs = Needs(top_k=1)

        def propose(self, context: Context, limit: Limit) -> Draft:
            nonlocal seen
            draft, ids = sessions[0].propose(context, limit), context.ids[0]
            if lengths:
                paper.step(ids[: lengths[-1]])
            lengths.append(len(ids))
            paper.see(ids)
            branches, guesses = paper.draft(ids, limit.depth[0], limit.nodes, limit.chain)
            assert dict(nodes_of(draft)).keys() == branches | guesses
            seen += len(guesses)
            return draft

    with tiny.torch.no_grad():
        assert tiny.run(model, tiny.ONE, assistant=Watched(), max_new_tokens=40) == (known,)
    assert seen > 100
