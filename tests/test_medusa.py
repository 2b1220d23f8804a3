"""Medusa: what the heads read, the chains and trees they draft, and how these are built."""

from __future__ import annotations

import copy
import functools
import itertools
import random
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import accelerate
import pytest
import tiny
import torch
from heads import babble, speaker
from tiny import ONE, RAGGED, VOCAB, Prompt, in_two_threads, run
from torch import Tensor
from torch.nn.functional import cross_entropy, linear, silu
from transformers import LlamaConfig, LlamaForCausalLM, LogitsProcessor, LogitsProcessorList, PreTrainedModel

import hf_specgen as sg
from hf_specgen.draft import Context, Draft, Limit, Request
from hf_specgen.drafters import draft_model, fitting
from hf_specgen.drafters.medusa_choices import closed

NEW = 20
ACCURACIES = [[0.5, 0.2, 0.1], [0.4, 0.15, 0.2], [0.3, 0.1]]
CHOICES = [(1, 0, 2), (0,), (0, 3), (2,)]


@functools.cache
def target() -> Any:
    return sg.enable(tiny.llama())


@functools.cache
def heads_of(lm_heads: str = "own", num_heads: int = 3, num_layers: int = 1, seed: int = 0) -> sg.MedusaHeads:
    """Heads that guess something of their own at each place; for greedy texts often what comes."""
    made = sg.MedusaHeads.fresh(target(), num_heads, num_layers, lm_heads)  # type: ignore[arg-type]
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight in made.parameters():
            weight.add_(0.2 * torch.randn(weight.shape, generator=generator, dtype=weight.dtype))
    return made


def with_accuracies(heads: sg.MedusaHeads, accuracies: Any = ACCURACIES) -> sg.MedusaHeads:
    config = sg.MedusaConfig.from_dict(heads.config.to_dict())
    config.accuracies = accuracies
    other = sg.MedusaHeads(config).to(heads.dtype)
    other.load_state_dict(heads.state_dict())
    return other


DRAFTERS = {
    "grown": lambda: sg.Medusa(heads_of(), top_k=3, nodes=12),
    "choices": lambda: sg.Medusa(heads_of("shared"), choices=CHOICES),
    "measured": lambda: sg.Medusa(with_accuracies(heads_of("target")), nodes=9),
    "two layers": lambda: sg.Medusa(heads_of("own", 2, 2), top_k=4, nodes=7),
}

# --- Against a slow reference -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Watched:
    """A drafter whose drafts are kept, with what they were made from."""

    drafter: sg.Medusa
    seen: list[tuple[Any, Context, Limit, list[list[int]], Draft]] = field(default_factory=list)
    num_assistant_tokens: int | None = None

    def start(self, model: PreTrainedModel, request: Request) -> Any:
        session = self.drafter.start(model, request)
        propose = session.propose

        def watched(context: Context, limit: Limit) -> Draft:
            draft = propose(context, limit)
            self.seen.append((session, context, limit, [list(ids) for ids in context.ids], draft))
            return draft

        session.propose = watched  # type: ignore[method-assign]
        return session


def slow_logits(heads: sg.MedusaHeads, ids: Sequence[int]) -> Tensor:
    """`(heads, vocab)`: the target runs over the whole text again, and each head on the state before the root."""
    with torch.no_grad():
        state = target()(torch.tensor([ids[:-1]]), output_hidden_states=True).hidden_states[-1][0, -1]
        rows = []
        for place, blocks in enumerate(heads.blocks):
            x = state
            for block in blocks:  # type: ignore[attr-defined]
                x = x + silu(linear(x, block.weight, block.bias))
            kind = heads.config.lm_heads
            lm_head = target().lm_head if kind == "target" else heads.lm_heads[place if kind == "own" else 0]
            rows.append(linear(x, lm_head.weight))  # type: ignore[arg-type]
    return torch.stack(rows)


@dataclass
class Slow:
    """One row of one round, node by node."""

    heads: sg.MedusaHeads
    session: Any
    context: Context
    row: int
    ids: list[int]

    def __post_init__(self) -> None:
        self.logits = slow_logits(self.heads, self.ids)

    def scores(self, path: tuple[int, ...]) -> Tensor:
        """What the head behind `path`, drafted ids, makes of the next token, after the processors."""
        scores = self.logits[len(path)].float().unsqueeze(0)
        processors = self.session.request.processors
        if processors is not None and not processors.empty:
            scores = processors.row(self.row)(torch.tensor([[*self.ids, *path]]), scores)
        return scores[0]

    def ranked(self, path: tuple[int, ...]) -> tuple[list[int], list[float]]:
        """All ids by how likely the target is to choose them, likeliest first, and their log chances."""
        scores = self.scores(path)
        if self.context.noise is not None:
            place = torch.tensor([[self.context.positions[self.row] + len(path)]])
            scores = self.context.noise.rows([self.row]).at(place).perturb(scores.view(1, 1, -1))[0, 0].float()
        logs = scores.log_softmax(-1)
        order = logs.argsort(descending=True, stable=True)
        return order.tolist(), logs[order].tolist()

    def possible(self, text: tuple[int, ...]) -> bool:
        """Whether the processors leave all of it a chance; of what they do not any may be drafted."""
        return all(self.scores(text[:end])[token] > -torch.inf for end, token in enumerate(text))

    def of_ranks(self, paths: Sequence[tuple[int, ...]]) -> set[tuple[int, ...]]:
        """The drafted texts of a fixed tree, but for impossible ones."""
        texts = set()
        for ranks in paths:
            text: tuple[int, ...] = ()
            for rank in ranks:
                text = (*text, self.ranked(text)[0][rank])
            texts.add(text)
        return set(filter(self.possible, texts))

    def grown(self, depth: int, branches: int, most: int) -> set[tuple[int, ...]]:
        """The likeliest nodes of the whole tree of `branches` children each."""
        everything: list[tuple[float, tuple[int, ...]]] = []
        level: list[tuple[float, tuple[int, ...]]] = [(0.0, ())]
        for _ in range(depth):
            below = []
            for chance, text in level:
                ids, logs = self.ranked(text)
                below += [(chance + log, (*text, token)) for token, log in zip(ids[:branches], logs, strict=False)]
            everything += below
            if self.session.scoring.reads_prefix:
                below = sorted(below, reverse=True)[:branches]
            level = below
        return {text for chance, text in sorted(everything, reverse=True)[:most] if chance > float("-inf")}


def texts_of(draft: Draft, row: int) -> dict[tuple[int, ...], int]:
    """The texts that a row's nodes stand for, and their places."""
    texts: dict[tuple[int, ...], int] = {}
    along: list[tuple[int, ...]] = [()]
    for place, (token, parent) in enumerate(zip(draft.tokens[row].tolist(), draft.parents[row].tolist(), strict=True)):
        text = (*along[max(parent, 0)], token)
        along.append(text)
        if parent >= 0:
            assert text not in texts
            texts[text] = place
    return texts


def check_against_slow(drafter: sg.Medusa, seen: Sequence[tuple[Any, Context, Limit, list[list[int]], Draft]]) -> None:
    heads = drafter.heads
    for session, context, limit, ids, draft in seen:
        for row, asked in enumerate(limit.depth):
            depth = min(asked, heads.config.num_heads)
            found = texts_of(draft, row)
            if not depth:
                assert not found
                continue
            slow = Slow(heads, session, context, row, ids[row])
            deepest = min(max(limit.depth), heads.config.num_heads)
            if limit.chain:
                expected = slow.of_ranks([(0,) * length for length in range(1, depth + 1)])
            elif drafter.choices is not None or heads.config.accuracies is not None:
                paths = drafter.choices or sg.choices_from(heads.config.accuracies[:deepest], drafter.nodes)
                expected = slow.of_ranks([tuple(path) for path in paths if len(path) <= depth])
            else:
                expected = slow.grown(depth, drafter.top_k, drafter.nodes)
            assert set(filter(slow.possible, found)) == expected
            if heads.config.accuracies is None and not limit.chain:
                assert draft.confidence is not None
                for text, place in found.items():
                    order, logs = slow.ranked(text[:-1])
                    chance = torch.tensor(logs[order.index(text[-1])]).exp()
                    torch.testing.assert_close(draft.confidence[row, place], chance, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("name", DRAFTERS)
@pytest.mark.parametrize("mode", ["greedy", "sampled", "penalties-greedy", "penalties-sampled"])
def test_drafts_are_those_of_a_slow_reference_and_change_no_text(name, mode):
    drafter = DRAFTERS[name]()
    for prompt, chain in ((RAGGED, False), (RAGGED, True)):
        watched = Watched(drafter)
        kwargs: dict[str, Any] = {"max_new_tokens": NEW, "num_assistant_tokens": 5}
        if chain:
            kwargs["cache_implementation"] = "static"  # takes no tree
        assert run(target(), prompt, mode, assistant=watched, **kwargs) == run(
            target(), prompt, mode, assistant=sg.Plain(), max_new_tokens=NEW
        )
        assert len(watched.seen) > 4
        assert all(limit.chain == chain for _, _, limit, _, _ in watched.seen)
        check_against_slow(drafter, watched.seen[:4])


def test_one_pass_of_the_heads_a_round_and_of_no_more_of_them_than_asked():
    heads, watched = heads_of(), Watched(sg.Medusa(heads_of(), nodes=10))
    passes: list[int] = []
    hooks = [block[0].register_forward_hook(lambda *_, h=h: passes.append(h)) for h, block in enumerate(heads.blocks)]
    run(target(), ONE, assistant=watched, max_new_tokens=NEW, num_assistant_tokens=2)
    for hook in hooks:
        hook.remove()
    assert passes.count(0) == len(watched.seen)
    assert 2 not in passes  # the third head


def test_depth_beyond_the_heads_is_cut():
    watched = Watched(sg.Medusa(heads_of(), nodes=60))
    run(target(), ONE, assistant=watched, max_new_tokens=NEW, num_assistant_tokens=8)
    assert {max(limit.depth) for _, _, limit, _, _ in watched.seen} >= {8}
    assert max(int(draft.tree.depth.max()) for *_, draft in watched.seen) == 3


@pytest.mark.parametrize("name", DRAFTERS)
@pytest.mark.parametrize("chain", [True, False])
def test_no_row_goes_deeper_than_it_was_asked(name, chain):
    session = DRAFTERS[name]().start(target(), Request(batch=3))
    states = list(torch.randn(3, 1, 32, dtype=torch.float64))
    draft = session.propose(Context(ids=[[5, 6]] * 3, positions=[2] * 3, hidden=states), Limit((1, 0, 2), 64, chain))
    depth = draft.tree.depth[:, 1:].where(draft.parents >= 0, 0)
    assert depth.amax(1).tolist() == [1, 0, 2]
    # Nothing hangs below a node that was left out.
    above = torch.nn.functional.pad(depth, (1, 0)).gather(1, draft.parents.clamp(min=0))
    assert torch.equal(above[draft.parents >= 0] + 1, depth[draft.parents >= 0])


def test_the_last_states_survive_rounds_without_a_question():
    """A session is asked with depth 0, or not at all for a while; then nothing but the newest state is new."""
    request = Request(batch=2)
    session, other = (sg.Medusa(heads_of()).start(target(), request) for _ in range(2))
    states = [torch.randn(4, 32, dtype=torch.float64), torch.randn(3, 32, dtype=torch.float64)]
    context = Context(ids=[[5] * 5, [5] * 4], positions=[5, 4], hidden=states)
    none = [state[:0] for state in states]
    assert session.propose(context, Limit((0, 0), 64, False)).nodes == 0
    late = session.propose(replace(context, hidden=none), Limit((3, 3), 64, False))
    at_once = other.propose(context, Limit((3, 3), 64, False))
    assert torch.equal(late.tokens, at_once.tokens)
    # One row gains, the other does not.
    gained = [torch.randn(2, 32, dtype=torch.float64), none[1]]
    after = session.propose(replace(context, hidden=gained), Limit((3, 3), 64, False))
    assert torch.equal(after.tokens[1], at_once.tokens[1])
    assert not torch.equal(after.tokens[0], at_once.tokens[0])


# --- Trees ------------------------------------------------------------------------------------------------------------


def value(accuracies: Sequence[Sequence[float]], paths: Sequence[tuple[int, ...]]) -> float:
    """The tokens a tree is expected to have accepted."""
    total = 0.0
    for path in paths:
        chance = 1.0
        for depth, rank in enumerate(path):
            chance *= accuracies[depth][rank]
        total += chance
    return total


@pytest.mark.parametrize("seed", range(6))
def test_trees_by_accuracies_are_the_best_of_their_size(seed):
    chance = random.Random(seed)
    table = [[chance.random() / 2 for _ in range(3)], [chance.random() / 2 for _ in range(2)]]
    nodes = [(a,) for a in range(3)] + [(a, b) for a in range(3) for b in range(2)]
    for size in range(1, 6):
        best = max(
            value(table, tree)
            for tree in itertools.combinations(nodes, size)
            if all(path[:-1] in tree for path in tree if len(path) > 1)
        )
        chosen = sg.choices_from(table, size)
        assert len(set(chosen)) == size
        assert set(closed(chosen)) == set(chosen)
        assert value(table, chosen) == pytest.approx(best)


def test_the_likeliest_nodes_come_first_and_ones_that_are_never_right_not_at_all():
    assert sg.choices_from([[0.5, 0.0], [0.25]], 10) == ((0,), (0, 0))
    # A lower rank may have been right more often.
    assert sg.choices_from([[0.1, 0.6]], 1) == ((1,),)
    assert sg.choices_from([[0.0]], 5) == ()


def test_heads_that_were_never_right_draft_nothing_in_trees():
    heads = with_accuracies(heads_of(), [[0.0], [0.0], [0.0]])
    watched = Watched(sg.Medusa(heads))
    run(target(), ONE, assistant=watched, max_new_tokens=6)
    assert all(draft.nodes == 0 for *_, draft in watched.seen)


def test_choices_are_closed_under_prefixes_and_keep_their_order():
    assert closed(CHOICES) == ((1,), (1, 0), (1, 0, 2), (0,), (0, 3), (2,))
    assert closed([[0], [0], (0, 0)]) == ((0,), (0, 0))
    # With fewer nodes the first ones stay.
    session = sg.Medusa(heads_of(), choices=CHOICES).start(target(), Request(batch=1))
    assert session._shape(3, 4).paths == ((1,), (1, 0), (1, 0, 2), (0,))
    assert session._shape(2, 4).paths == ((1,), (1, 0), (0,), (0, 3))


@pytest.mark.parametrize("choices", [[], [()], [(0, -1)], [(0.5,)], ["00"], [0], [(True,)]])
def test_choices_that_are_no_paths_are_refused(choices):
    with pytest.raises(ValueError, match="choice"):
        sg.Medusa(heads_of(), choices=choices)


def test_measured_accuracies_are_counts_over_all_places():
    heads = heads_of("target")
    texts = [run(target(), ONE, assistant=sg.Plain(), max_new_tokens=30)[0], (3, 4, 5)]
    told: list[int] = []
    measured = sg.measure_accuracies(target(), heads, texts, 5, prompt_lengths=[14, 0], progress=told.append)
    hits, seen = [[0] * 5 for _ in range(3)], [0] * 3
    for text, prompt in zip(texts, (14, 0), strict=True):
        for place in range(1, len(text)):
            best = slow_logits(heads, text[: place + 1]).topk(5).indices.tolist()
            for head in range(3):
                # The state of place - 1 guesses place + 1 and so on.
                at = place + 1 + head
                if prompt <= at < len(text):
                    seen[head] += 1
                    for rank in range(5):
                        hits[head][rank] += best[head][rank] == text[at]
    assert measured == [[hit / max(1, total) for hit in row] for row, total in zip(hits, seen, strict=True)]
    assert told == [1, 2]
    assert all(sum(row) <= 1 for row in measured)


def test_measured_accuracies_are_the_confidence():
    heads = with_accuracies(heads_of())
    for drafter in (sg.Medusa(heads), sg.Medusa(heads, choices=[(0, 2), (1, 1)])):
        watched = Watched(drafter)
        run(target(), ONE, assistant=watched, max_new_tokens=NEW, num_assistant_tokens=3)
        session, *_, draft = watched.seen[0]
        paths = session._shape(3, 64).paths
        expected = torch.tensor([ACCURACIES[len(path) - 1][path[-1]] for path in paths])
        torch.testing.assert_close(draft.confidence[0], expected)


# --- Heads that are right ---------------------------------------------------------------------------------------------


def counting(vocabulary: int = 24) -> LlamaForCausalLM:
    """A target that counts: its state is its token, and what it says is the token after."""
    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=vocabulary,
        intermediate_size=4,
        num_hidden_layers=1,
        num_attention_heads=2,
        max_position_embeddings=256,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=0,
    )
    model = LlamaForCausalLM(config).double().eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.endswith("_proj.weight"):
                weight.zero_()
        model.model.embed_tokens.weight.copy_(torch.eye(vocabulary))
        model.lm_head.weight.copy_(5 * torch.eye(vocabulary).roll(1, dims=0))
    return model


def knowing(model: PreTrainedModel, num_heads: int, off: int = 0) -> sg.MedusaHeads:
    """Heads that count too: head h says the token h + 2 after the one whose state it reads; `off` further."""
    heads = sg.MedusaHeads.fresh(model, num_heads)
    with torch.no_grad():
        for place, head in enumerate(heads.lm_heads):
            head.weight.copy_(5 * torch.eye(model.config.vocab_size).roll(place + 2 + off, dims=0))
    return heads


@dataclass(frozen=True)
class OneStateLate:
    """Shows a drafter the state before the one it should read."""

    drafter: sg.Medusa
    num_assistant_tokens: int | None = None

    def start(self, model: PreTrainedModel, request: Request) -> Any:
        session = self.drafter.start(model, request)
        propose, before = session.propose, []

        def late(context: Context, limit: Limit) -> Draft:
            before.append(context.hidden[0])  # type: ignore[index]
            return propose(replace(context, hidden=[torch.cat(before)[:-1]]), limit)

        session.propose = late  # type: ignore[method-assign]
        return session


def accepted_a_round(model: Any, drafter: Any, **kwargs: Any) -> float:
    output = model.generate(
        torch.tensor([[3, 4, 5]]),
        assistant=drafter,
        max_new_tokens=31,
        num_assistant_tokens=5,
        return_dict_in_generate=True,
        do_sample=False,
        **kwargs,
    )
    assert output.sequences[0].tolist() == [(3 + i) % 24 for i in range(34)]
    mean: float = output.speculation.mean_accepted_tokens
    return mean


@pytest.mark.parametrize("kwargs", [{}, {"cache_implementation": "static"}], ids=["tree", "chain"])
def test_heads_that_know_all_are_accepted_to_full_depth_every_round(kwargs):
    model = sg.enable(counting())
    assert accepted_a_round(model, sg.Medusa(knowing(model, 5)), **kwargs) == 6.0
    assert accepted_a_round(model, sg.Medusa(knowing(model, 5), choices=[(0,) * 5]), **kwargs) == 6.0
    # Off by one head, or one state: nothing fits.
    assert accepted_a_round(model, sg.Medusa(knowing(model, 5, off=1), choices=[(0,) * 5]), **kwargs) == 1.0
    assert accepted_a_round(model, OneStateLate(sg.Medusa(knowing(model, 5), choices=[(0,) * 5])), **kwargs) == 1.0


def trained(model: Any, heads: sg.MedusaHeads, steps: int = 200) -> sg.MedusaHeads:
    """Trains heads as the paper's first stage does: the target is frozen, and head h learns the token h + 2 on."""
    optimizer = torch.optim.Adam(heads.parameters(), lr=5e-3)
    for step in range(steps):
        texts = babble(16, 32, 1000 + step)
        with torch.no_grad():
            states = model.model(texts).last_hidden_state
        logits = heads(states.flatten(0, 1), model.lm_head).unflatten(0, states.shape[:2])
        losses = [
            0.8**head * cross_entropy(logits[:, : -2 - head, head].flatten(0, 1), texts[:, 2 + head :].flatten())
            for head in range(heads.config.num_heads)
        ]
        optimizer.zero_grad()
        sum(losses).backward()  # type: ignore[union-attr]
        optimizer.step()
    return heads.eval()


@pytest.mark.parametrize("lm_heads", ["own", "target"])
def test_heads_trained_for_seconds_reach_two_tokens_a_round(lm_heads):
    with torch.random.fork_rng():
        torch.manual_seed(1)
        heads = trained(speaker(), sg.MedusaHeads.fresh(speaker(), 4, 1, lm_heads))
    prompts = babble(2, 10, 5)
    kwargs = {"max_new_tokens": 64, "do_sample": False, "return_dict_in_generate": True, "num_assistant_tokens": 4}
    plain = speaker().generate(prompts, assistant=sg.Plain(), **kwargs)
    heads.config.accuracies = None
    grown = speaker().generate(prompts, assistant=sg.Medusa(heads), **kwargs)
    chain = speaker().generate(prompts, assistant=sg.Medusa(heads), cache_implementation="static", **kwargs)
    heads.config.accuracies = sg.measure_accuracies(speaker(), heads, plain.sequences, prompt_lengths=[10, 10])
    fixed = speaker().generate(prompts, assistant=sg.Medusa(heads), **kwargs)
    for output in (grown, chain, fixed):
        assert torch.equal(output.sequences, plain.sequences)
    means = [output.speculation.mean_accepted_tokens for output in (grown, chain, fixed)]
    assert min(means) >= 2.0, means


# --- Fresh heads ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("lm_heads", ["own", "shared", "target"])
def test_fresh_heads_say_what_the_target_says(lm_heads):
    heads = sg.MedusaHeads.fresh(target(), 3, 2, lm_heads)
    states = torch.randn(4, 32, dtype=torch.float64)
    expected = target().lm_head(states).unsqueeze(1).expand(-1, 3, -1)
    torch.testing.assert_close(heads(states, target().lm_head), expected)
    assert heads.config.target is not None
    assert heads.config.target["vocab_size"] == VOCAB
    theirs = {weight.data_ptr() for weight in target().parameters()}
    assert not theirs & {weight.data_ptr() for weight in heads.parameters()}


def test_heads_from_a_tied_lm_head_are_copies():
    model = tiny.llama(tie_word_embeddings=True)
    heads = sg.MedusaHeads.fresh(model, 2)
    before = model.get_input_embeddings().weight.clone()
    with torch.no_grad():
        for weight in heads.parameters():
            weight.add_(1)
    assert torch.equal(model.get_input_embeddings().weight, before)


def test_sizes_come_from_the_config_and_heads_without_weights_are_refused():
    """Report 121."""
    with torch.device("meta"):
        model = LlamaForCausalLM(LlamaConfig(**tiny._sizes()))
    heads = sg.MedusaHeads.fresh(model, 2)
    assert heads.blocks[0][0].weight.shape == (32, 32)
    assert heads.lm_heads[1].weight.shape == (VOCAB, 32)
    with pytest.raises(ValueError, match="meta"):
        sg.Medusa(heads).start(target(), Request(batch=1))
    with pytest.raises(ValueError, match="meta"):
        sg.Medusa(heads_of("target")).start(model, Request(batch=1))


@pytest.mark.filterwarnings("ignore")  # torch.ao is on its way out
def test_a_quantized_lm_head_is_not_copied():
    model = torch.ao.quantization.quantize_dynamic(tiny.llama().float(), {torch.nn.Linear})
    with pytest.raises(ValueError, match="undo quantization"):
        sg.MedusaHeads.fresh(model, 2)
    stats = sg.Stats()
    heads = sg.MedusaHeads.fresh(sg.enable(model), 2, lm_heads="target")
    run(model, ONE, assistant=sg.Medusa(heads), max_new_tokens=NEW, stats=stats)
    assert stats.drafted


def test_an_lm_head_that_is_not_whole_is_not_copied():
    model = tiny.llama()
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight[:0])
    with pytest.raises(ValueError, match="gather"):
        sg.MedusaHeads.fresh(model, 2)
    assert len(sg.MedusaHeads.fresh(model, 2, lm_heads="target").lm_heads) == 0


@pytest.mark.parametrize(
    "fields", [{"num_heads": 0}, {"lm_heads": "some"}, {"lm_heads": "target", "draft_vocab_size": 4}]
)
def test_a_config_that_contradicts_itself_is_refused(fields):
    with pytest.raises(ValueError, match=r"Medusa|lm_heads"):
        sg.MedusaConfig(**{"vocab_size": 96, **fields})


# --- Refusals ---------------------------------------------------------------------------------------------------------


def passes_of(model: Any, call: Any) -> int:
    count = 0

    def counted(*_: Any) -> None:
        nonlocal count
        count += 1

    hook = model.register_forward_hook(counted)
    try:
        call()
    finally:
        hook.remove()
    return count


@pytest.mark.parametrize(("changed", "sizes"), [({"hidden_size": 64}, "64.*32"), ({"vocab_size": 128}, "128.*96")])
def test_heads_for_another_target_are_refused_before_a_pass(changed, sizes):
    model = sg.enable(tiny.llama(**changed))

    def call() -> None:
        with pytest.raises(ValueError, match=sizes):
            run(model, ONE, assistant=sg.Medusa(heads_of()), max_new_tokens=2)

    assert passes_of(model, call) == 0


def test_what_was_never_loaded_is_refused():
    heads = with_accuracies(heads_of())
    heads.lm_heads[1].weight.data.fill_(torch.nan)
    with pytest.raises(ValueError, match=r"lm_heads\.1\.weight"):
        sg.Medusa(heads).start(target(), Request(batch=1))


def test_what_is_recorded_of_the_target_is_checked(caplog):
    """Of heads that are passed as an object too."""
    model = sg.enable(tiny.llama())
    heads = sg.MedusaHeads.fresh(model, 2)
    sg.Medusa(heads).start(model, Request(batch=1))
    assert not caplog.records
    with torch.no_grad():
        model.get_input_embeddings().weight.neg_()
    sg.Medusa(heads).start(model, Request(batch=1))
    assert ["of their signs" in message for message in caplog.messages] == [True]
    assert heads.config.target is not None
    heads.config.target["num_layers"] = 17

    def call() -> None:
        with pytest.raises(ValueError, match=r"num_layers=17; LlamaForCausalLM .*num_layers=2"):
            run(model, ONE, assistant=sg.Medusa(heads), max_new_tokens=2)

    assert passes_of(model, call) == 0


@pytest.mark.parametrize(
    ("ids", "fault"),
    [(None, "from -1 to -1.*never loaded"), ([1, 2, VOCAB], "from 1 to 96"), ([1, 2, 2], "more than once")],
)
def test_a_token_map_that_is_none_is_refused(ids, fault):
    config = sg.MedusaConfig(hidden_size=32, vocab_size=VOCAB, num_heads=2, draft_vocab_size=3)
    heads = sg.MedusaHeads(config).requires_grad_(False)
    for weight in heads.parameters():
        weight.normal_()
    if ids is not None:
        heads.token_map.copy_(torch.tensor(ids))

    def call() -> None:
        with pytest.raises(ValueError, match=f"token_map leads to .*{fault}"):
            run(target(), ONE, assistant=sg.Medusa(heads), max_new_tokens=2)

    assert passes_of(target(), call) == 0


def test_a_rank_that_no_head_has_is_refused():
    with pytest.raises(ValueError, match="rank 96"):
        sg.Medusa(heads_of(), choices=[(0, VOCAB)]).start(target(), Request(batch=1))


def test_a_sharded_lm_head_is_not_borrowed(monkeypatch):
    for module in (fitting, draft_model):
        monkeypatch.setattr(module, "several", lambda: True)
    monkeypatch.setattr(fitting, "is_fully_sharded", lambda model: model is target())
    with pytest.raises(ValueError, match="FSDP"):
        sg.Medusa(heads_of("target")).start(target(), Request(batch=1))
    sg.Medusa(heads_of("own")).start(target(), Request(batch=1))
    monkeypatch.setattr(draft_model, "is_fully_sharded", lambda model: model is heads_of("own"))
    with pytest.raises(ValueError, match="FSDP"):
        sg.Medusa(heads_of("own")).start(target(), Request(batch=1))


def test_what_is_no_head_is_refused():
    with pytest.raises(ValueError, match="MedusaHeads"):
        sg.Medusa(target())
    with pytest.raises(ValueError, match="node"):
        sg.Medusa(heads_of(), nodes=0)


# --- Reports of others ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("branches", [1, 2, 3])
def test_the_text_does_not_depend_on_the_shape_of_the_tree(branches):
    """Report 4."""
    expected = target().generate(**ONE.inputs(), do_sample=False, max_new_tokens=30)
    drafter = sg.Medusa(heads_of(), choices=list(itertools.product(range(branches), repeat=3)))
    got = target().generate(**ONE.inputs(), do_sample=False, max_new_tokens=30, assistant=drafter)
    assert torch.equal(got, expected)


@pytest.mark.parametrize("acceptance", ["matching", "rejection", "block"])
def test_sampled_texts_have_the_targets_distribution(acceptance):
    """Report 43."""
    drafter = sg.Medusa(heads_of(), choices=[(0, 0), (1,)])
    assert tiny.misfit(target(), drafter, acceptance, rows=4000) < tiny.FITS


class Digits(LogitsProcessor):
    """Leaves ten ids; a class that nobody knows, so that only the target runs it."""

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        return scores.masked_fill(torch.arange(scores.shape[-1]) >= 10, -torch.inf)


@pytest.mark.parametrize("known", [True, False], ids=["also drafter", "target only"])
def test_a_constraint_holds_for_every_token(known):
    """Report 61: heads may propose anything."""
    kwargs: dict[str, Any] = {"max_new_tokens": 30}
    if known:
        kwargs["suppress_tokens"] = list(range(10, VOCAB))
    else:
        kwargs["logits_processor"] = LogitsProcessorList([Digits()])
    for drafter in (sg.Medusa(heads_of()), sg.Medusa(heads_of(), choices=[(0, 12, 1), (11,)])):
        (text,) = run(target(), ONE, assistant=drafter, **kwargs)
        assert max(text[len(ONE.rows[0]) :]) < 10
        assert (text,) == run(target(), ONE, assistant=sg.Plain(), **kwargs)


def test_each_row_of_a_batch_is_what_it_is_alone():
    """Report 106."""
    prompt = Prompt.random((5, 1), (14, 9), (1, 3), (9, 4))
    drafter = sg.Medusa(heads_of())
    texts = run(target(), prompt, assistant=drafter, max_new_tokens=NEW)
    for row, text in enumerate(texts):
        assert (text,) == run(target(), prompt.alone(row), assistant=drafter, max_new_tokens=NEW)


# --- In company -------------------------------------------------------------------------------------------------------


def test_two_threads_share_one_drafter():
    drafter = sg.Medusa(with_accuracies(heads_of()))
    calls = [(ONE, "greedy"), (RAGGED, "sampled")]
    expected = [run(target(), *call, assistant=sg.Plain(), max_new_tokens=NEW) for call in calls]

    def work(which: int) -> None:
        for _ in range(3):
            assert run(target(), *calls[which], assistant=drafter, max_new_tokens=NEW) == expected[which]

    in_two_threads(work)


def test_nothing_is_written_on_the_heads_or_the_target():
    heads = with_accuracies(heads_of("target"))
    before = heads.config.to_dict(), target().config.to_dict(), set(vars(heads)), set(vars(target()))
    run(target(), ONE, "sampled", assistant=sg.Medusa(heads), max_new_tokens=NEW)
    assert before == (heads.config.to_dict(), target().config.to_dict(), set(vars(heads)), set(vars(target())))


@pytest.mark.parametrize("lm_heads", ["own", "target"])
def test_offloaded_heads_draft_as_they_do_elsewhere(lm_heads):
    near, far = sg.Stats(), sg.Stats()
    heads = copy.deepcopy(heads_of(lm_heads))
    expected = run(target(), ONE, assistant=sg.Medusa(heads), max_new_tokens=NEW, stats=near)
    accelerate.cpu_offload(heads)
    assert {weight.device.type for weight in heads.parameters()} == {"meta"}
    assert run(target(), ONE, assistant=sg.Medusa(heads), max_new_tokens=NEW, stats=far) == expected
    assert (near.drafted, near.accepted) == (far.drafted, far.accepted)


def test_heads_in_train_mode_draft_the_same_and_stay_in_it():
    heads = copy.deepcopy(heads_of()).train()
    drafted = [sg.Stats(), sg.Stats()]
    for one, stats in zip((heads, heads_of()), drafted, strict=True):
        run(target(), ONE, assistant=sg.Medusa(one), max_new_tokens=NEW, stats=stats)
    assert (drafted[0].drafted, drafted[0].accepted) == (drafted[1].drafted, drafted[1].accepted)
    assert all(module.training for module in heads.modules())


@pytest.mark.parametrize("combine", [sg.FirstOf, sg.Merge])
def test_heads_combine_with_retrieval(combine):
    drafter = combine(sg.PromptLookup(1), sg.Medusa(heads_of(), nodes=10))
    for mode in ("greedy", "sampled"):
        expected = run(target(), RAGGED, mode, assistant=sg.Plain(), max_new_tokens=NEW)
        assert run(target(), RAGGED, mode, assistant=drafter, max_new_tokens=NEW) == expected


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_heads_in_another_dtype_draft(dtype):
    for lm_heads in ("own", "target"):
        heads = with_accuracies(heads_of(lm_heads), None).to(dtype)
        expected = run(target(), ONE, assistant=sg.Plain(), max_new_tokens=NEW)
        assert run(target(), ONE, assistant=sg.Medusa(heads), max_new_tokens=NEW) == expected
