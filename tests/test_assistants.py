"""What `assistant=` may be, how deep it drafts, and the accept rules and drafters that a user writes."""

import gc
import weakref
from dataclasses import dataclass
from typing import ClassVar

import pytest
import tiny
import torch
from generating import BATCHES, drafter, said, whole
from transformers import AutoModelForCausalLM

import hf_specgen as sg
from hf_specgen.assistants import resolve
from hf_specgen.generation import rehearse
from hf_specgen.length import AutoController, as_length

ONE, RAGGED = tiny.ONE, tiny.RAGGED


@dataclass
class Noting:
    """Notes what was asked for and drafts nothing."""

    num_assistant_tokens: int = 7

    def __post_init__(self):
        self.depths = []
        self.requests = []
        self.needs = sg.Needs()

    def start(self, target, request):
        self.requests.append(request)
        return self

    def propose(self, context, limit):
        self.depths.append(max(limit.depth))
        return sg.Draft.empty(len(limit.depth))


def test_a_model_drafts_and_a_drafter_is_itself(model):
    small, lookup = tiny.sibling(model), sg.PromptLookup()
    assert resolve(lookup, model).drafter is lookup
    assert resolve(small, model).drafter == sg.DraftModel(small)
    assert resolve(sg.DraftModel(small, branches=2), model).drafter.branches == 2


@pytest.mark.parametrize(
    ("assistant", "expected"),
    [
        ({"method": "ngram"}, sg.PromptLookup()),
        ({"method": "ngram", "prompt_lookup_max": 4, "prompt_lookup_min": 2}, sg.PromptLookup(2, 4)),
        ({"method": "ngram", "prompt_lookup_max": 4}, sg.PromptLookup(4, 4)),
        ({"method": "ngram", "prompt_lookup_min": 2}, sg.PromptLookup(2, 2)),
    ],
)
def test_vllm_s_names_for_prompt_lookup(model, assistant, expected):
    before = dict(assistant)
    found = resolve(assistant, model)
    assert found.drafter == expected
    assert found.tokens is None
    assert resolve({**assistant, "num_speculative_tokens": 3}, model).tokens == 3
    assert assistant == before


def test_vllm_s_names_for_suffix_decoding(model):
    config = {"method": "suffix", "suffix_decoding_max_spec_factor": 2.0, "suffix_decoding_min_token_prob": 0.1}
    assert resolve(config, model).drafter == sg.SuffixLookup(max_spec_factor=2.0, min_token_prob=0.1)
    assert resolve({**config, "suffix_decoding_max_tree_depth": 24}, model).tokens == 24
    assert resolve({**config, "num_speculative_tokens": 32}, model).tokens == 32
    with pytest.raises(ValueError, match=r"pass a store of your own"):
        resolve({**config, "suffix_decoding_max_cached_requests": 10}, model)


def test_auto_merges_what_needs_no_training_and_keeps_nothing_between_calls(model):
    found = resolve("auto", model)
    assert found.drafter == sg.Merge(sg.SuffixLookup(), sg.TokenRecycling())
    assert found.tokens is None
    with pytest.raises(ValueError, match="there is no file or folder 'automatic'"):
        resolve("automatic", model)


def test_vllm_s_names_for_a_draft_model(model):
    small = tiny.sibling(model)
    found = resolve({"method": "draft_model", "model": small}, model)
    assert (found.drafter, found.tokens) == (sg.DraftModel(small), None)
    assert resolve({"method": "draft_model", "model": small, "num_speculative_tokens": 2}, model).tokens == 2


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`")
def test_a_path_is_loaded_once_for_each_live_target(model, tmp_path, monkeypatch):
    tiny.sibling(model).save_pretrained(tmp_path)
    loads = []
    load = AutoModelForCausalLM.from_pretrained

    def counted(path, *args, **kwargs):
        loads.append(path)
        return load(path, *args, **kwargs)

    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", counted)
    assistant = {"method": "draft_model", "model": str(tmp_path), "num_speculative_tokens": 4}
    stats = sg.Stats()
    sg.enable(model)
    for _ in range(2):
        answer = model.generate(**ONE.inputs(), max_new_tokens=16, do_sample=False, assistant=assistant, stats=stats)
        assert answer[:, ONE.columns :].tolist() == said(model, ONE, 16)
    # A pathlib.Path is the same path.
    small = resolve({**assistant, "model": tmp_path}, model).drafter.model
    assert stats.accepted > 0
    assert loads == [str(tmp_path)]
    assert (small.dtype, small.device, small.training) == (model.dtype, model.device, False)
    other = tiny.llama()
    kept = weakref.ref(resolve(assistant, other).drafter.model)
    assert len(loads) == 2
    assert kept() is not small
    del other
    gc.collect()
    assert kept() is None


@pytest.mark.parametrize(
    ("assistant", "message"),
    [
        ({}, "method=None is not one of 'ngram', 'suffix', 'draft_model'"),
        ({"method": "eagle9"}, "method='eagle9' is not one of 'ngram', 'suffix', 'draft_model'"),
        ({"method": ["ngram"]}, "is not one of 'ngram', 'suffix', 'draft_model'"),
        ({"method": "ngram", "model": "x", "color": 1}, "method='ngram' takes no 'model', 'color'"),
        ({"method": "draft_model"}, "method='draft_model' needs 'model'"),
        ({"method": "draft_model", "model": 3}, "'model' is 3; it must be a path, a hub id or a loaded causal LM"),
        ({"method": "ngram", "num_speculative_tokens": -1}, "num_assistant_tokens is -1"),
        ({"method": "ngram", "prompt_lookup_max": 2, "prompt_lookup_min": 4}, "does not hold for 4 and 2"),
    ],
    ids=range(8),
)
def test_a_config_that_says_something_unknown_is_refused_by_name(model, assistant, message):
    model.register_forward_pre_hook(lambda *_: pytest.fail("a forward pass was made"))
    with pytest.raises(ValueError, match=message):
        sg.enable(model).generate(**ONE.inputs(), max_new_tokens=4, assistant=assistant)


@pytest.mark.parametrize("assistant", [{"method": "ngram", "num_speculative_tokens": 4}, {"method": "ngram"}])
@BATCHES
def test_a_config_decodes_as_stock(model, prompt, assistant):
    kwargs = {**prompt.inputs(), "max_new_tokens": 12, "do_sample": False}
    expected = model.generate(**kwargs)
    for _ in range(2):
        assert torch.equal(sg.enable(model).generate(**kwargs, assistant=assistant), expected)


@pytest.mark.parametrize(("argument", "depth"), [(None, 7), (3, 3), (0, None), (30, 18)])
def test_the_call_s_argument_goes_before_the_drafter_s_own_depth(model, argument, depth):
    noting = Noting()
    kwargs = {**ONE.inputs(), "max_new_tokens": 20, "assistant": noting}
    sg.enable(model).generate(**kwargs, num_assistant_tokens=argument)
    assert max(noting.depths, default=None) == depth


def test_drafters_leave_the_depth_to_what_pays_unless_they_are_told():
    model = tiny.llama()
    assert sg.PromptLookup().num_assistant_tokens is None
    assert sg.DraftModel(model).num_assistant_tokens is None
    assert sg.Plain().num_assistant_tokens == 0
    asked = {**ONE.inputs(), "max_new_tokens": 4, "assistant": sg.PromptLookup()}
    assert isinstance(rehearse(model, **asked, num_assistant_tokens="auto").call.controller, AutoController)
    assert as_length(None) == as_length("auto")
    call = rehearse(model, **ONE.inputs(), max_new_tokens=4, assistant=sg.PromptLookup(num_assistant_tokens=3)).call
    assert call.controller == sg.Fixed(3)


@BATCHES
def test_a_drafter_is_told_what_it_needs_to_know(model, prompt):
    noting = Noting()
    kwargs = {**prompt.inputs(), "max_new_tokens": 6, "assistant": noting}
    sg.enable(model).generate(**kwargs, eos_token_id=[2, 3], do_sample=False)
    sg.enable(model).generate(**kwargs, do_sample=True, acceptance="rejection", repetition_penalty=1.2)
    greedy, sampled = noting.requests
    assert (greedy.batch, greedy.chain, greedy.sampled, greedy.wants_probs) == (prompt.batch, False, False, False)
    assert greedy.eos == {2, 3}
    assert (sampled.chain, sampled.sampled, sampled.wants_probs, sampled.eos) == (True, True, True, frozenset())
    assert not sampled.processors.pure


class Repeating:
    """A drafter of a few lines, as a user may write it: the last token again."""

    num_assistant_tokens = 3
    needs = sg.Needs()

    def start(self, target, request):
        return self

    def propose(self, context, limit):
        return sg.Draft.ragged([[ids[-1]] * depth for ids, depth in zip(context.ids, limit.depth, strict=True)])


@BATCHES
@pytest.mark.parametrize("mode", ["greedy", "sampled", "hash-sampled", "penalties-greedy"])
def test_a_drafter_that_a_user_wrote_changes_no_text(model, prompt, mode):
    sg.enable(model)
    expected = tiny.run(model, prompt, mode, assistant=sg.Plain(), max_new_tokens=12)
    assert tiny.run(model, prompt, mode, assistant=Repeating(), max_new_tokens=12) == expected


@dataclass(frozen=True)
class Greedy:
    """The example of the documentation: a verifier that decodes greedily whatever the noise."""

    name: ClassVar[str] = "greedy"
    coupled: ClassVar[bool] = False
    wants_probs: ClassVar[bool] = False
    chain_only: ClassVar[bool] = False
    all_nodes: ClassVar[bool] = False

    def __call__(self, scores, draft, noise):
        return scores.argmax(-1)


@dataclass(frozen=True)
class Second:
    """Composes: chooses what another rule would if the best token did not exist."""

    rule: sg.Verifier
    name: ClassVar[str] = "second"
    coupled: ClassVar[bool] = True
    wants_probs: ClassVar[bool] = False
    chain_only: ClassVar[bool] = False
    all_nodes: ClassVar[bool] = False

    def __call__(self, scores, draft, noise):
        best = scores.argmax(-1, keepdim=True)
        return self.rule(scores.scatter(-1, best, -torch.inf), draft, noise)


@BATCHES
@pytest.mark.parametrize("kind", ["plain", "chain", "tree", "model"])
@pytest.mark.parametrize("processors", [{}, {"repetition_penalty": 1.0001}], ids=["at once", "by step"])
def test_a_verifier_that_a_user_wrote_decides(model, prompt, kind, processors):
    rows = said(model, prompt, 16)
    script = drafter(kind, model, whole(prompt, rows))
    kwargs = {**prompt.inputs(), "max_new_tokens": 16, **processors, "assistant": script}
    sg.enable(model)
    answer = model.generate(**kwargs, do_sample=True, temperature=3.0, acceptance=Greedy())
    assert answer[:, prompt.columns :].tolist() == rows
    second = model.generate(**kwargs, do_sample=False, acceptance=Second(sg.Matching()))
    expected = model.generate(**{**kwargs, "assistant": sg.Plain()}, do_sample=False, acceptance=Second(sg.Matching()))
    assert torch.equal(second, expected)
    assert second[:, prompt.columns].tolist() != [row[0] for row in rows]
