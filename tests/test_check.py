"""What `check` says is what `generate` does; and the probe tells models apart whose passes can be trusted."""

import copy

import families
import pytest
import tiny
import torch
from generating import Recorded
from transformers import DynamicCache, LlamaForCausalLM, StaticCache

import hf_specgen as sg
from hf_specgen import cache as caches
from hf_specgen import generation, target
from hf_specgen.probe import probe

ONE, RAGGED = tiny.ONE, tiny.RAGGED
SIZE = {"max_new_tokens": 4, "do_sample": False}

MODELS = {
    "llama": tiny.llama,
    "mistral": tiny.mistral,
    **{
        name: lambda name=name: families.build(name)
        for name in ("bloom", "gpt_neo", "jamba", "mamba", "openai-gpt", "phi3", "qwen3_next", "rwkv", "t5")
    },
}
ASSISTANTS = {
    "lookup": lambda model: sg.PromptLookup(),
    "itself": lambda model: sg.disable(copy.deepcopy(model)),
    "llama": lambda model: tiny.llama(),
    "other vocabulary": lambda model: tiny.llama(vocab_size=4096),
    "an encoder-decoder": lambda model: families.build("bart"),
    "a word": lambda model: "auto-please",
    "a method": lambda model: {"method": "ngrams"},
}


def own(model, kind, **sizes):
    """A cache of the caller's."""
    return {} if model.config.is_encoder_decoder else {"cache": kind(config=model.config, **sizes)}


ARGUMENTS = {
    "nothing": lambda model: {},
    "two rows": lambda model: RAGGED.inputs() if not model.config.is_encoder_decoder else {},
    "beams": lambda model: {"num_beams": 2},
    "static": lambda model: {"cache_implementation": "static"},
    "quantized": lambda model: {"cache_implementation": "quantized", "cache_config": {"backend": "fp8"}},
    "offloaded": lambda model: {"cache_implementation": "offloaded"},
    "a cache": lambda model: own(model, DynamicCache),
    "a small cache": lambda model: own(model, StaticCache, max_cache_len=9),
    "block": lambda model: {"acceptance": "block", "repetition_penalty": 1.2},
    "rejection": lambda model: {"acceptance": "rejection", "do_sample": True, "seed": 3},
    "nonsense": lambda model: {"nonsense": 1},
    "half a token": lambda model: {"num_assistant_tokens": 0.5},
    "two seeds": lambda model: {"seed": [1, 2], "do_sample": True},
    "stop strings": lambda model: {"stop_strings": "abc"},
    "a long text": lambda model: {"max_new_tokens": 300},
}


def call(name, model, **kwargs):
    """The arguments of `generate` for a model of this name."""
    shared = {} if name in ("llama", "mistral") else families.inputs(name, ONE)
    return {**ONE.inputs(), **SIZE, **kwargs} if not shared else {**shared, **SIZE, **kwargs}


def raised(model, **kwargs):
    """What `generate` raises, and None if it runs."""
    try:
        sg.enable(model).generate(**kwargs)
    except ValueError as error:
        return str(error)
    return None


def without_a_pass(*modules):
    """Fails a test that makes a forward pass; to be taken off again."""
    inner = [module for module in modules if isinstance(module, torch.nn.Module)]
    return [module.register_forward_pre_hook(lambda *_: pytest.fail("a forward pass was made")) for module in inner]


def agree(name, assistant, arguments, enabled):
    """The report, after seeing that `generate` raises just what it says."""
    model = MODELS[name]()
    drafter = ASSISTANTS[assistant](model)
    if enabled:
        sg.enable(model)
    kwargs = call(name, model, **ARGUMENTS[arguments](model))
    hooks = without_a_pass(model, *model.modules(), drafter)
    report = sg.check(model, drafter, **kwargs)
    for hook in hooks:
        hook.remove()
    # A long text is only asked about where the answer is no.
    if arguments != "a long text" or not report.ok:
        assert raised(model, **kwargs, assistant=drafter) == report.refusal
    assert report.ok == (report.refusal is None) == (report.at_fault is None)
    return report


@pytest.mark.parametrize("assistant", ASSISTANTS)
@pytest.mark.parametrize("name", MODELS)
def test_a_report_is_not_ok_where_generate_raises_what_it_says(name, assistant):
    report = agree(name, assistant, "nothing", enabled=assistant in ("lookup", "a word"))
    if assistant in ("a word", "a method"):
        assert not report.ok
    if name == "llama":
        assert report.ok == (assistant in ("lookup", "itself", "llama"))
        assert report.at_fault == (None if report.ok else "assistant")


@pytest.mark.parametrize("arguments", ARGUMENTS)
@pytest.mark.parametrize("name", ["llama", "gpt_neo", "phi3", "qwen3_next", "t5"])
def test_arguments_are_judged_as_generate_judges_them(name, arguments):
    report = agree(name, "lookup", arguments, enabled=True)
    if name == "llama":
        refused = ("beams", "offloaded", "a small cache", "block", "nonsense", "half a token")
        assert report.ok == (arguments not in (*refused, "two seeds", "stop strings"))
        assert report.at_fault == (None if report.ok else "arguments")


def test_an_enabled_model_refuses_what_stock_would_have_acted_on(model):
    for theirs in ({"cache_implementation": "paged"}, {"prompt_lookup_num_tokens": 3}, {"assistant_model": model}):
        report = sg.check(model, sg.Plain(), **theirs)
        assert report.refusal == raised(tiny.llama(), **ONE.inputs(), **theirs, assistant=sg.Plain())
        assert report.at_fault == "arguments"


def test_an_own_generate_that_computes_first_is_not_entered():
    model = families.build("whisper")
    hooks = without_a_pass(*model.modules())
    assert sg.check(model, sg.PromptLookup(), **families.inputs("whisper", ONE), max_new_tokens=5).ok
    for hook in hooks:
        hook.remove()


def test_a_model_that_is_refused_is_at_fault_itself():
    assert sg.check(families.build("jamba"), sg.PromptLookup(), max_new_tokens=8).at_fault == "model"
    assert sg.check(torch.nn.Linear(2, 2)).refusal == "Linear holds no transformers model that can generate"


KINDS = {
    "llama": (ONE, {}),
    "mistral": (RAGGED, {}),
    "bloom": (ONE, {}),
    "gpt_neo": (RAGGED, {}),
    "qwen3_next": (RAGGED, {}),
    "static": (RAGGED, {"cache_implementation": "static"}),
    "rejection": (RAGGED, {"acceptance": "rejection", "do_sample": True, "seed": 1}),
    "processor": (RAGGED, {"logits_processor": [tiny.PrefixHash()]}),
    "streamer": (ONE, {"streamer": None}),
}


@pytest.mark.parametrize("kind", KINDS)
def test_cache_drafts_and_rows_are_those_of_the_call(kind, monkeypatch):
    model = sg.enable(MODELS.get(kind, tiny.llama)())
    prompt, arguments = KINDS[kind]
    if "streamer" in arguments:
        arguments = {"streamer": Recorded()}
    script, made, prepared = tiny.Scripted([[0] * 99] * prompt.batch, "tree"), [], []
    kwargs = {**prompt.inputs(), **SIZE, **arguments}
    report = sg.check(model, script, **kwargs)
    for name in ("SlotCache", "CropCache"):
        plain = getattr(caches, name).__init__
        monkeypatch.setattr(
            getattr(target, name),
            "__init__",
            lambda self, *args, _of=plain, **named: (made.append(type(self).__name__), _of(self, *args, **named))[1],
        )
    plain_decode = generation.decode
    monkeypatch.setattr(generation, "decode", lambda call: (prepared.append(call), plain_decode(call))[1])
    model.generate(**kwargs, assistant=script)
    assert made == [report.cache.split(":")[0]]
    assert all(request.chain == report.drafts.startswith("chains only") for request in script.seen.requests)
    lockstep = prepared[0].walk.rules.lockstep
    # One row is in step with itself.
    assert lockstep == (report.rows.startswith("in lockstep") and prompt.batch > 1)
    assert prepared[0].controller.depth(64) == report.num_assistant_tokens == script.num_assistant_tokens


def test_every_kind_of_answer_is_among_them(model):
    assert sg.check(model, **RAGGED.inputs()).rows == "each by itself"
    assert sg.check(model).drafts == "chains and trees"
    assert sg.check(model, cache_implementation="static").cache == "CropCache: StaticCache is kept as it is"
    assert sg.check(model, batch=2, logits_processor=[tiny.PrefixHash()]).rows.startswith("in lockstep: a logits proc")
    assert sg.check(model, streamer=Recorded()).rows == "in lockstep: the streamer takes a token of every row at a time"
    assert sg.check(model, acceptance="block").drafts == "chains only: acceptance='block' takes no branches"
    assert sg.check(families.build("qwen3_next")).drafts == "chains only: a recurrent state follows one path"
    mask = torch.tensor([[1, 0, 1, 1]])
    holes = sg.check(model, input_ids=torch.ones_like(mask), attention_mask=mask)
    assert holes.cache == "CropCache: the attention mask has holes"
    assert sg.check(model, sg.PromptLookup(), num_assistant_tokens=7).num_assistant_tokens == 7
    assert sg.check(model).num_assistant_tokens is None


def test_the_vocabularies_are_told_as_far_as_they_are_known(model):
    class Words:
        """As much of a tokenizer as is looked at."""

        def __init__(self, last):
            self.last, self.added_tokens_decoder = last, {}

        def get_vocab(self):
            return {"a": 0, self.last: 1}

    assert "not verified" in sg.check(model, tiny.sibling(model)).vocabularies
    same = sg.check(model, tiny.sibling(model), tokenizer=Words("b"), assistant_tokenizer=Words("b"))
    assert same.vocabularies == "equal, token by token"
    other = sg.check(model, tiny.sibling(model), tokenizer=Words("b"), assistant_tokenizer=Words("c"))
    assert "id 1 is 'b' for the target and 'c' for the drafter" in other.refusal
    assert (other.at_fault, other.cache[:9], other.vocabularies) == ("assistant", "SlotCache", None)
    assert sg.check(model, sg.PromptLookup()).vocabularies is None


def test_the_attention_is_what_enable_would_set_or_has_set(model):
    assert sg.check(model).attention.startswith("sdpa; enable puts grouped-query attention")
    assert model.config._attn_implementation == "sdpa"
    assert sg.check(sg.enable(model)).attention.endswith("set by enable")
    assert sg.check(tiny.llama(attention="eager")).attention == "eager, as transformers has it"
    assert sg.check(tiny.llama(num_key_value_heads=4)).attention == "sdpa, as transformers has it"


def test_rotary_embeddings_that_move_are_told():
    report = sg.check(families.build("phi3"))
    assert report.positions == "longrope changes at 256: no pass crosses it"
    assert report.threads is not None
    assert report.threads.startswith("one call at a time: its rotary embedding")
    assert sg.check(tiny.llama()).positions is None


@pytest.mark.parametrize("asks_for_a_probe", [False, True])
def test_a_check_leaves_no_trace(asks_for_a_probe):
    model = tiny.llama().train()
    held, settings = {name: id(value) for name, value in vars(model).items()}, model.config.to_dict()
    weights = [weight.clone() for weight in model.parameters()]
    own, state = DynamicCache(config=model.config), torch.get_rng_state()
    kwargs = {"do_sample": True, "max_new_tokens": 40, "probe": asks_for_a_probe}
    assert (
        sg.check(model, sg.PromptLookup(), cache=own, **kwargs).cache == "CropCache: the DynamicCache is the caller's"
    )
    assert sg.check(model, sg.PromptLookup(), cache_implementation="static", **kwargs).ok
    assert torch.equal(torch.get_rng_state(), state)
    assert not hasattr(own, "_is_user_defined")
    assert {name: id(value) for name, value in vars(model).items()} == held
    assert model.config.to_dict() == settings
    assert model.training
    assert all(torch.equal(one, other) for one, other in zip(model.parameters(), weights, strict=True))


def test_the_report_is_a_table(model):
    report = sg.check(model, DraftsNothing("<b>" * 60), probe=True)
    lines = str(report).splitlines()
    assert max(map(len, lines)) <= 100
    assert lines[0] == "model       LlamaForCausalLM (llama), float64 on cpu"
    assert "verdict     refused, because of the assistant" in lines
    assert "&lt;b&gt;" in report._repr_html_()
    assert "<b>" not in report._repr_html_()
    assert "agrees to rounding of float64" in report._repr_html_()


class DraftsNothing:
    """A drafter that starts for nobody."""

    num_assistant_tokens = 3

    def __init__(self, message):
        self.message = message

    def start(self, target, request):
        raise ValueError(self.message)


SLOW = pytest.mark.slow
FORMATS = pytest.mark.parametrize(
    "dtype",
    [
        torch.float32,
        torch.bfloat16,
        pytest.param(torch.float16, marks=SLOW),
        pytest.param(torch.float64, marks=SLOW),
    ],
    ids=str,
)


@FORMATS
@pytest.mark.parametrize(
    "name",
    ["llama", "gemma3_text", "qwen2", "falcon_h1", *(pytest.param(name, marks=SLOW) for name in ("qwen3_moe", "gpt2"))],
)
def test_a_model_whose_passes_agree_passes_in_every_format(name, dtype):
    report = sg.check(families.build(name).to(dtype), probe=True)
    found = report.probe
    assert report.ok
    assert found.verdict == f"agrees to rounding of {str(dtype).removeprefix('torch.')}"
    assert (*found.ours,) == (("chains",) if name == "falcon_h1" else ("chains", "trees"))
    # Neither side is near the line.
    assert max(found.block) < found.line < found.context


@FORMATS
@pytest.mark.parametrize("name", ["jamba", "mamba", "falcon_mamba"])
def test_models_whose_own_passes_differ_are_caught_in_every_format(name, dtype):
    report = sg.check(families.build(name).to(dtype), probe=True)
    assert not report.ok
    assert report.probe.verdict == ("this model's own multi-token cached forward differs from token-by-token decoding")


class LatePositions(LlamaForCausalLM):
    """Modelling code with a fault: the second half of a cached pass stands one place too far."""

    def forward(self, input_ids=None, position_ids=None, cache=None, **kwargs):
        held = 0 if cache is None else cache.get_seq_length()
        if held and input_ids.shape[1] > 1:
            position_ids = position_ids + (torch.arange(input_ids.shape[1]) >= input_ids.shape[1] // 2)
        return super().forward(input_ids=input_ids, position_ids=position_ids, cache=cache, **kwargs)


class OneAtATime(LlamaForCausalLM):
    """Modelling code that knows no block."""

    def forward(self, input_ids=None, cache=None, **kwargs):
        if cache is not None and cache.get_seq_length() and input_ids.shape[1] > 1:
            raise IndexError("one at a time")
        return super().forward(input_ids=input_ids, cache=cache, **kwargs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_broken_model_is_caught(model, dtype):
    broken = LatePositions(model.config)
    broken.load_state_dict(model.state_dict())
    report = sg.check(broken.to(dtype).eval(), sg.PromptLookup(), probe=True)
    assert report.refusal is None
    assert not report.ok
    assert "own multi-token cached forward differs" in str(report)


def test_a_model_that_raises_over_several_tokens_is_told(model):
    found = probe(OneAtATime(model.config).eval())
    assert found.verdict == "this model cannot take several cached tokens in one pass: IndexError: one at a time"
    assert not found.ok


def test_a_fault_of_our_own_would_be_told_as_such(model, monkeypatch):
    committed = caches.SlotCache.commit

    def one_too_few(self, paths):
        committed(self, paths)
        self.lengths = [length - bool(path) for length, path in zip(self.lengths, paths, strict=True)]

    monkeypatch.setattr(caches.SlotCache, "commit", one_too_few)
    found = probe(model)
    assert not found.ok
    assert found.verdict.startswith("this package's passes differ from the model's own")


def test_where_only_our_passes_agree_with_decoding_the_verdict_says_so():
    found = probe(families.build("moshi"))
    assert found.is_fault(found.block)
    assert found.is_fault(found.single)
    assert found.ok
    assert found.verdict.endswith("differs from token-by-token decoding; this package's passes agree with the latter")


def test_a_model_too_flat_to_tell_is_told_as_such():
    flat = tiny.llama().to(torch.bfloat16)
    with torch.no_grad():
        for layer in flat.model.layers:
            layer.self_attn.o_proj.weight.mul_(1e-4)
    found = probe(flat)
    assert found.verdict.startswith("cannot be told in bfloat16")
    assert found.ok


def test_the_probe_looks_at_the_prompts_it_is_given(model):
    seen = []
    handle = model.register_forward_pre_hook(
        lambda module, args, kwargs: seen.append(kwargs["input_ids"]), with_kwargs=True
    )
    prompt = tiny.Prompt.random((24, 18), (9, 13))
    report = sg.check(model, probe=True, **prompt.inputs())
    handle.remove()
    assert report.probe.ok
    assert any(torch.equal(ids[0], torch.tensor(prompt.rows[0])) for ids in seen)
    assert sg.check(model, probe=True, **RAGGED.inputs()).probe.ok
    with pytest.raises(ValueError, match="needs 4 tokens or more, not 1"):
        probe(model, RAGGED.rows)


def test_windows_that_were_not_reached_are_told():
    assert sg.check(tiny.mistral(window=40), probe=True).probe.remarks == ()
    report = sg.check(tiny.mistral(window=200), probe=True)
    assert report.probe.remarks == ("the window of 200 tokens was not reached: pass longer input_ids=",)
    assert "window of 200 tokens" in str(report)


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"batch": 0}, "batch=0 is no number of rows"),
        ({"input_ids": "hello"}, "input_ids must be a tensor of shape"),
        ({"input_ids": torch.tensor([1, 2])}, "input_ids must be a tensor of shape"),
        ({"input_ids": torch.ones((2, 4), dtype=torch.long), "batch": 3}, "batch=3 and input_ids of 2 rows"),
    ],
)
def test_a_question_that_makes_no_sense_is_an_error(kwargs, message):
    with pytest.raises(ValueError, match=message):
        sg.check(tiny.llama(), **kwargs)


def test_a_name_is_no_model():
    with pytest.raises(ValueError, match="model='gpt2' is not a loaded model"):
        sg.check("gpt2")
