"""Several drafters as one: which of them drafts for a row, and what their drafts become in one tree."""

from __future__ import annotations

import dataclasses
import functools
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import heads
import pytest
import tiny
import torch
from tiny import ONE, RAGGED, run
from transformers import PreTrainedModel

import hf_specgen as sg
from hf_specgen.assistants import parts_of
from hf_specgen.draft import Context, Draft, Limit, Needs, Node, Request, Verified
from hf_specgen.drafters.combined import ASSUMED, beside, on_host
from hf_specgen.drafters.first_of import LIKELY, reached
from hf_specgen.drafters.merge import Trie

NEW = 32
ROWS = {"one": ONE, "ragged": RAGGED}
# A tree as what it says: for each path of tokens the confidence of its last one.
Paths = dict[tuple[int, ...], float]


# --------------------------------------------------------------------------------------------- the slow, obvious trie


def paths_of(tree: Sequence[Node], depth: int) -> Paths:
    """Twins are one node that has the confidence of both."""
    paths: list[tuple[int, ...]] = [()]
    found: Paths = {}
    for token, parent, confidence in tree:
        paths.append((*paths[parent], token))
        if len(paths[-1]) <= depth:
            found[paths[-1]] = found.get(paths[-1], 0.0) + confidence
    return found


def said_of(trees: Sequence[Paths], path: tuple[int, ...]) -> float:
    """The surest tree has its say, the next of what it left, and so on; none claims more than everything."""
    above = path[:-1]
    words = [{p: c for p, c in tree.items() if p[:-1] == above and p} for tree in trees]
    words = sorted(words, key=lambda word: -sum(word.values()))
    chance, left = 0.0, 1.0
    for word in words:
        claimed = sum(word.values())
        chance += left * word.get(path, 0.0) / max(1.0, claimed)
        left *= 1 - min(1.0, claimed)
    return chance


def merged(trees: Sequence[Paths]) -> tuple[Paths, Paths]:
    """For each path of any tree its confidence and the product of the confidences along it."""
    confidence = {path: said_of(trees, path) for tree in trees for path in tree}
    chances = dict.fromkeys(confidence, 1.0)
    for path in chances:
        for end in range(1, len(path) + 1):
            chances[path] *= confidence[path[:end]]
    return confidence, chances


def some_tree(chance: random.Random, nodes: int) -> list[Node]:
    """A tree over three tokens, so that trees have paths in common; siblings sum to at most 1."""
    tree: list[Node] = []
    left: dict[int, float] = {}
    for place in range(nodes):
        parent = chance.choice([place, place, chance.randint(0, place)])
        confidence = left.get(parent, 1.0) * chance.uniform(0.1, 0.9)
        left[parent] = left.get(parent, 1.0) - confidence
        tree.append((chance.randrange(3), parent, confidence))
    return tree


def some_trees(seed: int) -> tuple[list[list[Node]], int]:
    chance = random.Random(seed)
    trees = [some_tree(chance, chance.randint(0, 12)) for _ in range(chance.randint(1, 3))]
    return trees, chance.randint(1, 6)


@pytest.mark.parametrize("seed", range(100))
def test_a_merged_tree_is_that_of_the_reference(seed):
    trees, depth = some_trees(seed)
    confidence, chances = merged([paths_of(tree, depth) for tree in trees])
    for most in 1, 5, 64:
        kept = Trie(trees, depth).best(most)
        assert all(parent <= place for place, (_, parent, _) in enumerate(kept)), "parents come before children"
        found = paths_of(kept, depth)
        assert len(found) == len(kept) == min(most, len(confidence)), "a path is there once"
        assert found == pytest.approx({path: confidence[path] for path in found})
        assert sum(chances[path] for path in found) == pytest.approx(sum(sorted(chances.values())[::-1][:most]))


@pytest.mark.parametrize("seed", range(100))
def test_a_merged_chain_is_the_path_with_the_most_expected_tokens(seed):
    trees, depth = some_trees(seed)
    confidence, chances = merged([paths_of(tree, depth) for tree in trees])
    expected = {path: sum(chances[path[:end]] for end in range(1, len(path) + 1)) for path in chances}
    chain = Trie(trees, depth).best_chain()
    path = tuple(token for token, _, _ in chain)
    assert [parent for _, parent, _ in chain] == list(range(len(chain)))
    assert expected.get(path, 0.0) == pytest.approx(max(expected.values(), default=0.0))
    assert [said for _, _, said in chain] == pytest.approx([confidence[path[: i + 1]] for i in range(len(path))])


@pytest.mark.parametrize("seed", range(50))
def test_merged_siblings_never_sum_to_more_than_one(seed):
    trees, depth = some_trees(seed)
    trees.append([(token, 0, 0.9) for token in range(3)])  # of one who claims more than everything
    sums: dict[int, float] = {}
    for _, parent, confidence in Trie(trees, depth).best(64):
        assert 0 <= confidence <= 1
        sums[parent] = sums.get(parent, 0.0) + confidence
    assert max(sums.values()) <= 1 + 1e-9


def test_nonsense_from_a_drafter_is_no_reason_to_stop():
    said = torch.tensor([[-0.5, 2.0, float("nan")]])
    (odd,) = on_host(Draft(torch.tensor([[5, 6, 7]]), torch.tensor([[0, 1, 2]]), confidence=said))
    assert odd == [(5, 0, 0.0), (6, 1, 1.0), (7, 2, 0.0)]
    kept = Trie([[(4, 0, 0.5)], odd], 3).best(64)
    assert [(token, parent) for token, parent, _ in kept] == [(4, 0), (5, 0), (6, 2), (7, 3)]


def test_who_agrees_strengthens_and_who_disagrees_speaks_for_the_rest():
    agreed = Trie([[(5, 0, 0.8)], [(5, 0, 0.6)]], depth=3).best(9)
    assert agreed == [(5, 0, pytest.approx(0.8 + 0.2 * 0.6))]
    for trees in [[[(5, 0, 0.8)], [(6, 0, 0.6)]], [[(6, 0, 0.6)], [(5, 0, 0.8)]]]:
        rivals = {token: confidence for token, _, confidence in Trie(trees, depth=3).best(9)}
        assert rivals == {5: pytest.approx(0.8), 6: pytest.approx(0.2 * 0.6)}


# --------------------------------------------------------------------------------------------------- drafts on the host


def test_a_draft_on_the_host_has_its_nodes_only():
    tree = Draft(
        tokens=torch.tensor([[7, 8, 9, 4, 5]]),
        parents=torch.tensor([[0, -1, 1, 2, 3]]),  # 4 hangs on a place without a node
        confidence=torch.tensor([[0.5, 0.9, 0.25, 0.9, 0.75]]),
    )
    assert on_host(tree) == [[(7, 0, 0.5), (9, 1, 0.25), (5, 2, 0.75)]]
    rows = [[(1, 0, 0.5), (2, 1, 0.25)], [(3, 0, 1.0)], []]
    assert on_host(Draft.of_nodes(rows)) == rows


def test_without_confidence_each_sibling_has_its_share_of_what_the_elder_ones_left():
    rows = on_host(Draft(torch.tensor([[1, 2, 3, 4]]), torch.tensor([[0, 0, 1, 0]])))
    left = 1 - ASSUMED
    assert [said for _, _, said in rows[0]] == pytest.approx([ASSUMED, ASSUMED * left, ASSUMED, ASSUMED * left * left])


# ------------------------------------------------------------------------------------------------------ told drafters


@dataclass(frozen=True)
class Told:
    """Drafts what it is told, for rows that are asked for; notes what it was shown.

    Attributes:
        rows: its nodes.
        needs: of its session.
        whole: see `Draft`.
        probs: it says that it drew its tokens, from a distribution over 9 ids.
        shown: the contexts and limits.
    """

    rows: Sequence[Sequence[Node]] = ((),)
    needs: Needs = field(default_factory=Needs)
    whole: bool = False
    probs: float | None = None
    num_assistant_tokens: int | None = None
    shown: list[tuple[Context, Limit]] = field(default_factory=list)
    made: list[Draft] = field(default_factory=list)

    def start(self, target: PreTrainedModel, request: Request) -> Told:
        return self

    def propose(self, context: Context, limit: Limit) -> Draft:
        self.shown.append((context, limit))
        draft = Draft.of_nodes([row if depth else () for row, depth in zip(self.rows, limit.depth, strict=True)])
        if self.probs is not None:
            draft = dataclasses.replace(draft, probs=torch.full((*draft.tokens.shape, 9), self.probs))
        self.made.append(dataclasses.replace(draft, whole=self.whole))
        return self.made[-1]


def chain(*tokens: int, sure: float = 0.9) -> list[Node]:
    return [(token, place, sure) for place, token in enumerate(tokens)]


def propose(drafter: Any, depth: Sequence[int] = (8,), last: Verified | None = None, is_chain: bool = False) -> Draft:
    context = Context([[1, 2, 3]] * len(depth), [3] * len(depth), last=last, cache="the cache")
    session = drafter.start(None, Request(batch=len(depth)))
    return session.propose(context, Limit(tuple(depth), 64, is_chain))


def hosted(draft: Draft) -> list[list[tuple[int, int]]]:
    return [[node[:2] for node in row] for row in on_host(draft)]


def links(*tokens: int) -> list[tuple[int, int]]:
    return [(token, place) for place, token in enumerate(tokens)]


# ----------------------------------------------------------------------------------------------------------- first of


@pytest.mark.parametrize("matched", range(2, 8))
@pytest.mark.parametrize("depth", [8, 32])
def test_prompt_lookup_is_sure_of_what_follows_a_match_of_at_least_so_many_tokens(matched, depth):
    match = list(range(10, 10 + matched))
    ids = [50, *match, *range(60, 100), 51, *match]
    session = sg.PromptLookup(min_ngram=2).start(None, Request(batch=1))
    (nodes,) = on_host(session.propose(Context([ids], [len(ids)]), Limit((depth,), 64, True)))
    assert len(nodes) == depth
    # Confidences come back in float32; the first of these is a tie.
    assert reached(nodes, matched) >= LIKELY - 1e-6
    assert reached(nodes, matched + 1) < LIKELY - 1e-6


def test_the_chance_to_accept_so_many_tokens_sums_over_all_paths():
    tree = [(1, 0, 0.5), (2, 0, 0.25), (3, 1, 0.5), (4, 2, 1.0), (5, 3, 0.1)]
    assert [reached(tree, depth) for depth in (1, 2, 3, 4)] == pytest.approx([0.75, 0.5, 0.025, 0.0])


def test_each_row_takes_the_first_draft_that_is_sure():
    first = Told([chain(4, 5, 6), chain(4, 5, 6, sure=0.5), [], chain(4)])
    second = Told([chain(7, 8, 3), chain(7, 8, 3), chain(7, 8, 3), chain(7, 8, 3)])
    draft = propose(sg.FirstOf(first, second, at_least=3), depth=(8, 8, 8, 0))
    assert hosted(draft) == [links(4, 5, 6), links(7, 8, 3), links(7, 8, 3), []]
    assert [limit.depth for _, limit in second.shown] == [(0, 8, 8, 0)], "a settled row is not asked for"


def test_a_row_that_nobody_is_sure_of_takes_the_last_draft_there_is():
    unsure = [chain(4, sure=0.4), chain(4, sure=0.4), []]
    draft = propose(sg.FirstOf(Told(unsure), Told([chain(7, sure=0.1), [], []])), depth=(8, 8, 8))
    assert hosted(draft) == [links(7), links(4), []]


def test_no_more_is_asked_for_than_there_is_room():
    # Three tokens are accepted as likely as not; the fourth has no room.
    nodes = chain(4, 5, 6, sure=0.8)
    for depth, wanted in (3, 4), (4, 7):
        assert hosted(propose(sg.FirstOf(Told([nodes]), Told([chain(7)])), (depth,)))[0][0][0] == wanted


@pytest.mark.parametrize("reads", [Needs(), Needs(top_k=2)])
def test_a_drafter_that_no_row_needs_is_asked_only_if_it_reads_the_targets_passes(reads):
    second = Told([chain(7)], needs=reads)
    assert hosted(propose(sg.FirstOf(Told([chain(4, 5, 6, 7)]), second))) == [links(4, 5, 6, 7)]
    assert [limit.depth for _, limit in second.shown] == ([(0,)] if reads.top_k else [])


# ---------------------------------------------------------------------------------------------- what sessions are shown

BOTH = [sg.FirstOf, sg.Merge]


@pytest.mark.parametrize("kind", BOTH)
def test_a_session_is_shown_what_it_asked_for(kind):
    drafters = [Told(needs=Needs(top_k=k, cache_view=k == 3)) for k in (0, 1, 3)]
    combined = kind(*drafters, Told())
    assert combined.start(None, Request(batch=1)).needs == Needs(top_k=3, cache_view=True)
    last = Verified(Draft.empty(2), [[8], []], [[0], []], [[[1, 2, 3], [4, 5, 6]], []])
    propose(combined, (8,), last)
    (seen,) = zip(*[drafter.shown for drafter in drafters], strict=True)
    assert [context.last.top for context, _ in seen] == [[], [[[1], [4]], []], last.top]
    assert [context.last.draft is last.draft for context, _ in seen] == [True] * 3
    assert [context.cache for context, _ in seen] == [None, None, "the cache"]


@pytest.mark.parametrize("kind", BOTH)
def test_hidden_states_reach_one_session_only(kind):
    reads = Told(needs=Needs(hidden_layers=(1, 2)))
    assert kind(Told(), reads).start(None, Request(batch=1)).needs.hidden_layers == (1, 2)
    with pytest.raises(ValueError, match="Told and Told both read"):
        kind(reads, Told(), reads).start(None, Request(batch=1))


@pytest.mark.parametrize("kind", BOTH)
def test_a_draft_nobody_adds_to_stays_its_drafters_own(kind):
    told = Told([chain(4, 5, 6, 7), []])
    draft = propose(kind(told, Told([[], []])), (8, 8))
    assert draft is told.made[-1]


@pytest.mark.parametrize("kind", BOTH)
def test_a_draft_of_several_is_nobodys(kind):
    first, second = Told([chain(4, 5, 6, 7), []]), Told([chain(4), chain(7)])
    draft = propose(kind(first, second), (8, 8))
    assert hosted(draft) == [links(4, 5, 6, 7), links(7)]
    assert all(draft is not own for own in [*first.made, *second.made])


@pytest.mark.parametrize("kind", BOTH)
def test_a_draft_that_is_checked_as_a_whole_is_taken_alone(kind):
    whole = Told([chain(6), chain(7)], whole=True)
    assert propose(kind(Told([chain(4, sure=0.2), []]), whole), (8, 8)) is whole.made[-1]


@pytest.mark.parametrize("kind", BOTH)
def test_nothing_comes_of_nothing(kind):
    assert propose(kind(Told([[], []]), Told([[], []])), (8, 8)).tokens.shape == (2, 0)


def test_merged_drafts_keep_the_depth_and_the_nodes_of_the_limit():
    first, second = (
        Told([chain(4, 5, 6), chain(4, 5, 6)]),
        Told([chain(4, 7, 8), [*chain(5, 6, sure=0.5), (8, 0, 0.05)]]),
    )
    draft = propose(sg.Merge(first, second), (2, 3))
    assert [set(row) for row in hosted(draft)] == [
        {(4, 0), (5, 1), (7, 1)},
        {(4, 0), (5, 1), (6, 2), (5, 0), (6, 4), (8, 0)},
    ]
    draft = propose(sg.Merge(first, second), (2, 3), is_chain=True)
    assert draft.is_chain
    assert hosted(draft) == [links(4, 5), links(4, 5, 6)]


# ---------------------------------------------------------------------------------------------- parts that are apart


@dataclass
class Allots:
    """Lets each part draft so deep, by its number; parts on trial are not used.

    Attributes:
        depth: of each.
        tried: those on trial.
        beside: what each was asked beside.
    """

    depth: dict[int, int]
    tried: tuple[int, ...] = ()
    beside: dict[int, list[list[tuple[int, int]]]] = field(default_factory=dict)

    def cheap(self, part: str) -> bool:
        return "=1" in part

    def limit(self, part: str, limit: Limit, beside: Draft) -> Limit:
        number = int(part.removesuffix(")")[-1])
        self.beside[number] = hosted(beside)
        return dataclasses.replace(limit, depth=tuple(min(self.depth[number], deep) for deep in limit.depth))

    def took(self, part: str, draft: Draft) -> Draft:
        return Draft.empty(len(draft.tokens)) if int(part.removesuffix(")")[-1]) in self.tried else draft


@dataclass(frozen=True)
class Numbered(Told):
    number: int = 0


def allotted(drafter: Any, shares: Allots, depth: int = 8) -> list[list[tuple[int, int]]]:
    context = Context([[1, 2, 3]], [3], hidden=["the states"])
    return hosted(drafter.start(None, Request(batch=1)).propose(context, Limit((depth,), 64, False, shares)))


@pytest.mark.parametrize("kind", BOTH)
def test_a_part_that_rests_takes_the_states_and_leaves_the_others_their_drafts(kind):
    cheap = Numbered([chain(4, 5)], number=1)
    reader, other = Numbered([chain(7)], needs=Needs(hidden_layers=(1,)), number=2), Numbered([chain(8)], number=3)
    shares = Allots({1: 8, 2: 0, 3: 0})
    assert allotted(kind(cheap, reader, other), shares) == [links(4, 5)]
    assert [(context.hidden, limit.depth) for context, limit in reader.shown] == [(["the states"], (0,))]
    assert not other.shown


@pytest.mark.parametrize("kind", BOTH)
def test_of_a_part_on_trial_nothing_is_used(kind):
    cheap, dear = Numbered([chain(4, 5)], number=1), Numbered([chain(7, 8, 9, 3)], number=2)
    assert allotted(kind(cheap, dear), Allots({1: 8, 2: 1}, tried=(2,))) == [links(4, 5)]
    assert [limit.depth for _, limit in dear.shown] == [(1,)]


def test_cheap_parts_of_a_merge_are_asked_first_and_dear_ones_beside_them():
    cheap, dear = Numbered([chain(4, 5)], number=1), Numbered([chain(7)], number=2)
    shares = Allots({1: 8, 2: 8})
    inner = sg.FirstOf(Numbered([[]], number=1), Numbered([chain(9)], number=3))
    shares.depth[3] = 8
    drafted = allotted(sg.Merge(dear, cheap, inner), shares)
    assert sorted(token for token, _ in drafted[0]) == [4, 5, 7, 9]
    assert shares.beside[2] == [links(4, 5)]
    assert shares.beside[3] == [[]], "what its own combination has"


def test_wrapped_combinations_are_one_drafter():
    assert parts_of(sg.FirstOf(Numbered(number=1), sg.Merge(Numbered(number=2), Numbered(number=3)))) == tuple(
        f"Numbered(number={number})" for number in (1, 2, 3)
    )
    assert parts_of(Sometimes(sg.Merge(Told(), Told()))) == ()


# --------------------------------------------------------------------------------------- rules that read probabilities


@pytest.mark.parametrize("kind", BOTH)
def test_of_drafts_that_were_drawn_the_first_one_there_is_is_taken(kind):
    drawn = Told([chain(4, sure=0.1), []], probs=0.25)
    rival = Told([chain(7, 8, 2, 1), chain(7, 8, 2, 1)], probs=0.5)
    draft = propose(kind(drawn, rival), (8, 8), is_chain=True)
    assert hosted(draft) == [links(4), links(7, 8, 2, 1)]
    assert draft.probs[:, 0, 0].tolist() == [0.25, 0.5]


def test_beside_drawn_rows_others_are_certain():
    drawn, certain = propose(Told([chain(4, 5), []], probs=0.25), (8, 8)), propose(Told([[], chain(7)]), (8, 8))
    draft = beside([drawn, certain], [0, 1])
    assert hosted(draft) == [links(4, 5), links(7)]
    assert draft.probs[0].tolist() == [[0.25] * 9] * 2
    assert draft.probs[1, 0].tolist() == [0.0] * 7 + [1.0, 0.0]


# ------------------------------------------------------------------------------------------------ with a model, the law


@functools.cache
def target() -> PreTrainedModel:
    return sg.enable(tiny.llama())


@functools.cache
def sibling() -> PreTrainedModel:
    return tiny.sibling(target(), noise=0.1)


@functools.cache
def truth(rows: str, mode: str) -> tuple[tuple[int, ...], ...]:
    return tiny.truth_of(target(), ROWS[rows], mode, NEW)


def with_model(kind: str, texts: Sequence[Sequence[int]], branches: int = 1) -> Any:
    """Combinations in which the parts take turns, and a session meets drafts that are not its own."""
    store = sg.PromptLookup(store=tiny.store_of(texts))
    model = sg.DraftModel(sibling(), branches=branches)
    return {
        "first of": lambda: sg.FirstOf(store, model),
        "merge": lambda: sg.Merge(store, model),
        "nested": lambda: sg.FirstOf(store, sg.Merge(sg.PromptLookup(1), model)),
        "medusa": lambda: sg.Merge(store, fitted("medusa", branches)),
        "eagle": lambda: sg.FirstOf(store, fitted("eagle", branches)),
        "eagle3": lambda: sg.Merge(sg.PromptLookup(1), fitted("eagle3", branches), sg.TokenRecycling()),
    }[kind]()


@functools.cache
def fitted(method: str, branches: int) -> Any:
    """Heads that know all texts a little; they read the target's states, also of rounds in which others draft."""
    texts = truth("ragged", "greedy")
    if method == "medusa":
        return sg.Medusa(heads.medusa_of(target(), texts), top_k=branches)
    return sg.Eagle(heads.eagle_of(target(), texts, method), top_k=branches)


KINDS = ["first of", "merge", "nested", "medusa", "eagle", "eagle3"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("branches", [1, 3])
@pytest.mark.parametrize("mode", ["greedy", "hash-sampled"])
@pytest.mark.parametrize("rows", ROWS)
def test_with_a_model_in_it_the_text_is_that_of_plain_decoding(kind, branches, mode, rows):
    stats = sg.Stats()
    assistant = with_model(kind, truth(rows, mode), branches)
    assert run(target(), ROWS[rows], mode, assistant=assistant, max_new_tokens=NEW, stats=stats) == truth(rows, mode)
    assert 0 < stats.accepted < stats.drafted


@pytest.mark.parametrize("kind", KINDS)
def test_so_it_is_where_costs_decide_the_length(kind):
    known = truth("ragged", "greedy")
    kwargs = {"num_assistant_tokens": "auto", "max_new_tokens": NEW}
    assert run(target(), RAGGED, assistant=with_model(kind, known), **kwargs) == known


@pytest.mark.parametrize("rule", ["rejection", "block"])
@pytest.mark.parametrize("kind", KINDS)
def test_with_a_model_in_it_seed_and_drafter_repeat_the_text(rule, kind):
    known = truth("ragged", "sampled")
    kwargs = {"acceptance": rule, "max_new_tokens": NEW}
    texts = [
        run(target(), RAGGED, "sampled", seed=seed, assistant=with_model(kind, known), **kwargs) for seed in (3, 3, 4)
    ]
    assert texts[0] == texts[1]
    assert texts[0] != texts[2]


@dataclass(frozen=True)
class Sometimes:
    """Drafts as another does, but only behind even ids, and is sure of even ones: a choice by that would be biased."""

    drafter: Any
    num_assistant_tokens: int | None = None

    def start(self, target: PreTrainedModel, request: Request) -> Any:
        session = self.drafter.start(target, request)
        propose = session.propose

        def sometimes(context: Context, limit: Limit) -> Draft:
            depth = tuple(0 if ids[-1] % 2 else deep for ids, deep in zip(context.ids, limit.depth, strict=True))
            draft = propose(context, dataclasses.replace(limit, depth=depth))
            return dataclasses.replace(draft, confidence=1.0 - draft.tokens % 2)

        session.propose = sometimes
        return session


@pytest.mark.parametrize(("rule", "kind"), [("rejection", "first of"), ("block", "merge")])
def test_the_distribution_of_the_first_tokens_is_the_targets(rule, kind):
    parts = Sometimes(sg.DraftModel(sibling())), sg.DraftModel(sibling(), sample=False)
    assistant = sg.Merge(*parts) if kind == "merge" else sg.FirstOf(*parts, at_least=1)
    assert tiny.misfit(target(), assistant, rule, rows=4000) < tiny.FITS


# ------------------------------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize("kind", BOTH)
def test_what_is_no_drafter_is_refused_by_name(kind):
    with pytest.raises(ValueError, match=r"goes into hf_specgen.DraftModel\(model\)"):
        kind(sg.PromptLookup(), tiny.llama())
    with pytest.raises(ValueError, match="not a type"):
        kind(sg.PromptLookup, sg.PromptLookup())
    with pytest.raises(ValueError, match="two drafters or more, not 1"):
        kind(sg.PromptLookup())
    with pytest.raises(ValueError, match="at_least must be 1 or more"):
        sg.FirstOf(sg.PromptLookup(), sg.PromptLookup(), at_least=0)


@pytest.mark.parametrize("kind", BOTH)
def test_a_combination_is_a_value(kind):
    combined = kind(sg.PromptLookup(), sg.PromptLookup(2))
    assert combined == kind(sg.PromptLookup(), sg.PromptLookup(2))
    assert "PromptLookup(min_ngram=2" in repr(combined)
    assert combined.num_assistant_tokens is None
    with pytest.raises(dataclasses.FrozenInstanceError):
        combined.drafters = ()


@pytest.mark.parametrize("kind", BOTH)
def test_a_part_that_cannot_draft_is_refused_before_the_first_pass(kind):
    class Refuses(Told):
        def start(self, target: PreTrainedModel, request: Request) -> Told:
            raise ValueError("no such target")

    with pytest.raises(ValueError, match="no such target"):
        run(target(), ONE, assistant=kind(sg.PromptLookup(), Refuses()), max_new_tokens=4)
