"""What cannot be served raises, by its name and before any forward pass; nothing is dropped in silence."""

import pytest
import tiny
import torch
from generating import drafter, said, same_as_stock, whole
from transformers import (
    DynamicCache,
    GenerationConfig,
    LlamaForCausalLM,
    MambaConfig,
    MambaForCausalLM,
    RwkvConfig,
    RwkvForCausalLM,
    StaticCache,
    T5Config,
    T5ForConditionalGeneration,
)

import hf_specgen as sg

ONE, RAGGED = tiny.ONE, tiny.RAGGED


def refused(model, message, *modules, **kwargs):
    """Raises by name, before any forward pass of the model and the other modules."""
    kwargs = {**ONE.inputs(), "assistant": sg.Plain(), **kwargs}
    if "generation_config" not in kwargs:
        kwargs["max_new_tokens"] = 8
    for module in (model, *modules):
        module.register_forward_pre_hook(lambda *_: pytest.fail("a forward pass was made"))
    with pytest.raises(ValueError, match=message):
        model.generate(**kwargs)


MODES = {
    "beam_search": {"num_beams": 2},
    "beam_sample": {"num_beams": 2, "do_sample": True},
    "contrastive_search": {"penalty_alpha": 0.6, "top_k": 4, "do_sample": False},
    "dola_generation": {"dola_layers": "low"},
    "constrained_beam_search": {"force_words_ids": [[5]], "num_beams": 2},
    "group_beam_search": {"num_beams": 4, "num_beam_groups": 2, "diversity_penalty": 0.5},
}
DOORS = pytest.mark.parametrize("door", ["enabled", "custom_generate"])


def opened(model, door):
    """What a call through the door says."""
    if door == "enabled":
        sg.enable(model)
        return {}
    return {"custom_generate": sg.speculate}


@DOORS
@pytest.mark.parametrize("mode", MODES)
def test_other_ways_to_decode(model, mode, door):
    """Report 76."""
    refused(
        model,
        f"takes greedy decoding and sampling, but the arguments ask for {mode}",
        **MODES[mode],
        **opened(model, door),
    )


@DOORS
def test_no_cache(model, door):
    refused(model, "use_cache=False is not supported", use_cache=False, **opened(model, door))


@pytest.mark.parametrize("whose", ["target", "drafter", "both"])
def test_a_config_that_training_left_without_a_cache_is_no_refusal(model, whose):
    """Report 73: the argument counts, and the default of a call is to use one."""
    small = tiny.sibling(model)
    for which, left in (("target", model), ("drafter", small)):
        if whose in (which, "both"):
            left.config.use_cache = False
    same_as_stock(model, small, **RAGGED.inputs(), max_new_tokens=10)
    same_as_stock(model, small, **RAGGED.inputs(), max_new_tokens=10, use_cache=True)
    model.generation_config.use_cache = False
    same_as_stock(model, small, **RAGGED.inputs(), max_new_tokens=10, use_cache=True)
    refused(model, "use_cache=False .* gradient checkpointing", assistant=small)


def test_the_paged_cache(model):
    refused(sg.enable(model), "cache_implementation='paged' is continuous batching", cache_implementation="paged")


@DOORS
@pytest.mark.parametrize("home", ["call", "config"])
def test_a_quantized_cache_names_its_layers(model, door, home):
    kind = {"cache_implementation": "quantized"}
    if home == "config":
        kind = {"generation_config": GenerationConfig(**kind, max_new_tokens=8)}
    refused(model, "cannot be removed from a QuantizedCache with QuantoQuantizedLayer", **kind, **opened(model, door))


def test_a_static_cache_with_a_window_it_outgrows_names_its_layers():
    model = sg.enable(tiny.mistral())
    refused(
        model,
        "cannot be removed from a StaticCache with StaticSlidingWindowLayer",
        cache=StaticCache(config=model.config, max_cache_len=64),
    )


class NoCrop(DynamicCache):
    """A cache that only says that it can be cropped."""

    def crop(self, *args, **kwargs):
        pass


def test_a_cache_whose_crop_does_nothing_is_found_out(model):
    """Report 5: an error and no output; nobody can know before the first crop."""
    script = drafter("chain", model, whole(ONE, said(model, ONE)))
    kwargs = {**ONE.inputs(), "max_new_tokens": 24, "cache": NoCrop(config=model.config)}
    with pytest.raises(RuntimeError, match="NoCrop holds 20 tokens after crop"):
        sg.enable(model).generate(**kwargs, assistant=script)


class Dropping(LlamaForCausalLM):
    """Modelling code that loses the cache it is given."""

    def prepare_inputs_for_generation(self, *args, **kwargs):
        return {**super().prepare_inputs_for_generation(*args, **kwargs), "cache": None}


@pytest.mark.parametrize("which", ["target", "drafter"])
def test_a_model_that_drops_its_cache_is_named(model, which):
    """Report 16."""
    dropping = Dropping(model.config).double().eval()
    dropping.load_state_dict(model.state_dict())
    target, assistant = (dropping, model) if which == "target" else (model, dropping)
    with pytest.raises(ValueError, match="Dropping drops its cache in prepare_inputs_for_generation"):
        sg.enable(target).generate(**ONE.inputs(), max_new_tokens=8, assistant=assistant)


@pytest.mark.parametrize(
    "theirs",
    [
        {"assistant_model": tiny.llama()},
        {"prompt_lookup_num_tokens": 3},
        {"use_mtp": True},
        {"assistant_early_exit": 1},
    ],
    ids=lambda theirs: next(iter(theirs)),
)
def test_stock_s_own_assistants_beside_ours(model, theirs):
    refused(sg.enable(model), f"{next(iter(theirs))}= asks for stock assisted generation", **theirs)


@DOORS
def test_stock_s_own_assistant_in_a_generation_config(model, door):
    config = GenerationConfig(prompt_lookup_num_tokens=3, max_new_tokens=8)
    refused(
        model,
        "arguments ask for assisted_generation",
        generation_config=config,
        **opened(model, door),
    )


def test_another_decoding_loop_beside_ours(model):
    refused(sg.enable(model), "custom_generate= replaces the decoding loop", custom_generate=lambda model, **_: None)


@DOORS
@pytest.mark.parametrize("kwargs", [{}, {"return_dict_in_generate": True}])
def test_output_attentions(model, door, kwargs):
    refused(model, "output_attentions=True is not supported", output_attentions=True, **kwargs, **opened(model, door))


SIZES = {"vocab_size": tiny.VOCAB, "hidden_size": 32, "num_hidden_layers": 2}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 48}
TOKENS = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": 0}


def mamba():
    return MambaForCausalLM(MambaConfig(**SIZES, **TOKENS, state_size=4))


def rwkv():
    return RwkvForCausalLM(RwkvConfig(**SIZES, **TOKENS, attention_hidden_size=32, intermediate_size=48))


def t5():
    sizes = {"vocab_size": tiny.VOCAB, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 1, "num_heads": 4}
    return T5ForConditionalGeneration(T5Config(**sizes, decoder_start_token_id=0, eos_token_id=None, pad_token_id=0))


@DOORS
@pytest.mark.parametrize(
    ("make", "message"),
    [
        (mamba, "cannot be removed from a DynamicCache with LinearAttentionLayer"),
        (rwkv, "RwkvForCausalLM keeps its state in no transformers cache"),
    ],
)
def test_targets_that_cannot_be_rolled_back(make, message, door):
    """Report 10: a loud refusal where there is no exact way."""
    model = make().eval()
    refused(model, message, assistant=sg.PromptLookup(), **opened(model, door))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (mamba, "MambaForCausalLM cannot draft"),
        (t5, "T5ForConditionalGeneration is an encoder-decoder; a drafter must be a causal LM"),
    ],
)
def test_drafters_that_cannot_be_rolled_back(model, make, message):
    small = make().eval()
    refused(sg.enable(model), message, small, assistant=small)


@pytest.mark.parametrize(
    ("assistant", "message"),
    [
        (3, "assistant=3 is not a drafter such as"),
        ("auto-please", "there is no file or folder 'auto-please', and no hub repository"),
        ([sg.Plain()], "is not a drafter such as"),
        (sg.PromptLookup, "assistant=<class .*PromptLookup'> is not a drafter such as"),
        (LlamaForCausalLM, "assistant=<class .*LlamaForCausalLM'> is not a drafter such as"),
        (torch.nn.Linear(2, 2), "Linear holds no transformers model that can generate"),
        (tiny.llama().model, "LlamaModel holds no transformers model that can generate"),
    ],
    ids=["number", "text", "list", "class", "model class", "layer", "headless model"],
)
@DOORS
def test_what_is_no_assistant(model, assistant, message, door):
    refused(model, message, assistant=assistant, **opened(model, door))


@pytest.mark.parametrize(
    ("acceptance", "message"),
    [
        ("typical", "acceptance='typical' is none of 'matching', 'rejection', 'block'"),
        (sg.Rejection, "acceptance=<class .*Rejection'> is none of"),
    ],
)
def test_what_is_no_accept_rule(model, acceptance, message):
    refused(sg.enable(model), message, acceptance=acceptance)


@pytest.mark.parametrize(
    "processors",
    [
        {"repetition_penalty": 1.2},
        {"no_repeat_ngram_size": 2, "top_k": 0},
        {"guidance_scale": 1.5},
        {"logits_processor": [tiny.PrefixHash()]},
    ],
    ids=lambda processors: next(iter(processors)),
)
def test_block_verification_with_processors_that_look_at_the_prefix(model, processors):
    message = "acceptance='block' needs the scores of every node at once"
    refused(sg.enable(model), message, acceptance="block", do_sample=True, **processors)


@pytest.mark.parametrize("sampled", [False, True])
@pytest.mark.parametrize("seed", [[], [1, 2], (1, 2, 3)])
def test_a_seed_for_another_number_of_rows(model, seed, sampled):
    refused(sg.enable(model), f"seed has {len(seed)} entries for 1 rows", seed=seed, do_sample=sampled)


@pytest.mark.parametrize("count", [-1, 2.5, "automatic", "5"])
def test_what_is_no_number_of_tokens(model, count):
    message = f"num_assistant_tokens is {count!r}; it must be a whole number, 0 or more"
    refused(sg.enable(model), message, num_assistant_tokens=count)


def test_what_is_no_statistics(model):
    refused(sg.enable(model), "stats={} is not an hf_specgen.Stats", stats={})


@DOORS
def test_unknown_arguments_still_raise(model, door):
    """Report 68."""
    refused(model, "not used by the model: .'nonsense'", nonsense=1, **opened(model, door))


class Overlong:
    """Drafts more than it was asked for, or a tree where chains were wanted."""

    num_assistant_tokens = 3
    needs = sg.Needs()

    def __init__(self, draft):
        self.draft = draft

    def start(self, target, request):
        return self

    def propose(self, context, limit):
        return self.draft


@pytest.mark.parametrize(
    ("draft", "message"),
    [
        (sg.Draft.ragged([[5] * 65]), r"a chain of shape \(1, 65\), but was asked for at most \(1, 64\)"),
        (sg.Draft.ragged([[5], [6]]), r"a chain of shape \(2, 1\), but was asked for at most \(1, 64\)"),
    ],
)
def test_a_drafter_that_breaks_its_limit_is_named(model, draft, message):
    with pytest.raises(ValueError, match=f"Overlong proposed {message}"):
        sg.enable(model).generate(**ONE.inputs(), max_new_tokens=70, assistant=Overlong(draft), num_assistant_tokens=64)


def test_a_tree_where_chains_are_wanted_is_named(model):
    tree = sg.Draft(torch.tensor([[5, 6]]), torch.tensor([[0, 0]]))
    kwargs = {**ONE.inputs(), "max_new_tokens": 8, "do_sample": True, "acceptance": "rejection"}
    with pytest.raises(ValueError, match=r"Overlong proposed a tree of shape .* at most \(1, 3\) in chains"):
        sg.enable(model).generate(**kwargs, assistant=Overlong(tree))
