"""Deliberate errors, each put into the package for one test: the law has to notice every one of them.

A law that nothing can break proves nothing. `differences` is a small part of `test_exact.py`, made of the same pieces.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import tiny
import torch
from tiny import ONE, RAGGED, Prompt, Scripted
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer

import hf_specgen as sg
from hf_specgen import walk as walk_module
from hf_specgen.cache import SlotCache
from hf_specgen.draft import Draft
from hf_specgen.rows import Rows
from hf_specgen.sampling import Noise
from hf_specgen.target import Target
from hf_specgen.trees import Tree
from hf_specgen.walk import WalkByStep

NEW, BEYOND = 28, 16
Texts = tuple[tuple[int, ...], ...]
PAST_THE_WINDOW = Prompt.random((20, 3))


@functools.cache
def llama() -> PreTrainedModel:
    return sg.enable(tiny.llama())


@functools.cache
def mistral() -> PreTrainedModel:
    return sg.enable(tiny.mistral())


@functools.cache
def truth(model: PreTrainedModel, prompt: Prompt, mode: str) -> Texts:
    return tiny.truth_of(model, prompt, mode, NEW + BEYOND)


Model = Callable[[], PreTrainedModel]
# The texts of a call, and what they should be.
Cell = Callable[[], tuple[Texts, Texts]]


def _cell(prompt: Prompt, mode: str, shape: str, model: Model = llama, cropped: bool = False) -> Cell:
    def cell() -> tuple[Texts, Texts]:
        known = truth(model(), prompt, mode)
        cache = {"cache": DynamicCache(config=model().config)} if cropped else {}
        texts = tiny.run(model(), prompt, mode, assistant=Scripted(known, shape), max_new_tokens=NEW, **cache)
        return texts, tuple(text[: len(ids) + NEW] for text, ids in zip(known, prompt.rows, strict=True))

    return cell


def _ended(mode: str, shape: str, eos: int | None = None, limit: int = NEW) -> Cell:
    """A block that is right throughout and goes on past an EOS at place `eos`, and past the limit."""

    def cell() -> tuple[Texts, Texts]:
        known, start = truth(llama(), ONE, mode), len(ONE.rows[0])
        stop = {} if eos is None else {"eos_token_id": known[0][start + eos]}
        assistant = Scripted(known, shape, spoiled=0, overlong=True)
        texts = tiny.run(llama(), ONE, mode, assistant=assistant, max_new_tokens=limit, **stop)
        return texts, (known[0][: start + (limit if eos is None else eos + 1)],)

    return cell


LAW: dict[str, Cell] = {
    **{
        f"{mode}, {shape}, {prompt.batch} rows": _cell(prompt, mode, shape)
        for mode in ("greedy", "sampled", "hash-greedy", "penalties-sampled")
        for shape in ("chain", "tree")
        for prompt in (ONE, RAGGED)
    },
    **{f"cropped, {prompt.batch} rows": _cell(prompt, "greedy", "chain", cropped=True) for prompt in (ONE, RAGGED)},
    **{f"window, {shape}": _cell(PAST_THE_WINDOW, "greedy", shape, mistral) for shape in ("chain", "tree")},
    **{
        f"EOS at {place}, {mode}, {shape}": _ended(mode, shape, eos=place)
        for place in (3, 6)
        for mode in ("greedy", "hash-greedy")
        for shape in ("chain", "tree")
    },
    **{f"limit, {shape}": _ended("greedy", shape, limit=5) for shape in ("chain", "tree")},
}


@pytest.fixture(scope="module", autouse=True)
def _known_before() -> None:
    """The references, from the package as it is."""
    for model, prompts in ((llama(), (ONE, RAGGED)), (mistral(), (PAST_THE_WINDOW,))):
        for prompt in prompts:
            for mode in tiny.MODES:
                truth(model, prompt, mode)


def holds(cell: Cell) -> bool:
    """Whether the texts are what they should be; an error that the package itself notices says that they are not."""
    try:
        texts, wanted = cell()
    except RuntimeError:
        return False
    return texts == wanted


def differences() -> list[str]:
    """The cells of the law that do not hold."""
    return [name for name, cell in LAW.items() if not holds(cell)]


# ---------------------------------------------------------------------------------------------------------- mutants


class Behind:
    """Rows whose ids are shown up to an earlier column."""

    def __init__(self, rows: Rows, column: int) -> None:
        self._rows, self._column = rows, column

    def show(self, group: list[int], column: int) -> torch.Tensor:
        return self._rows.show(group, self._column)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._rows, name)


def processors_see_the_roots_prefix(patch: pytest.MonkeyPatch) -> None:
    choose = WalkByStep._choose

    def at_the_root(self: WalkByStep, stand: Any, rows: Any) -> Any:
        column = vars(stand).setdefault("column", max(rows.generated[row] for row in stand.group))
        return choose(self, stand, Behind(rows, column))

    patch.setattr(WalkByStep, "_choose", at_the_root)


def processors_see_one_token_too_few(patch: pytest.MonkeyPatch) -> None:
    choose = WalkByStep._choose

    def one_back(self: WalkByStep, stand: Any, rows: Any) -> Any:
        column = max(rows.generated[row] for row in stand.group)
        return choose(self, stand, Behind(rows, max(0, column - 1)))

    patch.setattr(WalkByStep, "_choose", one_back)


def _commits(patch: pytest.MonkeyPatch, change: Callable[[list[int]], list[int]]) -> None:
    commit = SlotCache.commit

    def changed(self: SlotCache, paths: Any) -> None:
        commit(self, [None if path is None else change(list(path)) for path in paths])

    patch.setattr(SlotCache, "commit", changed)


def the_first_nodes_are_kept_instead_of_the_path(patch: pytest.MonkeyPatch) -> None:
    _commits(patch, lambda path: list(range(1, len(path) + 1)))


def the_last_node_of_the_path_is_dropped(patch: pytest.MonkeyPatch) -> None:
    _commits(patch, lambda path: path[:-1])


def one_slot_too_many_is_kept(patch: pytest.MonkeyPatch) -> None:
    commit = SlotCache.commit

    def more(self: SlotCache, paths: Any) -> None:
        commit(self, paths)
        self.lengths = [length + bool(path) for length, path in zip(self.lengths, paths, strict=True)]

    patch.setattr(SlotCache, "commit", more)


def rejected_tokens_stay_in_a_cache_that_is_cropped(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(DynamicLayer, "crop", lambda self, tokens_to_remove: None)


def _misread(patch: pytest.MonkeyPatch, owner: Any, name: str, change: Callable[[Tree], Tree]) -> None:
    """Shows one function or method drafts of another shape."""
    original = getattr(owner, name)

    def other(draft: Draft) -> Draft:
        same = replace(draft)
        vars(same)["tree"] = change(draft.tree)
        return same

    def misread(*args: Any) -> Any:
        return original(*(other(arg) if isinstance(arg, Draft) else arg for arg in args))

    patch.setattr(owner, name, misread)


def a_node_sees_the_root_and_itself_only(patch: pytest.MonkeyPatch) -> None:
    def blind(tree: Tree) -> Tree:
        seen = torch.eye(tree.depth.shape[1], dtype=torch.bool)
        seen[:, 0] = True
        return Tree(tree.depth, tree.ancestors & seen)

    _misread(patch, Target, "verify", blind)


def a_node_of_a_chain_sees_those_behind_it(patch: pytest.MonkeyPatch) -> None:
    mask = SlotCache.mask

    def blind(cache: SlotCache, draft: Draft, dtype: torch.dtype) -> Any:
        made = mask(cache, draft, dtype)
        level = len(set(cache.lengths)) == 1
        return torch.zeros_like(made) if draft.is_chain and level and isinstance(made, torch.Tensor) else made

    patch.setattr(SlotCache, "mask", blind)


def a_node_sees_every_node_before_it(patch: pytest.MonkeyPatch) -> None:
    _misread(patch, Target, "verify", lambda tree: Tree(tree.depth, torch.ones_like(tree.ancestors).tril()))


def _by_index(tree: Tree) -> Tree:
    return Tree(torch.arange(tree.depth.shape[1]).expand_as(tree.depth), tree.ancestors)


def positions_are_node_indices(patch: pytest.MonkeyPatch) -> None:
    _misread(patch, Target, "verify", _by_index)


def noise_is_keyed_by_node_indices(patch: pytest.MonkeyPatch) -> None:
    _misread(patch, walk_module, "score", _by_index)


def the_window_is_ignored(patch: pytest.MonkeyPatch) -> None:
    build = SlotCache.__init__

    def without(self: SlotCache, *args: Any) -> None:
        build(self, *args)
        self.windows = dict.fromkeys(self.windows)
        for layer in self.layers:
            layer.window = None

    patch.setattr(SlotCache, "__init__", without)


def nothing_is_cut_at_an_eos(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(walk_module, "cut", lambda tokens, eos, room: min(len(tokens), room))


def nothing_is_cut_at_the_limit(patch: pytest.MonkeyPatch) -> None:
    cut, append = walk_module.cut, Rows.append

    def append_and_end(self: Rows, row: int, tokens: Any) -> None:
        append(self, row, tokens)
        self.finished[row] |= self.room()[row] <= 0

    patch.setattr(walk_module, "cut", lambda tokens, eos, room: cut(tokens, eos, len(tokens)))
    patch.setattr(Rows, "append", append_and_end)


def the_walk_goes_on_behind_an_eos(patch: pytest.MonkeyPatch) -> None:
    stop = Rows.stop

    def deaf(self: Rows, rows: Any, met: Any) -> None:
        # Only the length is heeded.
        stop(self, rows, [self.room()[row] == 0 for row in rows])

    patch.setattr(Rows, "stop", deaf)


# Each with the kind of cell that must notice it, among others.
MUTANTS: dict[Callable[[pytest.MonkeyPatch], None], str] = {
    processors_see_the_roots_prefix: "hash-greedy, tree, 1 rows",
    processors_see_one_token_too_few: "hash-greedy, chain, 3 rows",
    the_first_nodes_are_kept_instead_of_the_path: "greedy, tree, 1 rows",
    the_last_node_of_the_path_is_dropped: "greedy, chain, 1 rows",
    one_slot_too_many_is_kept: "greedy, chain, 3 rows",
    rejected_tokens_stay_in_a_cache_that_is_cropped: "cropped, 1 rows",
    a_node_sees_the_root_and_itself_only: "greedy, chain, 3 rows",
    a_node_of_a_chain_sees_those_behind_it: "greedy, chain, 1 rows",
    a_node_sees_every_node_before_it: "greedy, tree, 1 rows",
    positions_are_node_indices: "greedy, tree, 3 rows",
    noise_is_keyed_by_node_indices: "sampled, tree, 1 rows",
    the_window_is_ignored: "window, chain",
    nothing_is_cut_at_an_eos: "EOS at 3, greedy, chain",
    nothing_is_cut_at_the_limit: "limit, chain",
    the_walk_goes_on_behind_an_eos: "EOS at 6, hash-greedy, tree",
}


def test_the_package_as_it_is_keeps_the_law():
    assert differences() == []


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.__name__)
def test_the_law_catches(mutant, monkeypatch):
    mutant(monkeypatch)
    found = differences()
    assert MUTANTS[mutant] in found
    # A law that breaks everywhere is no sign of this error: some cells have nothing to do with it.
    assert len(found) < len(LAW)


def streams_are_all_the_targets_own(self: Noise, name: str, root: Any = None) -> Noise:
    return self


def streams_are_all_the_drafters(self: Noise, name: str, root: Any = None) -> Noise:
    return _stream(self, "draft", root)


_stream = Noise.stream


@pytest.mark.parametrize("rule", ["rejection", "block"])
@pytest.mark.parametrize("shared", [streams_are_all_the_targets_own, streams_are_all_the_drafters])
def test_shared_noise_is_caught_by_the_distribution(rule, shared, monkeypatch):
    # Unmutated the same call fits: test_exact.py, test_the_distribution_of_the_first_tokens_is_the_targets.
    monkeypatch.setattr(Noise, "stream", shared)
    assert tiny.misfit(llama(), sg.DraftModel(tiny.sibling(tiny.llama(), noise=0.1)), rule) > tiny.FITS
