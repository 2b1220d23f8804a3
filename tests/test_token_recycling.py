"""TokenRecycling against a slow enumeration of every path, over passes of a made-up target; and its matrix."""

from __future__ import annotations

import dataclasses
import json
import math
import random
import time
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any, cast

import pytest
import tiny
from passes import Language, nodes_of, sums_of_siblings, thinned, verify

import hf_specgen as sg
from hf_specgen.draft import Context, Draft, Limit, Needs, Request, Verified
from hf_specgen.drafters import token_recycling
from hf_specgen.drafters.token_recycling import CandidateMatrix, Candidates, TokenRecycling, TokenRecyclingSession

EOS = 0
TARGET = cast(Any, None)  # no session of this drafter looks at the target
Matrix = dict[int, list[Any]]


def start(drafter: TokenRecycling | None = None, batch: int = 1, **request: Any) -> TokenRecyclingSession:
    return (drafter or TokenRecycling()).start(TARGET, Request(batch, **request))


def propose(
    session: TokenRecyclingSession,
    *rows: list[int],
    last: Verified | None = None,
    depth: Any = 8,
    nodes: int = 64,
    chain: bool = False,
) -> Draft:
    depths = (depth,) * len(rows) if isinstance(depth, int) else depth
    return session.propose(Context(rows, [len(ids) for ids in rows], None, last), Limit(depths, nodes, chain))


def warm(**rows: list[int]) -> CandidateMatrix:
    """A matrix with a row for each named token: `warm(_3=[4, 5])`."""
    matrix = CandidateMatrix()
    matrix.update([], [(int(token[1:]), ids) for token, ids in rows.items()])
    return matrix


# ------------------------------------------------------------------------------------------------------ the reference


def learn(matrix: Matrix, root: int, last: Verified, row: int, gained: list[int]) -> None:
    """The matrix as a dict from token to [ids, seen, hits]; rejected nodes first, then root and path."""
    tokens, parents, top = last.tokens[row], last.parents[row], last.top[row]
    place, path = 0, [0]
    for token in gained[:-1]:
        place = next(i for i, parent in enumerate(parents, 1) if parent == place and tokens[i - 1] == token)
        path.append(place)
    for token, follower in zip([root, *gained], gained, strict=False):
        if token in matrix:
            matrix[token][1] += 1
            matrix[token][2] += matrix[token][0][0] == follower
            if matrix[token][1] >= 8:
                matrix[token][1:] = [matrix[token][1] / 2, matrix[token][2] / 2]
    order = [i for i in range(1, len(tokens) + 1) if parents[i - 1] >= 0 and i not in path] + path
    for place in order:
        token = tokens[place - 1] if place else root
        matrix.setdefault(token, [None, 0, 0])[0] = top[place]


def every_path(matrix: Matrix, root: int, depth: int, branches: int) -> dict[tuple[int, ...], tuple[float, ...]]:
    """All paths that rows of the matrix lead along, with the confidences on them."""
    paths: dict[tuple[int, ...], tuple[float, ...]] = {(): ()}
    for length in range(depth):
        for path, along in [(p, a) for p, a in paths.items() if len(p) == length]:
            token = path[-1] if path else root
            if token not in matrix or (path and token == EOS):
                continue
            ids, seen, hits = matrix[token]
            first = (hits + 0.45) / (seen + 1.5)
            if path:
                odds = 2 * first / (1 - first)
                first = odds / (1 + odds)
            shares = [0.18, 0.075, 0.055, 0.04, 0.03, 0.03, 0.02]
            for rank, child in enumerate(ids[:branches]):
                paths[(*path, child)] = (*along, first if rank == 0 else (1 - first) * shares[rank - 1])
    del paths[()]
    return paths


@pytest.mark.parametrize("top_k", [1, 3, 8])
@pytest.mark.parametrize("seed", range(4))
def test_every_draft_is_the_likeliest_part_of_all_paths(top_k: int, seed: int) -> None:
    rng, language = random.Random(seed), Language(order=2 if seed else 1, surprise=0.1 if seed else 0.4, seed=seed)
    rows = [[rng.randrange(12) for _ in range(length)] for length in (5, 1, 3)]
    session, matrix = start(TokenRecycling(top_k=top_k), 3, eos=frozenset({EOS})), cast(Matrix, {})
    draft, accepted, rejected = Draft.empty(3), 0, 0
    for _ in range(80):
        checked = draft if rng.random() < 0.5 else thinned(draft, lambda: rng.random() < 0.8)
        before = [list(ids) for ids in rows]
        last = verify(language, rows, draft, top_k, checked)
        for row, ids in enumerate(rows):
            gained = ids[len(before[row]) :]
            learn(matrix, before[row][-1], last, row, gained)
            accepted += len(gained) - 1
            rejected += sum(parent >= 0 for parent in last.parents[row]) - len(gained) + 1
        depth, nodes, chain = rng.randrange(1, 5 if top_k < 8 else 4), rng.randrange(1, 20), rng.random() < 0.2
        depths = (depth, rng.randrange(3), depth)
        draft = propose(session, *rows, last=last, depth=depths, nodes=nodes, chain=chain)
        assert {token: [list(row.ids), row.seen, row.hits] for token, row in session.matrix._rows.items()} == matrix
        for row, ids in enumerate(rows):
            check_likeliest(draft, row, every_path(matrix, ids[-1], depths[row], 1 if chain else top_k), nodes)
        if chain:
            assert draft.is_chain
    assert accepted > 40
    assert rejected > 40


def check_likeliest(draft: Draft, row: int, paths: dict[tuple[int, ...], tuple[float, ...]], most: int) -> None:
    found = nodes_of(draft, row)
    for path, along in found:
        assert along == pytest.approx(paths[path])
    chances = sorted((math.prod(along) for along in paths.values()), reverse=True)
    assert [math.prod(paths[path]) for path, _ in found] == pytest.approx(chances[:most]), "the likeliest first"


# --------------------------------------------------------------------------------------------------------- the session


def test_it_asks_for_the_best_ids_and_nothing_else() -> None:
    assert start().needs == Needs(top_k=8)
    assert start(TokenRecycling(top_k=3)).needs == Needs(top_k=3)


def test_siblings_share_at_most_certainty_and_limits_are_kept() -> None:
    rng, language = random.Random(5), Language()
    session, rows = start(batch=2), [[1, 2], [3]]
    draft = Draft.empty(2)
    for _ in range(60):
        last = verify(language, rows, draft, 8)
        depth, nodes = (rng.randrange(9), rng.randrange(9)), rng.randrange(1, 65)
        draft = propose(session, *rows, last=last, depth=depth, nodes=nodes)
        assert draft.nodes <= nodes
        for row in range(2):
            found = nodes_of(draft, row)
            assert max((len(path) for path, _ in found), default=0) <= depth[row]
            assert all(0 < total < 1 for total in sums_of_siblings(found))


def test_a_token_without_a_row_has_no_children() -> None:
    session = start(TokenRecycling(warm(_3=[4, 5], _4=[6])))
    assert [path for path, _ in nodes_of(propose(session, [9, 3]))] == [(4,), (4, 6), (5,)]
    assert propose(session, [3, 9]).nodes == 0
    assert propose(start(), [1, 2, 3]).nodes == 0
    assert propose(start(), []).nodes == 0, "inputs_embeds stand for a whole prompt"


def test_a_row_that_has_ended_has_no_node_and_teaches_nothing() -> None:
    session = start(TokenRecycling(warm(_3=[4], _4=[3])), batch=2)
    draft = propose(session, [3], [3], depth=(0, 2))
    assert [len(nodes_of(draft, row)) for row in range(2)] == [0, 2]
    last = Verified(draft, [[], [4, 3]], [[-1, -1], [0, 1]], [[], [[5], [6], [7]]])
    propose(session, [3], [3, 4, 8], last=last, depth=(0, 2))
    assert [row.ids for token in (3, 4) if (row := session.matrix.get(token))] == [(5,), (6,)]


def test_nothing_is_drafted_behind_an_eos() -> None:
    matrix = warm(_3=[EOS, 4], _4=[5])
    matrix.update([], [(EOS, [6])])
    session = start(TokenRecycling(matrix), eos=frozenset({EOS}))
    assert {path for path, _ in nodes_of(propose(session, [3]))} == {(EOS,), (4,), (4, 5)}
    assert {path for path, _ in nodes_of(propose(start(TokenRecycling(matrix)), [3]))} > {(EOS, 6)}
    assert {path for path, _ in nodes_of(propose(session, [EOS]))} == {(6,)}, "a prompt may end with one"


def test_a_chain_takes_the_first_id_of_each_row() -> None:
    matrix = warm(_3=[4, 5], _4=[3, 6], _5=[7], _6=[7])
    chains = (
        propose(start(TokenRecycling(matrix)), [3], depth=4, chain=True),
        propose(start(TokenRecycling(matrix), chain=True), [3], depth=4),
        propose(start(TokenRecycling(matrix, top_k=1)), [3], depth=4),
    )
    for draft in chains:
        assert draft.is_chain
        assert nodes_of(draft)[-1][0] == (4, 3, 4, 3)
        assert draft.nodes == 4
    assert not propose(start(TokenRecycling(matrix)), [3], depth=4).is_chain


def test_rejected_nodes_count_but_what_was_accepted_counts_more() -> None:
    session = start(TokenRecycling(warm(_3=[4, 5])))
    draft = propose(session, [3])
    # The root 3 is followed by 5, then by 9; the rejected 4 carries a token of its own, and another 5 hangs below it.
    checked = Draft.of_nodes([[(4, 0, 0.5), (5, 0, 0.2), (5, 1, 0.1)]])
    last = Verified(draft, checked.tokens.tolist(), checked.parents.tolist(), [[[5], [20], [21], [22]]])
    propose(session, [3, 5, 9], last=last)
    assert {token: row.ids for token, row in session.matrix._rows.items()} == {3: (5,), 4: (20,), 5: (21,)}


def test_of_two_twins_the_first_was_walked() -> None:
    session = start()
    draft = propose(session, [3])
    last = Verified(draft, [[4, 4, 5]], [[0, 0, 1]], [[[4], [5], [20], [21]]])
    propose(session, [3, 4, 5, 9], last=last)
    assert {token: row.ids for token, row in session.matrix._rows.items()} == {3: (4,), 4: (5,), 5: (21,)}


def test_places_without_a_node_teach_nothing() -> None:
    session = start(batch=2)
    draft = propose(session, [3], [4])
    last = Verified(draft, [[5, 0], [6, 7]], [[0, -1], [0, 1]], [[[1], [2], [99]], [[1], [2], [3]]])
    propose(session, [3, 8], [4, 8], last=last)
    assert sorted(session.matrix._rows) == [3, 4, 5, 6, 7]


def test_a_pass_that_it_was_not_asked_about_is_taken_in_if_its_place_is_known() -> None:
    session, other = start(), Draft.of_nodes([[(7, 0, 0.5)]])
    # A pass without nodes: the root is the last token but one, whoever was asked before.
    propose(session, [1, 2, 3], last=Verified(Draft.empty(1), [[]], [[]], [[[4]]]))
    assert set(session.matrix._rows) == {2}
    # Another drafter's tree, in the round this session was asked before: its nodes count as one's own.
    propose(session, [1, 2, 3, 7, 8], last=Verified(other, [[7]], [[0]], [[[7], [9]]]))
    assert {token: row.ids for token, row in session.matrix._rows.items()} == {2: (4,), 3: (7,), 7: (9,)}
    # A tree that does not lead to what was decided since: rounds went by.
    propose(session, [1, 2, 3, 7, 8, 5, 5, 6], last=Verified(other, [[7]], [[0]], [[[7], [9]]]))
    assert set(session.matrix._rows) == {2, 3, 7}
    # Rounds went by, and the last one checked nothing.
    propose(session, [1, 2, 3, 7, 8, 5, 5, 6, 6, 4], last=Verified(Draft.empty(1), [[]], [[]], [[[11]]]))
    row = session.matrix.get(6)
    assert row is not None
    assert row.ids == (11,)
    # A tree before this session was asked for the first time.
    late = start()
    propose(late, [1, 7, 8], last=Verified(other, [[7]], [[0]], [[[7], [9]]]))
    assert len(late.matrix) <= 2


def test_confidence_follows_what_came_of_a_row() -> None:
    row = Candidates((4, 5, 6), 0.0, 0.0)
    for _ in range(5):
        assert row.confidence(below=True)[0] > row.confidence(below=False)[0]
        better, worse = row.followed_by(4), row.followed_by(9)
        assert better.confidence(below=False)[0] > row.confidence(below=False)[0] > worse.confidence(below=False)[0]
        assert worse.confidence(below=False)[1] > row.confidence(below=False)[1]
        row = better
    surely = row
    for _ in range(100):
        surely = surely.followed_by(4)
        assert sum(surely.confidence(below=True)) < 1
    for _ in range(12):
        surely = surely.followed_by(9)
    assert surely.confidence(below=False)[0] < 0.3, "what lies long back is forgotten"


# ---------------------------------------------------------------------------------------------------------- the matrix


def write(session: TokenRecyclingSession, text: list[int], **options: Any) -> int:
    """A call that gives `text`, whose target is sure of it; how many tokens were drafted right."""
    ids, right = text[:1], 0
    draft = propose(session, ids, **options)
    while len(ids) < len(text):
        tokens, parents, root = draft.tokens[0].tolist(), draft.parents[0].tolist(), len(ids) - 1
        top = [[text[min(root + 1, len(text) - 1)], 90]] + [[91, 92]] * len(tokens)
        at: int | None = 0
        while at is not None and len(ids) < len(text):
            top[at] = [text[len(ids)], 90]
            ids.append(text[len(ids)])
            known = [i for i, parent in enumerate(parents, 1) if parent == at and tokens[i - 1] == ids[-1]]
            at = known[0] if known else None
            right += at is not None
        draft = propose(session, ids, last=Verified(draft, [tokens], [parents], [top]), **options)
    return right


def test_calls_share_a_matrix_that_is_given_and_nothing_else() -> None:
    text = list(range(10, 40))
    matrix = CandidateMatrix()
    assert write(start(TokenRecycling(matrix)), text) == 0
    assert len(matrix) == 29
    assert write(start(TokenRecycling(matrix)), text) > 20
    drafter = TokenRecycling()
    assert [write(start(drafter), text) for _ in range(2)] == [0, 0]
    with pytest.raises(dataclasses.FrozenInstanceError):
        drafter.top_k = 3  # type: ignore[misc]
    matrix.clear()
    assert len(matrix) == 0
    assert write(start(TokenRecycling(matrix)), text) == 0


def test_rows_of_a_batch_share_their_matrix() -> None:
    session = start(batch=2)
    draft = propose(session, [3], [4])
    last = Verified(draft, [[], []], [[], []], [[[4, 7]], [[5, 8]]])
    draft = propose(session, [3, 4], [4, 3], last=last, depth=2, nodes=2)
    assert [[path for path, _ in nodes_of(draft, row)] for row in range(2)] == [[(5,), (8,)], [(4,), (4, 5)]]


def test_a_matrix_is_saved_and_loaded(tmp_path: Path) -> None:
    matrix = CandidateMatrix()
    language, rows = Language(), [[1]]
    session = start(TokenRecycling(matrix))
    draft = Draft.empty(1)
    for _ in range(30):
        draft = propose(session, *rows, last=verify(language, rows, draft, 8))
    assert len(matrix) > 8
    matrix.save(tmp_path / "matrix.json")
    loaded = CandidateMatrix.load(tmp_path / "matrix.json")
    assert loaded._rows == matrix._rows
    other = propose(start(TokenRecycling(loaded)), *rows)
    assert nodes_of(other) == nodes_of(propose(start(TokenRecycling(matrix)), *rows))


@pytest.mark.parametrize(
    "content",
    [
        "no JSON",
        "[]",
        "{}",
        '{"candidate_matrix": [1]}',
        '{"candidate_matrix": {"x": [[1], 0, 0]}}',
        '{"candidate_matrix": {"1": [[], 0, 0]}}',
        '{"candidate_matrix": {"1": [[-1], 0, 0]}}',
        '{"candidate_matrix": {"1": [["a"], 0, 0]}}',
        '{"candidate_matrix": {"1": [[1], 1, 2]}}',
        '{"candidate_matrix": {"1": [[1], NaN, 0]}}',
        '{"candidate_matrix": {"1": [[1], 0]}}',
    ],
)
def test_a_file_that_holds_something_else_is_refused(content: str, tmp_path: Path) -> None:
    (tmp_path / "other.json").write_text(content, encoding="utf-8")
    with pytest.raises(ValueError, match=r"other.json was not written by CandidateMatrix.save"):
        CandidateMatrix.load(tmp_path / "other.json")


def test_a_file_holds_ids_and_counts_only(tmp_path: Path) -> None:
    warm(_3=[4, 5]).save(tmp_path / "matrix.json")
    assert json.loads((tmp_path / "matrix.json").read_text()) == {"candidate_matrix": {"3": [[4, 5], 0.0, 0.0]}}


@pytest.mark.parametrize("top_k", [0, 9])
def test_settings_that_cannot_work_are_refused(top_k: int) -> None:
    with pytest.raises(ValueError, match="top_k"):
        TokenRecycling(top_k=top_k)


def test_two_threads_lose_nothing_of_what_they_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(token_recycling, "MOST_SEEN", 1e9)
    matrix = warm(_1=[2])

    def work(thread: int) -> None:
        for _ in range(5000):
            matrix.update([(1, 2 + thread)], [(1, [2])])

    tiny.in_two_threads(work)
    assert matrix.get(1) == Candidates((2,), 10_000, 5000)


def test_every_change_of_a_matrix_waits_for_the_others(tmp_path: Path) -> None:
    matrix = warm(_1=[2])
    with ThreadPoolExecutor(3) as pool:
        with matrix._lock:
            path = tmp_path / "matrix.json"
            uses = [pool.submit(matrix.update, [], [(3, [4])]), pool.submit(matrix.save, path)]
            uses.append(pool.submit(matrix.clear))
            assert not wait(uses, timeout=0.1).done
        assert len(wait(uses, timeout=10).done) == 3


def test_two_threads_share_a_drafter_and_its_matrix(tmp_path: Path) -> None:
    matrix = CandidateMatrix()
    drafter = TokenRecycling(matrix)

    def work(thread: int) -> None:
        language = Language(seed=thread)
        for call in range(10):
            session, rows, draft = start(drafter), [[call]], Draft.empty(1)
            for _ in range(20):
                draft = propose(session, *rows, last=verify(language, rows, draft, 8), nodes=16)
                nodes_of(draft)
            matrix.save(tmp_path / f"{thread}.json")
            CandidateMatrix.load(tmp_path / f"{thread}.json")
            if call == 5:
                matrix.clear()

    tiny.in_two_threads(work)
    assert 0 < len(matrix) <= 12


# ------------------------------------------------------------------------------------------------------- with a model


def test_a_warm_matrix_drafts_better_and_changes_no_token() -> None:
    model = sg.enable(tiny.llama())
    known, matrix = tiny.truth_of(model, tiny.ONE, "greedy", 32), CandidateMatrix()
    accepted = []
    for _ in range(2):
        stats = sg.Stats()
        drafter = TokenRecycling(matrix, num_assistant_tokens=6)
        assert tiny.run(model, tiny.ONE, assistant=drafter, max_new_tokens=32, stats=stats) == known
        accepted.append(stats.accepted)
    assert accepted[1] > accepted[0]


@pytest.mark.timing
def test_a_proposal_costs_nothing_to_speak_of() -> None:
    rng = random.Random(0)
    matrix = CandidateMatrix()
    matrix.update([], [(token, rng.sample(range(49152), 8)) for token in range(49152)])
    session, draft, ids = start(TokenRecycling(matrix)), Draft.empty(1), [5, 6]
    took = []
    for _ in range(50):
        tokens, parents = draft.tokens.tolist(), draft.parents.tolist()
        top = [[rng.sample(range(49152), 8) for _ in range(1 + draft.nodes)]]
        last = Verified(draft, tokens, parents, top)
        begin = time.thread_time()
        draft = propose(session, ids, last=last)
        took.append(time.thread_time() - begin)
        assert draft.nodes == 64
        ids.append(rng.randrange(49152))
    assert sorted(took)[25] < 0.002  # a pass of 64 nodes takes some hundred times as long
