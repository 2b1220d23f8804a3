"""EAGLE heads: they draft what a slow reference drafts, and a perfect head is right to full depth every time."""

from __future__ import annotations

import contextlib
import copy
import functools
import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import accelerate
import families
import pytest
import tiny
import torch
from test_draft_model import assisted
from tiny import ONE, RAGGED, VOCAB, Prompt, Scripted
from torch import Tensor
from transformers import (
    DynamicCache,
    GraniteConfig,
    GraniteForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    LogitsProcessorList,
    RepetitionPenaltyLogitsProcessor,
    T5Config,
    T5ForConditionalGeneration,
    TemperatureLogitsWarper,
)
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding
from two_devices import AWAY, HERE, TwoDevices, send_away

import hf_specgen as sg
from hf_specgen.cache import new_cache
from hf_specgen.draft import Context, Draft, Limit, Request
from hf_specgen.drafters import fitting
from hf_specgen.drafters.eagle import EagleSession
from hf_specgen.drafters.scoring import target_logits
from hf_specgen.heads.eagle import EagleConfig, EagleHead

SHAPES = pytest.mark.parametrize("shape", ["chain", "tree"])
HOT = {"do_sample": True, "temperature": 3.0, "top_k": 0, "repetition_penalty": 1.3, "seed": 3}


@functools.cache
def target() -> Any:
    return sg.enable(tiny.llama(num_hidden_layers=4))


def filled(head: EagleHead, scale: float = 0.4, seed: int = 0) -> EagleHead:
    """The head in float64 with weights that make every part of it count."""
    generator = torch.Generator().manual_seed(seed)
    head = head.double().eval()
    with torch.no_grad():
        for weight in head.parameters():
            noise = torch.randn(weight.shape, generator=generator, dtype=weight.dtype)
            weight.copy_(scale * noise if weight.ndim > 1 else 1 + 0.3 * noise)
        if not head.config.final_norm:  # or one token is certain
            head.fc.weight.mul_(0.3)
        if head.config.own_lm_head:
            head.lm_head.weight.mul_(5)
        if head.to_target is not None:
            ids = torch.randperm(head.config.vocab_size, generator=generator)[: head.config.draft_vocab_size].sort()
            head.d2t.copy_(ids.values - torch.arange(len(ids.values)))
    return head


def config(**changed: Any) -> EagleConfig:
    sizes = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": VOCAB,
    }
    return EagleConfig(**{**sizes, **changed})


OWN = {"own_embeddings": True, "own_lm_head": True}
VARIANTS: dict[str, dict[str, Any]] = {
    "eagle": {"method": "eagle", "fc_bias": True},
    "eagle-normed": {
        "method": "eagle",
        "num_hidden_layers": 2,
        "qkv_bias": True,
        **dict.fromkeys(["embed_norm", "feature_norm", "first_layernorm", "final_norm", "norm_output"], True),
    },
    "eagle3": {"feature_layers": [1, 2, 3], "own_lm_head": True, "draft_vocab_size": 40},
    "eagle3-residual": {"norm_before_residual": True, "fc_norm": True, "num_hidden_layers": 2, "norm_output": True},
    "eagle3-other-size": {
        "hidden_size": 24,
        "target_hidden_size": 32,
        "feature_layers": [3, 1],
        "norm_before_fc": True,
        "qk_norm": True,
        "o_bias": True,
        "mlp_bias": True,
        **OWN,
    },
    "eagle3-latent": {
        "num_key_value_heads": 4,
        "feature_layers": [2],
        "kv_lora_rank": 6,
        "q_lora_rank": 12,
        "qk_nope_head_dim": 4,
        "qk_rope_head_dim": 8,
        "v_head_dim": 6,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 10_000.0,
            "factor": 4.0,
            "original_max_position_embeddings": 8,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
        },
    },
    "eagle3-window": {"use_fc": False, "sliding_window": 5, "num_hidden_layers": 2},
}


@functools.cache
def head_of(variant: str) -> EagleHead:
    return filled(EagleHead(config(**VARIANTS[variant])))


# The reference: no cache, no mask, no batch


@dataclass
class Reference:
    """What a head says behind one row, computed anew for every question from ids and full states."""

    head: EagleHead
    model: Any
    ids: Sequence[int]
    missing: int = 0  # tokens at the start whose states nobody saw

    def __post_init__(self) -> None:
        self.weights = self.head.state_dict()
        self.config = self.head.config
        with torch.no_grad():
            states = self.model(torch.tensor([self.ids[:-1]]), output_hidden_states=True).hidden_states
        layers = self.config.feature_layers or (2, 4 // 2, 4 - 3)
        self.states = [torch.cat([states[layer][0, i] for layer in layers]) for i in range(len(self.ids) - 1)]
        self.said: dict[tuple[int, ...], tuple[Tensor, Tensor]] = {}

    def logits(self, path: tuple[int, ...]) -> Tensor:
        """`(vocab,)` of what follows the ids and a drafted path."""
        hidden = self.behind(path)[0]
        if not self.config.own_lm_head:
            said = self.model.lm_head.weight @ hidden
            granite = self.model.config.model_type == "granite" and self.config.method == "eagle"
            return said / self.model.config.logits_scaling if granite else said
        mine = self.weights["lm_head.weight"] @ hidden
        whole = torch.full((VOCAB,), -torch.inf, dtype=mine.dtype)
        for i, value in enumerate(mine):
            whole[i + (int(self.weights["d2t"][i]) if "d2t" in self.weights else 0)] = value
        return whole

    def behind(self, path: tuple[int, ...]) -> tuple[Tensor, Tensor]:
        """The normed and the fed-back state of the last entry."""
        if path not in self.said:
            features = [self.fused(state) for state in self.states[self.missing :]]
            features += [self.behind(path[:count])[1] for count in range(len(path))]
            table = self.weights.get("embed_tokens.weight", self.model.get_input_embeddings().weight)
            embedded = [table[token] for token in [*self.ids[1 + self.missing :], *path]]
            self.said[path] = self.network(torch.stack(embedded), torch.stack(features))
        return self.said[path]

    def fused(self, state: Tensor) -> Tensor:
        if self.config.fc_norm:
            parts = state.chunk(3)
            state = torch.cat([self.norm(part, f"fc_norm.{i}") for i, part in enumerate(parts)])
        if self.config.norm_before_fc:
            state = self.norm(state, "input_norm")
        return self.linear(state, "fc") if self.config.method == "eagle3" and self.config.use_fc else state

    def network(self, embedded: Tensor, features: Tensor) -> tuple[Tensor, Tensor]:
        if self.config.method == "eagle":
            embedded = self.norm(embedded, "embed_norm") if self.config.embed_norm else embedded
            features = self.norm(features, "feature_norm") if self.config.feature_norm else features
            x = self.linear(torch.cat([embedded, features], -1), "fc")
            x = self.layer(0, x, self.norm(x, "layers.0.input_layernorm") if self.config.first_layernorm else x)
        else:
            normed = self.norm(features, "layers.0.hidden_norm")
            both = torch.cat([self.norm(embedded, "layers.0.input_layernorm"), normed], -1)
            x = self.layer(0, normed if self.config.norm_before_residual else features, both)
        for i in range(1, self.config.num_hidden_layers):
            x = self.layer(i, x, self.norm(x, f"layers.{i}.input_layernorm"))
        normed = self.norm(x, "norm") if self.config.final_norm else x
        return normed[-1], normed[-1] if self.config.norm_output else x[-1]

    def layer(self, i: int, residual: Tensor, x: Tensor) -> Tensor:
        name, length, heads = f"layers.{i}", len(x), self.config.num_attention_heads
        q, k, v = (self.latent if self.config.kv_lora_rank else self.plain)(f"{name}.self_attn", x)
        shared, scale = heads // k.shape[1], 1 / math.sqrt(q.shape[-1])
        if self.config.kv_lora_rank:
            scale *= (0.1 * math.log(4.0) + 1) ** 2  # YaRN's
        mixed = torch.zeros(length, heads, v.shape[-1], dtype=x.dtype)
        for at in range(length):
            first = 0 if self.config.sliding_window is None else max(0, at - self.config.sliding_window + 1)
            for one in range(heads):
                of = one // shared
                scores = k[first : at + 1, of] @ q[at, one] * scale
                mixed[at, one] = scores.softmax(0) @ v[first : at + 1, of]
        x = residual + self.linear(mixed.view(length, -1), f"{name}.self_attn.o_proj")
        y = self.norm(x, f"{name}.post_attention_layernorm")
        gate, up = self.linear(y, f"{name}.mlp.gate_proj"), self.linear(y, f"{name}.mlp.up_proj")
        return x + self.linear(gate * gate.sigmoid() * up, f"{name}.mlp.down_proj")

    def plain(self, name: str, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = (self.linear(x, f"{name}.{part}_proj").view(len(x), -1, self.config.head_dim) for part in "qkv")
        if self.config.qk_norm:
            q, k = self.norm(q, f"{name}.q_norm"), self.norm(k, f"{name}.k_norm")
        return self.turned(q), self.turned(k), v

    def latent(self, name: str, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Multi-head latent attention, whose turned columns lie in pairs."""
        heads, nope = self.config.num_attention_heads, self.config.qk_nope_head_dim
        q = self.linear(
            self.norm(self.linear(x, f"{name}.q_a_proj"), f"{name}.q_a_layernorm", 1e-6), f"{name}.q_b_proj"
        )
        q = q.view(len(x), heads, -1)
        held, turn = self.linear(x, f"{name}.kv_a_proj_with_mqa").split([6, 8], -1)
        both = self.linear(self.norm(held, f"{name}.kv_a_layernorm", 1e-6), f"{name}.kv_b_proj").view(len(x), heads, -1)

        def paired(y: Tensor) -> Tensor:
            return self.turned(torch.cat([y[..., 0::2], y[..., 1::2]], -1))

        k = torch.cat([both[..., :nope], paired(turn.unsqueeze(1)).expand(-1, heads, -1)], -1)
        return torch.cat([q[..., :nope], paired(q[..., nope:])], -1), k, both[..., nope:]

    def turned(self, x: Tensor) -> Tensor:
        half = x.shape[-1] // 2
        speeds = 10_000.0 ** -(torch.arange(half).double() / half)
        if self.config.kv_lora_rank:
            # YaRN: of 8 tokens the first column turns more than once, the last ones much less.
            place = half * math.log(8 / (2 * math.pi)) / math.log(10_000.0)
            slowed = (torch.arange(half).double() / math.ceil(place)).clamp(max=1)
            speeds = speeds * (1 - slowed) + speeds / 4.0 * slowed
        angles = torch.outer(torch.arange(len(x)).double(), speeds)
        turned = torch.complex(*x.split(half, -1)) * torch.polar(torch.ones_like(angles), angles).unsqueeze(1)
        return torch.cat([turned.real, turned.imag], -1)

    def norm(self, x: Tensor, name: str, eps: float | None = None) -> Tensor:
        square = x.square().mean(-1, keepdim=True) + (eps or self.config.rms_norm_eps)
        return x / square.sqrt() * self.weights[name + ".weight"]

    def linear(self, x: Tensor, name: str) -> Tensor:
        return x @ self.weights[name + ".weight"].T + self.weights.get(name + ".bias", 0)


# A tree as {path: chance of its last token given the ones before}.
Paths = dict[tuple[int, ...], float]
Scores = Callable[[tuple[int, ...]], Tensor]


def expanded(scores: Scores, depth: int, top_k: int, width: int, most: int) -> Paths:
    """The dynamic tree of EAGLE-2, written down from the paper: expand, then rank all and keep the best."""
    chances: Paths = {}
    sums = {(): 0.0}
    frontier: list[tuple[int, ...]] = [()]
    for _ in range(depth):
        proposed = []
        for path in frontier:
            logs = scores(path).log_softmax(-1)
            for token in sorted(range(VOCAB), key=lambda token: -float(logs[token]))[:top_k]:
                if logs[token] > -torch.inf:
                    child = (*path, token)
                    chances[child], sums[child] = math.exp(logs[token]), sums[path] + float(logs[token])
                    proposed.append(child)
        frontier = sorted(proposed, key=lambda path: -sums[path])[:width]
    return {path: chances[path] for path in sorted(chances, key=lambda path: -sums[path])[:most]}


def paths_of(draft: Draft, row: int) -> Paths:
    """The same of a draft."""
    assert draft.confidence is not None
    known: dict[int, tuple[int, ...]] = {0: ()}
    found: Paths = {}
    places = zip(draft.tokens[row].tolist(), draft.parents[row].tolist(), draft.confidence[row].tolist(), strict=True)
    for place, (token, parent, chance) in enumerate(places, 1):
        if parent >= 0:
            known[place] = (*known[parent], token)
            assert known[place] not in found
            found[known[place]] = chance
    return found


@dataclass
class Asked:
    """A question to a session and its answer."""

    context: Context
    limit: Limit
    draft: Draft
    tokens: int


@dataclass(frozen=True)
class Shadowed:
    """Notes what a drafter proposes, and proposes something that is partly right, so that rounds differ in length."""

    drafter: sg.Eagle
    instead: Any = None
    asked: list[Asked] = field(default_factory=list)
    requests: list[Request] = field(default_factory=list)
    alter: Callable[[Context], Context] = lambda context: context
    num_assistant_tokens: int | None = None

    def start(self, model: Any, request: Request) -> Any:
        self.requests.append(request)
        return Shadow(self, model, request)


class Shadow:
    def __init__(self, drafter: Shadowed, model: Any, request: Request) -> None:
        self.drafter = drafter
        self.session = drafter.drafter.start(model, replace(request, wants_confidence=True))
        self.instead = drafter.instead and drafter.instead.start(model, request)
        self.needs = self.session.needs

    def propose(self, context: Context, limit: Limit) -> Draft:
        draft = self.session.propose(self.drafter.alter(context), limit)
        kept = replace(context, ids=[list(ids) for ids in context.ids], last=None, hidden=None)
        self.drafter.asked.append(Asked(kept, limit, draft, int(self.session.head_tokens)))
        return draft if self.instead is None else self.instead.propose(context, limit)


@torch.no_grad()
def check_round(asked: Asked, drafter: sg.Eagle, model: Any, processors: LogitsProcessorList, missing: int = 0) -> None:
    """Compares what was drafted for every row with the reference."""
    for row, (ids, depth) in enumerate(zip(asked.context.ids, asked.limit.depth, strict=True)):
        reference = Reference(drafter.head, model, ids, missing)

        def scores(path: tuple[int, ...], clean: bool = False, row: int = row, reference: Any = reference) -> Tensor:
            prefix = torch.tensor([[*reference.ids, *path]])
            scored = processors(prefix, reference.logits(path)[None].float())
            noise = asked.context.noise
            if noise is None or clean:
                return scored[0]
            place = torch.tensor([[asked.context.positions[row] + len(path)]])
            return noise.rows([row]).at(place).perturb(scored[None])[0, 0]

        most = min(drafter.nodes, asked.limit.nodes)
        found = paths_of(asked.draft, row)
        if asked.limit.chain or drafter.top_k == 1:
            path: tuple[int, ...] = ()
            expected = {}
            for _ in range(min(depth, most)):
                child = (*path, int(scores(path).argmax()))
                expected[child] = float(scores(path, clean=True).softmax(-1)[child[-1]])
                path = child
        else:
            width = min(drafter.top_k, most // max(1, min(max(asked.limit.depth), most) - 1))
            expected = expanded(scores, depth, drafter.top_k, width, most)
        assert found.keys() == expected.keys()
        assert all(abs(found[path] - chance) < 1e-4 for path, chance in expected.items())


@SHAPES
@pytest.mark.parametrize("mode", ["greedy", "sampled"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_drafts_are_those_of_a_reference_that_computes_everything_anew(variant, mode, shape):
    model, prompt = target(), Prompt(((61,), *Prompt.random((11, 18), (3, 13)).rows))
    kwargs = {**({"do_sample": False} if mode == "greedy" else HOT), "max_new_tokens": 10, "num_assistant_tokens": 3}
    processors = LogitsProcessorList()
    if mode == "sampled":
        processors = LogitsProcessorList([RepetitionPenaltyLogitsProcessor(1.3), TemperatureLogitsWarper(3.0)])
    longer = {**kwargs, "max_new_tokens": 16, "assistant": sg.Plain()}
    truth = tiny.texts(prompt, model.generate(**prompt.inputs(), **longer))
    drafter = sg.Eagle(head_of(variant), top_k=4 if shape == "tree" else 1, nodes=5 if "3" in variant else 9)
    shadow = Shadowed(drafter, Scripted(truth, shape, spoiled=0.4))
    rows, stats = assisted(model, prompt, shadow, **kwargs)
    assert rows == [list(text[len(ids) : len(ids) + 10]) for ids, text in zip(prompt.rows, truth, strict=True)]
    assert 0 < stats.accepted < stats.drafted
    assert len(shadow.asked) > 3
    for asked in shadow.asked:
        check_round(asked, drafter, model, processors)


# Targets that do something to what their LM head says


@functools.cache
def multiplied() -> Any:
    """A Granite, which multiplies its embeddings and divides what its LM head says."""
    with torch.random.fork_rng():
        torch.manual_seed(5)
        config = GraniteConfig(**tiny._sizes(num_hidden_layers=4), logits_scaling=4.0, embedding_multiplier=3.0)
        return sg.enable(tiny.sharpen(GraniteForCausalLM(config)))


@SHAPES
@pytest.mark.parametrize("variant", ["eagle", "eagle3-residual"])
def test_a_borrowed_lm_head_is_read_as_the_target_reads_it_for_a_head_that_makes_its_states(variant, shape):
    prompt = Prompt.random((11, 18), (3, 13))
    head = head_of(variant)
    shadow = Shadowed(sg.Eagle(head, top_k=4 if shape == "tree" else 1, nodes=9))
    kwargs = {"do_sample": True, "temperature": 3.0, "top_k": 0, "seed": 3, "num_assistant_tokens": 3}
    rows, _ = assisted(multiplied(), prompt, shadow, **kwargs)
    assert rows == assisted(multiplied(), prompt, sg.Plain(), **kwargs)[0]
    assert len(shadow.asked) > 3
    for asked in shadow.asked:
        check_round(asked, shadow.drafter, multiplied(), LogitsProcessorList([TemperatureLogitsWarper(3.0)]))


FINISHED: dict[str, dict[str, float]] = {
    "cohere": {"logit_scale": 0.25},
    "falcon_h1": {"lm_head_multiplier": 0.5},
    "gemma2": {"final_logit_softcapping": 3.0},
    "granite": {"logits_scaling": 8.0},
    "hyperclovax": {"logits_scaling": 8.0},
    "inkling_text": {"logits_mup_width_multiplier": 2.0},
    "minicpm3": {"dim_model_base": 8},
    "mpt": {"logit_scale": 0.25},
    "recurrent_gemma": {"logits_soft_cap": 3.0},
    "xlstm": {"output_logit_soft_cap": 3.0},
}


@torch.no_grad()
def finished(model: Any) -> tuple[Tensor, Tensor, Tensor]:
    """What its LM head says of the last states, what `target_logits` makes of it, and the logits it returns."""
    out = model(torch.tensor([[5, 6, 7, 8, 9, 10]]), output_hidden_states=True)
    lm_head = model.get_output_embeddings()
    said = lm_head(out.hidden_states[-1].to(lm_head.weight.dtype))
    return said, target_logits(said, model.config.get_text_config(decoder=True)), out.logits


@pytest.mark.parametrize("family", FINISHED)
def test_logits_are_finished_as_the_family_does(family):
    made, known = families._causal(family)
    for name, value in FINISHED[family].items():
        setattr(known, name, value)
    with torch.random.fork_rng():
        torch.manual_seed(1)
        said, ours, theirs = finished(families.sharpen(made(known), family))
    assert torch.allclose(ours, theirs.to(ours.dtype), rtol=1e-3, atol=1e-3)
    assert family == "mpt" or not torch.allclose(said, theirs.to(said.dtype), rtol=1e-2, atol=1e-2)


# Encoders, whose LM head is more than one matrix, and what shows other states than its LM head reads.
UNLIKE = {
    *("bert", "big_bird", "camembert", "data2vec-text", "electra", "ernie", "megatron-bert", "reformer", "rembert"),
    *("roberta", "roberta-prelayernorm", "roc_bert", "roformer", "xlm-roberta", "xlm-roberta-xl", "xmod"),
    *("gemma3n_text", "modernbert-decoder", "prophetnet"),
}


@pytest.mark.slow
@pytest.mark.parametrize("family", [name for name in families.CAUSAL if name not in UNLIKE])
def test_no_family_finishes_logits_in_a_way_that_is_not_known(family):
    try:
        model = families.build(f"{family}-causal" if family in families.SEQ2SEQ else family)
    except families.NotBuiltError as error:
        pytest.skip(f"no tiny model: {error}")
    _, ours, theirs = finished(model)
    assert torch.allclose(ours, theirs.to(ours.dtype), rtol=1e-3, atol=1e-3)


# Heads that are never wrong

WIDE, REST = 16, 4
SIZE = 2 * WIDE + REST
A, B, C = slice(0, WIDE), slice(WIDE, 2 * WIDE), slice(2 * WIDE, SIZE)
# So sharp that attention looks at one place only.
SHARP = 30.0


def looks(attention: Any, head: int, ones: slice, back: int) -> None:
    """Has a head of an attention look `back` places back, by its rotary turns, if the columns `ones` hold 1."""
    angles = back * 10_000.0 ** -(torch.arange(WIDE // 2) / (WIDE // 2))
    rows, half = slice(head * WIDE, (head + 1) * WIDE), WIDE // 2
    attention.q_proj.weight[rows] = attention.k_proj.weight[rows] = 0
    attention.q_proj.weight[rows][:half, ones] = SHARP / REST
    attention.k_proj.weight[rows][:half, ones] = SHARP / REST * angles.cos().double().unsqueeze(1)
    attention.k_proj.weight[rows][half:, ones] = SHARP / REST * angles.sin().double().unsqueeze(1)


def carries(attention: Any, head: int, read: slice, add: slice | None, take: slice | None) -> None:
    """Has it add what it reads there to one part of the state, and take it from another."""
    rows, one = slice(head * WIDE, (head + 1) * WIDE), torch.eye(WIDE, dtype=torch.float64)
    attention.v_proj.weight[rows, read] = one
    for part, sign in ((add, 1), (take, -1)):
        if part is not None:
            attention.o_proj.weight[part, rows] = sign * one


@functools.cache
def remembering() -> Any:
    """A target whose next token depends on the last two, by parts that change places from layer to layer.

    States are `[A, B, 1]`: after the embedding A is the token and B nothing; then A is the token before and B the
    token, and each further layer swaps the two. Norms change nothing.
    """
    sizes = tiny._sizes(hidden_size=SIZE, intermediate_size=4, num_hidden_layers=4, num_attention_heads=2)
    model = LlamaForCausalLM(LlamaConfig(**sizes, head_dim=WIDE, rms_norm_eps=1e-12)).double().eval()
    generator = torch.Generator().manual_seed(4)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            weight.fill_(1.0 if "norm" in name else 0.0)
        words = torch.randn(VOCAB, WIDE, generator=generator, dtype=torch.float64)
        table = model.get_input_embeddings().weight
        table[:, A], table[:, C] = words / words.square().mean(-1, keepdim=True).sqrt(), 1.0
        model.model.layers[0].input_layernorm.weight.fill_(math.sqrt((WIDE + REST) / SIZE))
        for i, layer in enumerate(model.model.layers):
            looks(layer.self_attn, 0, C, back=int(i == 0))
            looks(layer.self_attn, 1, C, back=0)
            carries(layer.self_attn, 0, A if i == 0 else B, A, None if i == 0 else B)
            carries(layer.self_attn, 1, A, B, A)
        model.lm_head.weight.copy_(4 * torch.randn(VOCAB, SIZE, generator=generator))
        model.lm_head.weight[:, B] *= 2  # so that it cannot do without the token before
    return sg.enable(model)


def moving_parts(method: str, layers: Sequence[int] | None = None) -> EagleHead:
    """A head that makes the state of that target from the embedding and the feature alone."""
    known = {"eagle": [-1], "eagle3": [1, 2, 3]}[method]
    sizes = {"hidden_size": SIZE, "intermediate_size": 4, "num_attention_heads": 3, "num_key_value_heads": 3}
    head = EagleHead(
        config(**sizes, method=method, head_dim=WIDE, feature_layers=list(layers or known), rms_norm_eps=1e-12)
    )
    one = torch.eye(SIZE, dtype=torch.float64)
    head = head.double().eval()
    with torch.no_grad():
        for name, weight in head.named_parameters():
            weight.fill_(1.0 if "norm" in name else 0.0)
        if method == "eagle":
            head.fc.weight[A, A], head.fc.weight[C, C] = one[A, A], one[C, C]
            head.fc.weight[B, SIZE : SIZE + WIDE] = one[A, A]
            return head
        first: Any = head.layers[0]
        head.fc.weight[:, SIZE : 2 * SIZE] = one  # of the three the second, in which A is the token
        first.input_layernorm.weight.fill_(math.sqrt((WIDE + REST) / SIZE))
        for i in range(3):
            looks(first.self_attn, i, slice(SIZE + C.start, SIZE + C.stop), back=0)
        carries(first.self_attn, 0, A, A, None)
        carries(first.self_attn, 1, slice(SIZE, SIZE + WIDE), B, A)
        carries(first.self_attn, 2, slice(SIZE + WIDE, SIZE + 2 * WIDE), None, B)
    return head


WINDOW = 4


@functools.cache
def windowed() -> Any:
    model = tiny.mistral(window=WINDOW)
    with torch.no_grad():
        model.lm_head.weight.mul_(6)  # so that the likeliest path is one of the best nodes
    return sg.enable(model)


@functools.cache
def copied() -> EagleHead:
    """A head that is the windowed target over again, and makes nothing of its states.

    It has no entry for the first token, which a token seven places on no longer sees through two layers.
    """
    model = windowed()
    flags = dict.fromkeys(["first_layernorm", "final_norm"], True)
    shape = {"num_hidden_layers": 2, "sliding_window": WINDOW, "rms_norm_eps": model.config.rms_norm_eps}
    head = EagleHead(config(method="eagle", **shape, **flags)).double().eval()
    one = torch.eye(32, dtype=torch.float64)
    weights = {key.removeprefix("model."): weight for key, weight in model.state_dict().items() if "embed" not in key}
    weights["fc.weight"] = torch.cat([one, torch.zeros_like(one)], 1)
    del weights["lm_head.weight"]
    head.load_state_dict(weights)
    return head


PERFECT: dict[str, tuple[Callable[[], Any], Callable[[], EagleHead]]] = {
    "eagle": (remembering, lambda: moving_parts("eagle")),
    "eagle3": (remembering, lambda: moving_parts("eagle3")),
    "copied": (windowed, copied),
}
LONG = {"one": Prompt.random((14, 9)), "ragged": Prompt.random((9, 1), (21, 2), (13, 3))}
DEPTH, ROUNDS, WORSE = 5, 4, 6
WARM = {"do_sample": True, "temperature": 1.2, "top_k": 0, "seed": 3}


def rounds(model: Any, prompt: Prompt, drafter: Any, shape: str = "chain", **changed: Any) -> int:
    """How many rounds it takes to say what `ROUNDS` rounds say at the least."""
    kwargs = {"do_sample": False, "max_new_tokens": 1 + ROUNDS * (DEPTH + 1), "num_assistant_tokens": DEPTH, **changed}
    if isinstance(drafter, EagleHead):
        drafter = sg.Eagle(drafter, top_k=3 if shape == "tree" else 1, nodes=20)
    rows, stats = assisted(model, prompt, drafter, **kwargs)
    assert rows == assisted(model, prompt, sg.Plain(), **kwargs)[0]
    assert all(len(set(row)) > 8 for row in rows), "a text that repeats itself hides errors"
    return stats.rounds


@SHAPES
@pytest.mark.parametrize("mode", ["greedy", "sampled"])
@pytest.mark.parametrize("rows", LONG)
@pytest.mark.parametrize("name", PERFECT)
def test_a_perfect_head_is_right_to_full_depth_every_round(name, rows, mode, shape):
    model, head = PERFECT[name]
    assert rounds(model(), LONG[rows], head(), shape, **(WARM if mode == "sampled" else {})) == ROUNDS


@SHAPES
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_what_a_draft_is_taken_back_to_stays_when_the_buffers_slide(seed, shape):
    """They do in the middle of a draft, 64 slots on. A head that sees few tokens is the more hurt by one it lacks."""
    model, prompt = windowed(), Prompt.random((12, seed))
    truth = tiny.truth_of(model, prompt, "greedy", 80)
    shadow = Shadowed(sg.Eagle(copied(), top_k=3 if shape == "tree" else 1, nodes=20), Scripted(truth, spoiled=0.6))
    assisted(model, prompt, shadow, max_new_tokens=72, num_assistant_tokens=DEPTH)
    for asked in shadow.asked:
        ids, path = len(asked.context.ids[0]), tuple(truth[0][len(asked.context.ids[0]) :][: asked.limit.depth[0]])
        assert path in paths_of(asked.draft, 0), ids


@SHAPES
@pytest.mark.parametrize("method", ["eagle", "eagle3"])
def test_with_the_layer_beside_it_the_head_is_wrong(method, shape):
    for layers in {"eagle": [[-2]], "eagle3": [[0, 1, 2], [2, 3, -1]]}[method]:
        assert rounds(remembering(), LONG["one"], moving_parts(method, layers), shape) >= WORSE


@SHAPES
@pytest.mark.parametrize("name", PERFECT)
def test_with_the_token_before_the_head_is_wrong(name, shape):
    model, head = PERFECT[name]
    drafter = sg.Eagle(head(), top_k=3 if shape == "tree" else 1, nodes=20)
    earlier = Shadowed(drafter, alter=lambda context: replace(context, ids=[ids[:-1] for ids in context.ids]))
    assert rounds(model(), LONG["one"], earlier) >= WORSE


@SHAPES
@pytest.mark.parametrize("name", ["eagle", "eagle3"])
def test_with_the_state_before_the_head_is_wrong(name, shape):
    model, head = PERFECT[name]
    drafter = sg.Eagle(head(), top_k=3 if shape == "tree" else 1, nodes=20)

    def late(context: Context) -> Context:
        return replace(context, hidden=[states.roll(1, 0) for states in context.hidden or ()])

    assert rounds(model(), LONG["one"], Shadowed(drafter, alter=late)) >= WORSE


@SHAPES
def test_at_the_position_beside_it_the_head_is_wrong(shape, monkeypatch):
    stock = EagleSession._pass

    def beside(self, cache, ids, features, draft, depth):
        return stock(self, cache, ids, features, draft, depth + (draft.is_chain and draft.nodes > 0))

    monkeypatch.setattr(EagleSession, "_pass", beside)
    assert rounds(windowed(), LONG["one"], copied(), shape) >= WORSE


# The head's own passes


@contextlib.contextmanager
def fed(head: EagleHead):
    """The places, padding included, of every pass of a head."""
    widths: list[int] = []
    handle = head.register_forward_pre_hook(lambda module, args: widths.append(args[1].shape[0] * args[1].shape[1]))
    try:
        yield widths
    finally:
        handle.remove()


@pytest.mark.parametrize(("top_k", "nodes"), [(1, 60), (3, 7), (10, 60)])
@pytest.mark.parametrize("rows", ["one", "ragged"])
def test_no_more_is_fed_than_was_decided_and_drafted(rows, top_k, nodes):
    model, prompt = target(), {"one": ONE, "ragged": RAGGED}[rows]
    truth = tiny.truth_of(model, prompt, "greedy", 40)
    for instead in (None, Scripted(truth)):  # with its own drafts, and where now and then much is accepted at once
        shadow = Shadowed(sg.Eagle(head_of("eagle"), top_k=top_k, nodes=nodes), instead)
        with fed(shadow.drafter.head) as widths:
            assisted(model, prompt, shadow, max_new_tokens=24, num_assistant_tokens=5)
        drafted = 0
        for asked in shadow.asked:
            decided = sum(len(ids) - 1 for ids in asked.context.ids)
            drafted += int((asked.draft.parents >= 0).sum())
            assert decided < asked.tokens <= decided + drafted
            assert asked.draft.nodes <= nodes
        if prompt.batch == 1:
            assert sum(widths) == shadow.asked[-1].tokens
        # One pass for what was decided, and one for each level but the last.
        assert len(widths) == sum(max(asked.limit.depth) for asked in shadow.asked if max(asked.limit.depth))


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize(
    "variant", [*VARIANTS, "eagle-first-norm", *(f"eagle3-narrow-{window}" for window in (1, 2, 3))]
)
def test_where_only_the_last_entry_is_asked_about_it_says_the_same_and_caches_the_same(variant, padded):
    """Others of a single layer leave keys and values alone, and are not attended from."""
    narrow = {f"eagle3-narrow-{window}": {"sliding_window": window} for window in (1, 2, 3)}
    more = {**narrow, "eagle-first-norm": {"method": "eagle", "first_layernorm": True}}
    head = head_of(variant) if variant in VARIANTS else filled(EagleHead(config(**more[variant])))
    embeds, features = torch.randn(2, 2, 9, head.config.hidden_size, dtype=torch.float64)
    padding = torch.tensor([[4], [0]]) if padded else torch.tensor([[0], [0]])
    places = torch.arange(9) - padding
    wide: list[int] = []
    seen: list[int] = []
    hooks = [
        layer.mlp.register_forward_pre_hook(lambda module, args: wide.append(args[0].shape[1])) for layer in head.layers
    ]
    hooks.append(head.layers[0].self_attn.register_forward_hook(lambda *args: seen.append(args[2][0].shape[1])))
    told, caches = [], [new_cache(head.config), new_cache(head.config)]
    with torch.no_grad():
        for cache, last_only in zip(caches, (False, True), strict=True):
            mask = (places >= 0).long() if padded else None
            told.append(head(embeds, features, places.clamp(min=0), mask, cache, last_only=last_only))
    for hook in hooks:
        hook.remove()
    for full, last in zip(*told, strict=True):
        torch.testing.assert_close(last, full[:, -1:], rtol=1e-12, atol=1e-12)
    for full, last in zip(*(cache.layers for cache in caches), strict=True):
        torch.testing.assert_close((last.keys, last.values), (full.keys, full.values), rtol=1e-12, atol=1e-12)
    layers = len(head.layers)
    assert sum(seen) == 18, "hooks, of whoever wraps or offloads the attention, run for all entries"
    assert wide == [9] * layers + (
        [9] * layers if layers > 1 or variant in ("eagle3-latent", "eagle3-narrow-1") else [1]
    )


def test_every_text_and_shape_is_that_of_plain_decoding():
    """Report 4, for heads that are sometimes right."""
    head = copy.deepcopy(copied())
    with torch.no_grad():
        for weight in head.layers.parameters():
            weight.add_(0.2 * weight.std() * torch.randn(weight.shape, generator=torch.Generator().manual_seed(1)))
    for mode in ("greedy", "hash-sampled", "penalties-sampled"):
        truth = tiny.truth_of(windowed(), LONG["ragged"], mode, 24)
        for branches in (1, 2, 3):
            stats = sg.Stats()
            kwargs = {"assistant": sg.Eagle(head, top_k=branches), "max_new_tokens": 24, "stats": stats}
            assert tiny.run(windowed(), LONG["ragged"], mode, **kwargs, num_assistant_tokens=4) == truth
            assert 0 < stats.accepted < stats.drafted


@pytest.mark.parametrize("variant", ["eagle", "eagle3"])
def test_q_is_what_the_draft_was_drawn_from(variant):
    """In float32, after the processors, and in chains whatever `top_k` is."""
    model, prompt = target(), Prompt.random((6, 1), (3, 2))
    shadow = Shadowed(sg.Eagle(head_of(variant)))
    assisted(model, prompt, shadow, **HOT, acceptance="rejection", max_new_tokens=6, num_assistant_tokens=3)
    processors = LogitsProcessorList([RepetitionPenaltyLogitsProcessor(1.3), TemperatureLogitsWarper(3.0)])
    assert shadow.requests[0].wants_probs
    for asked in shadow.asked:
        check_round(asked, shadow.drafter, model, processors)
        assert asked.draft.probs.dtype == torch.float32
        for row, ids in enumerate(asked.context.ids):
            with torch.no_grad():
                reference = Reference(shadow.drafter.head, model, ids)
                for place in range(asked.limit.depth[row]):
                    path = tuple(asked.draft.tokens[row, :place].tolist())
                    scores = processors(torch.tensor([[*ids, *path]]), reference.logits(path)[None].float())[0]
                    torch.testing.assert_close(asked.draft.probs[row, place], scores.softmax(-1), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("acceptance", ["rejection", "block"])
@pytest.mark.slow
def test_with_other_accept_rules_the_distribution_is_the_target_s(acceptance):
    assert tiny.misfit(target(), sg.Eagle(head_of("eagle3")), acceptance) < tiny.FITS


# States that nobody has seen


def check_behind(shadow: Shadowed, model: Any, ids: Sequence[int], missing: int) -> None:
    for asked in shadow.asked:
        whole = asked.context.ids[0]
        whole = whole if list(whole[: len(ids)]) == list(ids) else [*ids, *whole]
        asked.context = replace(asked.context, ids=[whole])
        check_round(asked, shadow.drafter, model, LogitsProcessorList(), missing)
    assert len(shadow.asked) > 2


@SHAPES
@pytest.mark.parametrize("variant", ["eagle", "eagle3"])
def test_behind_a_prompt_read_in_chunks_the_head_starts_with_the_last(variant, shape):
    model, ids = target(), list(ONE.rows[0])
    shadow = Shadowed(sg.Eagle(head_of(variant), top_k=3 if shape == "tree" else 1, nodes=8))
    kwargs = {"max_new_tokens": 6, "num_assistant_tokens": 3, "prefill_chunk_size": 5}
    rows, _ = assisted(model, ONE, shadow, **kwargs)
    assert rows == assisted(model, ONE, sg.Plain(), **kwargs)[0]
    check_behind(shadow, model, ids, missing=10)


def test_behind_a_continued_cache_the_head_starts_with_what_is_new():
    model, ids, held = target(), list(ONE.rows[0]), 8
    for given in ("all", "new"):
        cache = DynamicCache(config=model.config)
        with torch.no_grad():
            model(torch.tensor([ids[:held]]), cache=cache)
        shadow = Shadowed(sg.Eagle(head_of("eagle3"), nodes=8))
        inputs = {"input_ids": torch.tensor([ids if given == "all" else ids[held:]])}
        inputs["attention_mask"] = torch.ones((1, len(ids)), dtype=torch.long)
        kwargs = {"max_new_tokens": 6, "num_assistant_tokens": 3, "do_sample": False}
        out = model.generate(**inputs, cache=cache, assistant=shadow, **kwargs)
        assert out[0, -6:].tolist() == assisted(model, ONE, sg.Plain(), **kwargs)[0][0]
        for asked in shadow.asked:
            if given == "new":
                asked.context = replace(asked.context, ids=[[*ids[:held], *asked.context.ids[0]]])
        check_behind(shadow, model, ids, missing=held)


def test_behind_embeddings_the_head_starts_with_the_first_id():
    model, ids = target(), list(ONE.rows[0])
    shadow = Shadowed(sg.Eagle(head_of("eagle"), nodes=8))
    embeds = model.get_input_embeddings()(torch.tensor([ids])).detach()
    kwargs = {"max_new_tokens": 6, "num_assistant_tokens": 3, "do_sample": False}
    out = model.generate(inputs_embeds=embeds, assistant=shadow, **kwargs)
    assert out[0].tolist() == assisted(model, ONE, sg.Plain(), **kwargs)[0][0]
    check_behind(shadow, model, ids, missing=len(ids) - 1)


@SHAPES
def test_a_row_that_was_not_asked_for_goes_on_later_as_if_it_had_been(shape):
    """Depths of 0 come and go; the states of that time are not lost."""
    model, prompt = target(), Prompt.random((5, 1), (9, 2), (3, 3))
    rows = tiny.truth_of(model, prompt, "greedy", 12)
    drafter = sg.Eagle(head_of("eagle3"), top_k=3 if shape == "tree" else 1, nodes=8)
    session = drafter.start(model, Request(batch=3))
    lengths, seen = [len(ids) + 1 for ids in prompt.rows], [0, 0, 0]
    with torch.no_grad():
        passes = [model(torch.tensor([ids]), output_hidden_states=True).hidden_states for ids in rows]
    states = [torch.cat([held[layer][0] for layer in session.needs.hidden_layers], -1) for held in passes]
    for depth in ((0, 0, 0), (2, 0, 0), (0, 3, 0), (3, 1, 2), (0, 0, 2), (2, 3, 3)):
        ids = [list(row[:length]) for row, length in zip(rows, lengths, strict=True)]
        hidden = [held[old : length - 1] for held, old, length in zip(states, seen, lengths, strict=True)]
        seen = [length - 1 for length in lengths]
        limit = Limit(depth, nodes=8, chain=False)
        with torch.no_grad():
            draft = session.propose(Context(ids, lengths, hidden=hidden), limit)
        if max(depth):
            check_round(Asked(Context(ids, lengths), limit, draft, 0), drafter, model, LogitsProcessorList())
        else:
            assert draft.nodes == 0
        lengths = [length + gained for length, gained in zip(lengths, (1, 2, 1), strict=True)]


# What is not written


def state_of(head: EagleHead) -> Any:
    flags = [module.training for module in head.modules()]
    tensors = [(name, id(held), held.data_ptr()) for name, held in [*head.named_parameters(), *head.named_buffers()]]
    return flags, tensors, head.config.to_dict(), head.config._attn_implementation


@SHAPES
@pytest.mark.parametrize("training", [False, True])
def test_the_head_stays_as_it_is_and_drafts_in_eval_mode(training, shape):
    model = target()
    head = filled(EagleHead(config(attention_dropout=0.5))).train(training)
    before, drafter = state_of(head), sg.Eagle(head, top_k=3 if shape == "tree" else 1, nodes=8)
    shadow = Shadowed(drafter)
    assisted(model, ONE, shadow, max_new_tokens=6, num_assistant_tokens=3)
    assert state_of(head) == before
    for asked in shadow.asked:
        check_round(asked, drafter, model, LogitsProcessorList())


def test_the_head_attends_as_an_enabled_target_does_and_shares_its_weights():
    head, model = head_of("eagle3"), tiny.llama(num_hidden_layers=4)
    assert sg.Eagle(head).start(model, Request(batch=1)).head is head
    view = sg.Eagle(head).start(sg.enable(model), Request(batch=1)).head
    assert view.config._attn_implementation == "hf_specgen" != head.config._attn_implementation
    assert {name: held.data_ptr() for name, held in view.state_dict().items()} == {
        name: held.data_ptr() for name, held in head.state_dict().items()
    }


FAR = 4000


def turns(head: EagleHead, positions: Sequence[int]) -> Tensor:
    """What it turns by, computed in float32."""
    return torch.stack(head.rotary_emb(torch.zeros(1), torch.tensor([positions])))


def through_disk(model: Any, folder: Any, door: str) -> EagleHead:
    EagleHead.fresh(model, "eagle").to(torch.float16).save_pretrained(folder)
    if door == "from_pretrained":
        return EagleHead.from_pretrained(folder, dtype=torch.bfloat16)
    return sg.load_assistant(folder, model).head


@pytest.mark.parametrize("door", ["to", "half", "fresh", "from_pretrained", "load_assistant"])
def test_far_tokens_are_turned_as_exactly_in_half_precision(door, tmp_path):
    """Frequencies rounded to bfloat16 are off by a radian at this distance."""
    head = EagleHead(config(method="eagle"))
    if door in ("to", "half"):
        head = head.to(torch.bfloat16) if door == "to" else head.half().float().bfloat16().to("cpu")
    else:
        model = tiny.llama(num_hidden_layers=4).to(torch.bfloat16)
        head = EagleHead.fresh(model, "eagle") if door == "fresh" else through_disk(model, tmp_path, door)
    assert head.dtype == torch.bfloat16
    angles = FAR * 10_000.0 ** -(torch.arange(4).double() / 4).repeat(2)
    assert torch.allclose(turns(head, [FAR])[:, 0, 0].double(), torch.stack([angles.cos(), angles.sin()]), atol=1e-3)


MOVING: dict[str, dict[str, Any]] = {
    "dynamic": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4},
    "longrope": {
        "rope_type": "longrope",
        "rope_theta": 1e4,
        "short_factor": [1.0] * 4,
        "long_factor": [3.0] * 4,
        "original_max_position_embeddings": 24,
        "factor": 4.0,
    },
}


@pytest.mark.parametrize("kind", MOVING)
def test_frequencies_that_move_with_the_text_are_not_kept_on_the_head(kind):
    longest = 24 if kind == "dynamic" else 96
    head = filled(EagleHead(config(rope_parameters=MOVING[kind], max_position_embeddings=longest)))

    def kept() -> Any:
        rotary = head.rotary_emb
        return state_of(head), [held.tolist() for held in rotary.buffers()], sorted(vars(rotary))

    def stock(positions: Sequence[int]) -> Tensor:
        rotary = LlamaRotaryEmbedding(head.config)
        return torch.stack(rotary(torch.zeros(1), torch.tensor([positions])))

    before = kept()
    near, far = range(8), range(20, 40)
    wanted = [stock(near), stock(far)]
    assert not torch.equal(turns(head, range(40))[:, :, :8], wanted[0])  # turned as the last one is

    def work(thread: int) -> None:
        for _ in range(20):
            assert torch.equal(turns(head, (near, far)[thread]), wanted[thread])

    tiny.in_two_threads(work)
    rows, _ = assisted(target(), ONE, sg.Eagle(head), max_new_tokens=40, num_assistant_tokens=3)
    assert rows == assisted(target(), ONE, sg.Plain(), max_new_tokens=40)[0]
    assert kept() == before


def test_two_threads_share_a_head():
    model, prompts = windowed(), list(LONG.values())
    wanted = [tiny.truth_of(model, prompt, "greedy", 24) for prompt in prompts]
    drafter, found = sg.Eagle(copied(), nodes=12), [[], []]

    def work(thread: int) -> None:
        for _ in range(3):
            stats = sg.Stats()
            kwargs = {"assistant": drafter, "max_new_tokens": 24, "num_assistant_tokens": 4, "stats": stats}
            assert tiny.run(model, prompts[thread], **kwargs) == wanted[thread]
            found[thread].append((stats.drafted, stats.accepted, stats.rounds))

    tiny.in_two_threads(work)
    assert [len(set(counts)) for counts in found] == [1, 1]


@SHAPES
@pytest.mark.parametrize("variant", ["eagle", "eagle3"])
def test_a_head_on_another_device(variant, shape):
    """Ids, states and embeddings go to it, states for the LM head it borrows come back, and nothing else meets."""
    model, head = target(), copy.deepcopy(head_of(variant))
    drafter = sg.Eagle(head, top_k=3 if shape == "tree" else 1, nodes=8)
    kwargs = {**HOT, "max_new_tokens": 10, "num_assistant_tokens": 3}
    expected, near = assisted(model, RAGGED, drafter, **kwargs)
    send_away(head)
    with TwoDevices():
        assert (head.device, model.device) == (AWAY, HERE)
        rows, far = assisted(model, RAGGED, drafter, **kwargs)
    assert rows == expected
    assert (near.drafted, near.accepted, near.rounds) == (far.drafted, far.accepted, far.rounds)


@SHAPES
@pytest.mark.parametrize("variant", ["eagle", "eagle3", "eagle3-other-size"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_head_in_another_dtype_than_its_target(dtype, variant, shape):
    """States and embeddings come to it in its own, and what an LM head of the target's reads is in the target's."""
    model, head = target(), copy.deepcopy(head_of(variant)).to(dtype)
    shadow = Shadowed(sg.Eagle(head, top_k=3 if shape == "tree" else 1, nodes=8))
    rows, _ = assisted(model, RAGGED, shadow, max_new_tokens=10, num_assistant_tokens=3)
    assert rows == assisted(model, RAGGED, sg.Plain(), max_new_tokens=10)[0]
    assert any(asked.draft.nodes for asked in shadow.asked)
    if dtype == torch.float32:
        for asked in shadow.asked:
            check_round(asked, replace(shadow.drafter, head=head_of(variant)), model, LogitsProcessorList())


@SHAPES
@pytest.mark.parametrize("variant", ["eagle", "eagle3"])
def test_an_offloaded_head_drafts_as_it_does_elsewhere(variant, shape):
    head = copy.deepcopy(head_of(variant))
    drafter = sg.Eagle(head, top_k=3 if shape == "tree" else 1, nodes=8)
    rows, near = assisted(target(), RAGGED, drafter, max_new_tokens=10, num_assistant_tokens=3)
    accelerate.cpu_offload(head)
    assert {weight.device.type for weight in head.parameters()} == {"meta"}
    again, far = assisted(target(), RAGGED, drafter, max_new_tokens=10, num_assistant_tokens=3)
    assert again == rows
    assert (near.drafted, near.accepted) == (far.drafted, far.accepted)


@pytest.mark.parametrize("top_k", [1, 4])
def test_a_chain_has_no_more_nodes_than_a_tree_may_have(top_k):
    kwargs = {"max_new_tokens": 10, "num_assistant_tokens": 5}
    shadow = Shadowed(sg.Eagle(head_of("eagle"), top_k=top_k, nodes=2))
    # A tree for a target that takes none, or a chain for one that does.
    assisted(target(), RAGGED, shadow, **kwargs, **({"cache_implementation": "static"} if top_k > 1 else {}))
    assert all(asked.draft.is_chain for asked in shadow.asked)
    assert max(asked.draft.nodes for asked in shadow.asked) == 2


@SHAPES
@pytest.mark.parametrize("positions", [5, 17, 20, 64])
def test_rows_that_outgrow_the_head_are_decoded_plainly(positions, shape, caplog):
    """Reports 109 and 110, of a head."""
    prompt = Prompt.random((4, 1), (16, 2))
    head = filled(EagleHead(config(max_position_embeddings=positions)))
    shadow = Shadowed(sg.Eagle(head, top_k=3 if shape == "tree" else 1, nodes=8))
    with caplog.at_level(logging.WARNING, logger="hf_specgen"):
        rows, _ = assisted(target(), prompt, shadow, max_new_tokens=10, num_assistant_tokens=3)
    assert rows == assisted(target(), prompt, sg.Plain(), max_new_tokens=10)[0]
    assert len(caplog.records) == (positions < 26)
    for asked in shadow.asked:
        if asked.draft.nodes:
            for row, ids in enumerate(asked.context.ids):
                deepest, reach = (
                    int(asked.draft.tree.depth[row].max()),
                    min(asked.limit.depth[row], positions - len(ids)),
                )
                assert deepest <= max(0, reach)
                assert (deepest > 0) == (reach > 0)


# Refusals


def no_passes(monkeypatch: pytest.MonkeyPatch, *modules: Any) -> None:
    for module in modules:
        monkeypatch.setattr(module, "forward", lambda *_, **__: pytest.fail("a forward pass was made"))


REFUSED: dict[str, tuple[Callable[[], EagleHead], str]] = {
    "states": (lambda: filled(EagleHead(config(hidden_size=16))), "hidden_size=32 .* made for 16"),
    "vocabulary": (lambda: filled(EagleHead(config(vocab_size=104))), "vocab_size=96 .* made for 104"),
    "layers": (lambda: filled(EagleHead(config(feature_layers=[1, 2, 4]))), r"hidden_states \(1, 2, 4\).* 4 layers"),
    "record": (
        lambda: filled(EagleHead(config(target={"name": "another", "num_layers": 6}))),
        "num_layers=6; LlamaForCausalLM .* num_layers=4",
    ),
    "borrowed": (
        lambda: filled(EagleHead(config(hidden_size=16, target_hidden_size=32))),
        "no embeddings of its own, .* of 32 and not of 16",
    ),
    "meta": (lambda: EagleHead(config()).to("meta"), "meta device"),
    "unloaded": (lambda: EagleHead(config()), "never loaded: fc.weight, layers.0"),
    "offsets": (lambda: mapped_to(VOCAB, VOCAB + 1), "d2t, .* leads to ids from 96 to 97, .*never loaded"),
    "offsets not loaded": (lambda: mapped_to(*[-(2**40)] * 2), "d2t, .* never loaded"),
    "twice the same": (lambda: mapped_to(7, 7), "d2t, .* to an id more than once"),
    "flash": (lambda: flashing(), "takes no mask of a tree"),
}


def mapped_to(*ids: int) -> EagleHead:
    head = filled(EagleHead(config(own_lm_head=True, draft_vocab_size=len(ids))))
    head.d2t.copy_(torch.tensor(ids) - torch.arange(len(ids)))
    return head


def flashing() -> EagleHead:
    head = filled(EagleHead(config()))
    head.config._attn_implementation_internal = "flash_attention_2"
    return head


@pytest.mark.parametrize("what", REFUSED)
def test_what_does_not_fit_is_refused_before_the_first_pass(what, monkeypatch):
    make, message = REFUSED[what]
    model, head = tiny.llama(num_hidden_layers=4), make()
    no_passes(monkeypatch, model, head)
    with pytest.raises(ValueError, match=message):
        assisted(model, ONE, sg.Eagle(head))


def test_a_target_of_few_layers_has_no_layers_of_its_own_to_show():
    with pytest.raises(ValueError, match=r"hidden_states \(2, 1, -1\), and a target of 2 layers"):
        assisted(tiny.llama(), ONE, sg.Eagle(head_of("eagle3-residual")))


def test_an_encoder_decoder_is_refused():
    sizes = {"vocab_size": VOCAB, "d_model": 32, "d_ff": 32, "d_kv": 8, "num_layers": 1, "num_heads": 4}
    model = T5ForConditionalGeneration(T5Config(**sizes, decoder_start_token_id=0))
    with pytest.raises(ValueError, match="T5ForConditionalGeneration is an encoder-decoder"):
        sg.Eagle(head_of("eagle")).start(model, Request(batch=1))


def test_weights_that_are_gathered_pass_by_pass_are_not_borrowed(monkeypatch):
    model = tiny.llama(num_hidden_layers=4)
    monkeypatch.setattr(fitting, "several", lambda: True)
    monkeypatch.setattr(fitting, "is_fully_sharded", lambda module: module is model)
    with pytest.raises(ValueError, match=r"no embeddings of its own, .* sharded"):
        sg.Eagle(head_of("eagle3-residual")).start(model, Request(batch=1))
    with pytest.raises(ValueError, match=r"no LM head of its own, .* sharded"):
        sg.Eagle(filled(EagleHead(config(own_embeddings=True)))).start(model, Request(batch=1))
    sg.Eagle(head_of("eagle3-other-size")).start(model, Request(batch=1))


def test_what_is_no_head_is_refused():
    with pytest.raises(ValueError, match=r"not hf_specgen\.EagleHead"):
        sg.Eagle("path")
    with pytest.raises(ValueError, match="1 or more, not 0 and 60"):
        sg.Eagle(head_of("eagle"), top_k=0)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"method": "hydra"}, "must be one of eagle, eagle3, not 'hydra'"),
        ({"method": "eagle", "fc_norm": True}, "fc_norm belongs to method 'eagle3'"),
        ({"embed_norm": True}, "embed_norm belongs to method 'eagle'"),
        ({"method": "eagle", "use_fc": False}, "not without fc"),
        ({"feature_layers": []}, "feature_layers is empty"),
        ({"method": "eagle", "target_hidden_size": 64}, "of size 64 by its own of 32"),
        ({"draft_vocab_size": 9}, "needs own_lm_head"),
    ],
)
def test_fields_that_contradict_each_other_are_refused(fields, message):
    with pytest.raises(ValueError, match=message):
        config(**fields)


# Saved and fresh


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_head_comes_back_from_disk_as_it_was(variant, tmp_path):
    head = head_of(variant)
    head.save_pretrained(tmp_path)
    again = EagleHead.from_pretrained(tmp_path, dtype=torch.float64)
    assert again.state_dict().keys() == head.state_dict().keys()
    assert all(torch.equal(held, head.state_dict()[name]) for name, held in again.state_dict().items())
    # What is not set when a config is made is not set when it is read.
    mine, theirs = head.config.to_dict(), again.config.to_dict()
    assert {key for key in mine if mine[key] != theirs[key]} <= {"_name_or_path", "architectures", "dtype"}
    rows = [assisted(target(), ONE, sg.Eagle(one, nodes=8), num_assistant_tokens=3) for one in (head, again)]
    assert rows[0][1].drafted == rows[1][1].drafted
    assert rows[0][1].accepted == rows[1][1].accepted


def test_what_a_file_lacks_is_noticed(tmp_path):
    head = head_of("eagle")
    head.save_pretrained(tmp_path, state_dict={k: v for k, v in head.state_dict().items() if "up_proj" not in k})
    again = EagleHead.from_pretrained(tmp_path, dtype=torch.float64)
    with pytest.raises(ValueError, match=r"never loaded: layers.0.mlp.up_proj.weight$"):
        assisted(target(), ONE, sg.Eagle(again))


@pytest.mark.parametrize("method", ["eagle", "eagle3"])
def test_a_fresh_head_hands_on_the_target_s_state(method):
    model = target()
    words = [3, 5, 8, 60, 95]
    for token_map in (None, words):
        head = EagleHead.fresh(model, method, token_map=token_map)
        assert (head.dtype, head.config.target["num_layers"]) == (torch.float64, 4)
        states = torch.randn(1, 4, 32 * head.config.sources, dtype=torch.float64)
        with torch.no_grad():
            out = head(torch.randn(1, 4, 32, dtype=torch.float64), head.fuse(states))
        last = states[..., -32:]
        assert torch.cosine_similarity(out.features, last, dim=-1).min() > 0.9
        if token_map:
            assert head.to_target.tolist() == words
            assert torch.equal(head.lm_head.weight, model.lm_head.weight[words])
        rows, stats = assisted(model, RAGGED, sg.Eagle(head), num_assistant_tokens=3)
        assert rows == assisted(model, RAGGED, sg.Plain())[0]
        assert stats.drafted > 0
        assert token_map is None or stats.accepted <= stats.drafted


def test_a_fresh_head_that_can_say_all_ids_has_no_map():
    head = EagleHead.fresh(target(), token_map=range(VOCAB))
    assert head.to_target is None
    assert torch.equal(head.lm_head.weight, target().lm_head.weight)


@pytest.mark.parametrize(
    ("token_map", "fault"),
    [([], "is empty"), ([1, 2, VOCAB], "from 1 to 96"), ([-1, 2], "from -1"), ([2, 2], "once"), ([5, 2], "ascending")],
)
def test_ids_that_no_fresh_head_can_say_are_refused(token_map, fault):
    with pytest.raises(ValueError, match=f"token_map .*{fault}"):
        EagleHead.fresh(target(), token_map=token_map)


def test_a_quantized_lm_head_is_not_copied():
    model = tiny.llama(num_hidden_layers=4)
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.char(), requires_grad=False)
    with pytest.raises(ValueError, match="undo quantization"):
        EagleHead.fresh(model, token_map=[1, 2])


UNLIKE_LLAMA: dict[str, str | None] = {
    "bloom": None,
    "gemma3n_text": None,
    "gemma4_text": None,
    "gpt2": None,
    "mpt": None,
    "mamba": "MambaConfig does not say .*num_attention_heads",
    "t5": "T5ForConditionalGeneration is an encoder-decoder",
}


@pytest.mark.parametrize("family", UNLIKE_LLAMA)
def test_a_fresh_head_for_a_family_unlike_llama(family):
    model, message = families.build(family), UNLIKE_LLAMA[family]
    if message is not None:
        with pytest.raises(ValueError, match=message):
            EagleHead.fresh(model, "eagle")
        return
    head = EagleHead.fresh(model, "eagle")
    states = torch.randn(1, 4, model.config.hidden_size, dtype=head.dtype)
    out = head(states, states)
    assert out.features.isfinite().all()


@pytest.mark.slow
@pytest.mark.parametrize("family", families.CAUSAL)
def test_a_fresh_head_for_any_family_is_made_or_refused(family):
    try:
        model = families.build(f"{family}-causal" if family in families.SEQ2SEQ else family)
    except families.NotBuiltError as error:
        pytest.skip(f"no tiny model: {error}")
    with contextlib.suppress(ValueError):
        assert EagleHead.fresh(model, "eagle").config.vocab_size
    with contextlib.suppress(ValueError):
        assert sg.MedusaHeads.fresh(model).config.vocab_size


def test_sizes_of_a_fresh_head_come_from_the_config():
    with torch.device("meta"):
        model = LlamaForCausalLM(target().config)
    head = EagleHead.fresh(model)
    assert head.device.type == "meta"
    assert {k: v.shape for k, v in head.state_dict().items()} == {
        k: v.shape for k, v in EagleHead.fresh(target()).state_dict().items()
    }
