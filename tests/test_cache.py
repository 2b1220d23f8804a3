"""What a cache keeps, where, and at what cost: roll-back is a number, a branch a gather, the user gets stock's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import tiny
import torch
from tiny import ONE, RAGGED, Prompt, Scripted, run
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import Cache, PreTrainedModel, StaticCache
from transformers.cache_utils import DynamicSlidingWindowLayer

import hf_specgen as sg
from hf_specgen.cache import SMALLEST_CAPACITY, CropCache, SlotCache, SlotLayer
from hf_specgen.draft import Draft
from hf_specgen.prompt import prompt_of
from hf_specgen.target import Target

NEW = 24
ATTENTION = pytest.mark.parametrize("kind", ["llama", "mistral"])


def stock(kind: str) -> PreTrainedModel:
    return tiny.llama() if kind == "llama" else tiny.mistral()


def started(model: PreTrainedModel, rows: Sequence[Sequence[int]]) -> tuple[Target, SlotCache]:
    """A target after its prompt's pass and the commit of its first token, as the loop leaves it."""
    target = Target(model, prompt_of(model, rows))
    with torch.no_grad():
        target.prefill()
    assert isinstance(target.cache, SlotCache)
    target.cache.commit([()] * len(rows))
    return target, target.cache


def verify(target: Target, roots: Sequence[int], draft: Draft) -> Tensor:
    with torch.no_grad():
        return target.verify(torch.tensor(roots), draft).logits


def buffers(cache: SlotCache) -> list[Tensor]:
    return [buffer for layer in cache.layers for buffer in (layer.keys, layer.values)]


def traces(cache: SlotCache) -> list[tuple[int, int]]:
    """Changes with every move of a buffer and every write into one."""
    return [(buffer.untyped_storage().data_ptr(), buffer._version) for buffer in buffers(cache)]


class Operations(TorchDispatchMode):
    """Notes the names of all tensor operations, those inside of torch's functions too."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


# Token ids that are nobody's truth; the last row's tree has gaps.
#   row 0: root -- 11 -- 12     row 1: root -- 21 -- 22
#            \--- 13 -- 14                     \--- 23
TREE = Draft(
    tokens=torch.tensor([[11, 12, 13, 14], [21, 0, 22, 23]]),
    parents=torch.tensor([[0, 1, 0, 3], [0, -1, 1, 1]]),
)
PATHS = {
    (0, 1): [11],
    (0, 2): [11, 12],
    (0, 3): [13],
    (0, 4): [13, 14],
    (1, 1): [21],
    (1, 3): [21, 22],
    (1, 4): [21, 23],
}
ROWS = [list(RAGGED.rows[1]), list(RAGGED.rows[2])]
ROOTS = [31, 32]


# ------------------------------------------------------------------------------------------------------------ commit


def test_committing_a_chain_and_rolling_back_copy_nothing():
    target, cache = started(tiny.llama(), ROWS)
    verify(target, ROOTS, Draft.chain(TREE.tokens, [4, 3]))
    before = traces(cache)
    with Operations() as operations:
        cache.commit([range(1, 3), ()])
    assert operations.names == []
    assert traces(cache) == before
    assert cache.lengths == [len(ROWS[0]) + 3, len(ROWS[1]) + 1]
    # Nothing of this row is kept, not even its root: it has ended.
    verify(target, ROOTS, Draft.chain(TREE.tokens, [4, 3]))
    with Operations() as operations:
        cache.commit([None, range(1, 4)])
    assert operations.names == []
    assert cache.lengths == [len(ROWS[0]) + 3, len(ROWS[1]) + 5]


def test_a_path_in_order_behind_the_root_of_a_tree_copies_nothing_either():
    target, cache = started(tiny.llama(), ROWS)
    verify(target, ROOTS, TREE)
    before = traces(cache)
    with Operations() as operations:
        cache.commit([[1, 2], [1]])
    assert operations.names == []
    assert traces(cache) == before


def test_committing_a_branch_gathers_its_path_in_place():
    target, cache = started(tiny.llama(), ROWS)
    verify(target, ROOTS, TREE)
    before, copies = traces(cache), [buffer.clone() for buffer in buffers(cache)]
    with Operations() as operations:
        cache.commit([[3, 4], [1, 3]])
    assert "index_select" in operations.names
    after = traces(cache)
    assert [pointer for pointer, _ in after] == [pointer for pointer, _ in before]
    assert all(version > old for (_, version), (_, old) in zip(after, before, strict=True))
    for buffer, old in zip(buffers(cache), copies, strict=True):
        for row, path in enumerate([[3, 4], [1, 3]]):
            root = len(ROWS[row])
            assert torch.equal(buffer[row, :, : root + 1], old[row, :, : root + 1])
            assert torch.equal(buffer[row, :, root + 1 : root + 3], old[row, :, [root + node for node in path]])


def test_the_count_of_operations_sees_what_a_copy_would_be():
    with Operations() as operations:
        torch.zeros(3)[:2].clone().index_select(0, torch.tensor([1]))
    assert {"clone", "index_select", "slice"} <= set(operations.names)


@ATTENTION
@pytest.mark.parametrize("path", [(0, 4), (0, 2), (1, 3), (1, 4)])
def test_after_a_commit_a_pass_sees_the_path_and_nothing_else(kind, path):
    model = stock(kind)
    target, cache = started(model, ROWS)
    verify(target, ROOTS, TREE)
    row, node = path
    nodes = {4: [3, 4] if row == 0 else [1, 4], 2: [1, 2], 3: [1, 3]}[node]
    cache.commit([nodes if row == number else () for number in range(2)])
    logits = verify(target, [41, 42], Draft.empty(2))
    for number, ids in enumerate(ROWS):
        drafted = PATHS[path] if number == row else []
        assert_close(logits[number, 0], alone(model, [*ids, ROOTS[number], *drafted, 41 + number]))


# -------------------------------------------------------------------------------------------------------------- passes


def alone(model: PreTrainedModel, ids: list[int]) -> Tensor:
    """`(vocab,)` logits after the last id, without padding, cache or mask."""
    with torch.no_grad():
        return model(torch.tensor([ids]), use_cache=False).logits[0, -1]


def assert_close(one: Tensor, other: Tensor) -> None:
    torch.testing.assert_close(one, other, rtol=0, atol=1e-9)


@ATTENTION
def test_every_node_gets_the_logits_of_its_own_path(kind):
    model = stock(kind)
    target, _ = started(model, ROWS)
    logits = verify(target, ROOTS, TREE)
    assert logits.isfinite().all(), "a place without a node sees itself, or its softmax is NaN"
    for row, ids in enumerate(ROWS):
        assert_close(logits[row, 0], alone(model, [*ids, ROOTS[row]]))
    for (row, node), drafted in PATHS.items():
        assert_close(logits[row, node], alone(model, [*ROWS[row], ROOTS[row], *drafted]))


@ATTENTION
def test_left_padded_prompts_are_rolled_to_the_right_of_their_padding(kind):
    model = stock(kind)
    _, cache = started(model, [*ROWS, [5]])
    assert cache.lengths == [24, 3, 1]
    for row, ids in enumerate([*ROWS, [5]]):
        with torch.no_grad():
            fresh = model(torch.tensor([ids]), use_cache=True).cache
        for layer, reference in zip(cache.layers, fresh.layers, strict=True):
            # Of a prompt a sliding layer has the last 7 columns only: all that a later token can see.
            kept = len(ids) if kind == "llama" else min(7, len(ids))
            held = slice(len(ids) - kept, len(ids))
            assert_close(layer.keys[row, :, held], reference.keys[0, :, -kept:])
            assert_close(layer.values[row, :, held], reference.values[0, :, -kept:])


def test_buffers_grow_by_doubling(monkeypatch):
    seen: list[tuple[int, int]] = []
    begin = SlotCache.begin

    def noted(self: SlotCache, width: int, some_idle: bool) -> None:
        begin(self, width, some_idle)
        seen.append((self.layers[0].keys.shape[2], self.layers[0].keys.untyped_storage().data_ptr()))

    monkeypatch.setattr(SlotCache, "begin", noted)
    model = sg.enable(tiny.llama())
    wanted = run(tiny.llama(), ONE, max_new_tokens=300)
    assert run(model, ONE, assistant=sg.PromptLookup(), max_new_tokens=300) == wanted
    assert list(dict.fromkeys(capacity for capacity, _ in seen)) == [64, 128, 256, 512]
    assert len(dict.fromkeys(seen)) == 4, "between two growths a buffer stays where it is"


def test_a_pass_wider_than_the_double_fits():
    target, cache = started(tiny.llama(), [[5]])
    tokens = torch.arange(3, 83).repeat(1, 3)
    logits = verify(target, [4], Draft.chain(tokens, [240]))
    assert cache.layers[0].keys.shape[2] >= 242
    assert_close(logits[0, -1], alone(tiny.llama(), [5, 4, *tokens[0].tolist()]))


def test_a_sliding_layer_is_shown_its_window_only(monkeypatch):
    shown: list[tuple[list[int], int, int]] = []
    update = SlotLayer.update

    def noted(self: SlotLayer, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        keys, values = update(self, key_states, value_states, *args, **kwargs)
        assert keys.shape[-2] == values.shape[-2]
        assert keys.untyped_storage().data_ptr() == self.keys.untyped_storage().data_ptr(), "a slice and no copy"
        shown.append((list(self.slots.lengths), key_states.shape[-2], keys.shape[-2]))
        return keys, values

    monkeypatch.setattr(SlotLayer, "update", noted)
    model, prompt = sg.enable(tiny.mistral(window=8)), Prompt(RAGGED.rows[:2])
    known = tiny.truth_of(model, prompt, "greedy", NEW + 8)
    shown.clear()
    run(model, prompt, assistant=Scripted(known), max_new_tokens=NEW)
    assert shown
    for lengths, width, slots in shown:
        # From the first slot that the shortest row's first query sees to the last that the longest row writes.
        assert slots == max(lengths) + width - max(0, min(lengths) - 7)
    assert any(slots < max(lengths) + width for lengths, width, slots in shown)


# ------------------------------------------------------------------------------------------------- what the user gets


def returned(model: PreTrainedModel, prompt: Prompt, new: int, **kwargs: Any) -> Any:
    kwargs = {**prompt.inputs(), "do_sample": False, "max_new_tokens": new, **kwargs}
    return model.generate(**kwargs, return_dict_in_generate=True)


def contents(cache: Cache) -> list[Tensor]:
    return [states for layer in cache.layers for states in (layer.keys, layer.values)]


@ATTENTION
@pytest.mark.parametrize("new", [1, 2, 9, NEW])
@pytest.mark.parametrize("shape", ["chain", "tree"])
def test_of_one_row_the_returned_cache_is_stocks(kind, new, shape):
    model = sg.enable(stock(kind))
    known = tiny.truth_of(model, ONE, "greedy", new + 10)
    ours = returned(model, ONE, new, assistant=Scripted(known, shape)).cache
    theirs = returned(stock(kind), ONE, new).cache
    assert type(ours) is type(theirs)
    assert ours.get_seq_length() == theirs.get_seq_length() == len(ONE.rows[0]) + new - 1
    for mine, stocks in zip(contents(ours), contents(theirs), strict=True):
        assert mine.shape == stocks.shape
        assert_close(mine, stocks)


@ATTENTION
@pytest.mark.parametrize("shape", ["chain", "tree"])
def test_of_several_rows_it_is_stocks_but_for_the_padding(kind, shape):
    model = sg.enable(stock(kind))
    known = tiny.truth_of(model, RAGGED, "greedy", NEW + 10)
    ours = returned(model, RAGGED, NEW, assistant=Scripted(known, shape)).cache
    theirs = returned(stock(kind), RAGGED, NEW).cache
    columns = RAGGED.columns + NEW - 1
    for mine, stocks in zip(contents(ours), contents(theirs), strict=True):
        assert mine.shape == stocks.shape
        for row, ids in enumerate(RAGGED.rows):
            first = max(0, RAGGED.columns - len(ids) - (columns - mine.shape[2]))
            assert_close(mine[row, :, first:], stocks[row, :, first:])


@ATTENTION
@pytest.mark.parametrize("prompt", [ONE, RAGGED], ids=["one", "ragged"])
@pytest.mark.parametrize("goes_on", ["stock", "ours"])
def test_one_can_go_on_from_it(kind, prompt, goes_on):
    model = sg.enable(stock(kind))
    wanted = run(stock(kind), prompt, max_new_tokens=2 * NEW)
    known = tiny.truth_of(model, prompt, "greedy", 2 * NEW + 10)
    half = returned(model, prompt, NEW, assistant=Scripted(known, "tree"))
    mask = torch.nn.functional.pad(prompt.inputs()["attention_mask"], (0, NEW), value=1)
    inputs = {"input_ids": half.sequences, "attention_mask": mask, "cache": half.cache}
    extra = {} if goes_on == "stock" else {"assistant": Scripted(known)}
    whole = model.generate(**inputs, **extra, do_sample=False, max_new_tokens=NEW)
    assert tiny.texts(prompt, whole) == wanted


@pytest.mark.parametrize("shape", ["chain", "tree"])
def test_one_can_go_on_from_rows_that_ended_early(shape):
    # A conversation: rows end at different places, and everyone says something more.
    model = sg.enable(tiny.llama())
    known = tiny.truth_of(model, RAGGED, "greedy", NEW + 10)
    eos = [known[row][len(RAGGED.rows[row]) + 5 + row] for row in range(3)]
    turn = torch.tensor([[7, 8], [9, 10], [11, 12]])
    texts = []
    for assistant in None, Scripted(known, shape):
        half = returned(model, RAGGED, NEW, assistant=assistant, eos_token_id=eos)
        stops = torch.isin(half.sequences[:, RAGGED.columns :], torch.tensor(eos)).long()
        said = (stops.cumsum(1) - stops == 0).long()
        assert 0 < said.sum() < said.numel(), "some rows ended before others"
        mask = torch.cat([RAGGED.inputs()["attention_mask"], said, torch.ones_like(turn)], dim=1)
        inputs = {"input_ids": torch.cat([half.sequences, turn], dim=1), "attention_mask": mask, "cache": half.cache}
        texts.append(model.generate(**inputs, do_sample=False, max_new_tokens=NEW).tolist())
    assert texts[0] == texts[1]


# --------------------------------------------------------------------------------------------- caches that are cropped


def test_a_static_cache_is_rolled_back_without_moving_or_writing_its_states(monkeypatch):
    model = sg.enable(tiny.llama())
    cache = StaticCache(config=model.config, max_cache_len=ONE.columns + NEW)
    traced: list[list[tuple[int, int]]] = []
    commit = CropCache.commit

    def noted(self: CropCache, paths: Any) -> None:
        before = traces(self.cache)
        commit(self, paths)
        assert traces(self.cache) == before
        traced.append(before)

    monkeypatch.setattr(CropCache, "commit", noted)
    known = tiny.truth_of(model, ONE, "greedy", NEW + 10)
    run(model, ONE, assistant=Scripted(known), max_new_tokens=NEW, cache=cache)
    assert len(traced) > 2
    assert len({pointer for states in traced for pointer, _ in states}) == 4


@pytest.mark.parametrize("goes_on", ["stock", "ours"])
def test_a_sliding_cache_that_was_passed_in_holds_its_window_and_can_be_used_on(goes_on):
    model, prompt = sg.enable(tiny.mistral()), ONE
    known = tiny.truth_of(model, prompt, "greedy", 2 * NEW + 10)
    cache = tiny.CACHES["dynamic"](model, 0)["cache"]
    half = returned(model, prompt, NEW, assistant=Scripted(known), cache=cache)
    assert half.cache is cache
    assert all(isinstance(layer, DynamicSlidingWindowLayer) for layer in cache.layers)
    assert [layer.keys.shape[-2] for layer in cache.layers] == [7, 7]
    extra = {} if goes_on == "stock" else {"assistant": Scripted(known)}
    whole = model.generate(half.sequences, cache=cache, **extra, do_sample=False, max_new_tokens=NEW)
    assert tiny.texts(prompt, whole) == (known[0][: prompt.columns + 2 * NEW],)


@pytest.mark.parametrize("shape", ["chain", "tree"])
@pytest.mark.parametrize("prompt", [tiny.Prompt.random((300, 1)), tiny.Prompt.random((150, 1), (9, 2), (80, 3))])
def test_sliding_layers_hold_no_more_than_can_still_be_seen(shape: str, prompt: tiny.Prompt, monkeypatch) -> None:
    """A window of 8 in a text of hundreds: the buffers stay small, and what they hand out is right."""
    held: list[int] = []
    begin = SlotCache.begin

    def noted(self: SlotCache, width: int, some_idle: bool) -> None:
        begin(self, width, some_idle)
        spread = max(self.lengths) - min(self.lengths)
        held.append(self.layers[0].keys.shape[2] - 2 * spread)

    model = tiny.mistral()
    wanted = run(model, prompt, max_new_tokens=220)
    monkeypatch.setattr(SlotCache, "begin", noted)
    script = tiny.Scripted(run(tiny.mistral(), prompt, max_new_tokens=230), shape)
    assert run(sg.enable(model), prompt, assistant=script, max_new_tokens=220) == wanted
    assert max(held) <= 2 * SMALLEST_CAPACITY


# ------------------------------------------------------------------------------------- level by level, each node once


@ATTENTION
@pytest.mark.parametrize(
    "rows", [((7, 3),), ((7, 3), (20, 4), (2, 5)), ((7, 3), (7, 4))], ids=["one", "ragged", "level"]
)
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_a_tree_fed_level_by_level_is_the_tree_fed_at_once(kind, rows, attention):
    prompt = Prompt.random(*rows)
    model = tiny.llama(attention) if kind == "llama" else tiny.mistral(attention)
    torch.manual_seed(0)
    parents = torch.tensor([[0, 0, 0, 2, 1, 2, 4, 5, 4]] * prompt.batch)
    tree = Draft(torch.randint(1, tiny.VOCAB, parents.shape), parents)
    roots = torch.tensor([row[-1] for row in prompt.rows])
    target, cache = started(model, prompt.rows)
    cache.lengths[:] = [length - 1 for length in cache.lengths]  # the last token is fed again, as the root
    at_once = verify(target, roots.tolist(), tree)
    target, cache = started(model, prompt.rows)
    cache.lengths[:] = [length - 1 for length in cache.lengths]
    ids = torch.cat([roots.unsqueeze(1), tree.tokens], dim=1)
    levels = []
    for start, end in ((0, 1), (1, 4), (4, 7), (7, 10)):
        part = Draft(tree.tokens[:, : end - 1], tree.parents[:, : end - 1])
        cache.begin(end - start, behind=start)
        mask = cache.mask(part, model.dtype)
        lengths = torch.tensor(cache.lengths).unsqueeze(1)
        positions = (lengths + part.tree.depth)[:, start:end]
        with torch.no_grad():
            levels.append(
                model(ids[:, start:end], attention_mask=mask, position_ids=positions, cache=cache.model_cache).logits
            )
    torch.testing.assert_close(torch.cat(levels, dim=1), at_once, rtol=0, atol=1e-9 if attention == "sdpa" else 1e-4)
