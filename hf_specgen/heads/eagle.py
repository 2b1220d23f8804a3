"""EAGLE's networks: a few layers that continue the target's own states (arXiv 2401.15077, 2406.16858, 2503.01840).

Entry i of a text is made from the embedding of token i + 1 and a feature of token i, and tells what follows token
i + 1. Features of decided tokens come from the target's states; that of a drafted one is what the head itself made in
the entry before.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, cast

import torch
from huggingface_hub.dataclasses import strict
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers import initialization as init
from transformers.masking_utils import create_causal_mask, create_sliding_window_causal_mask
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3Attention
from transformers.models.llama.modeling_llama import (
    LlamaAttention,
    LlamaDecoderLayer,
    LlamaRMSNorm,
    apply_rotary_pos_emb,
)
from transformers.models.qwen3.modeling_qwen3 import Qwen3Attention

from hf_specgen import attention
from hf_specgen.heads.recorded import TargetRecord
from hf_specgen.heads.rotary import HeadRotaryEmbedding
from hf_specgen.heads.said import checked_map, copy_lm_head, lm_head_of

if TYPE_CHECKING:
    from transformers import Cache

# Methods, with the fields that mean nothing to the other one.
METHODS = {
    "eagle": ("embed_norm", "feature_norm", "first_layernorm"),
    "eagle3": ("norm_before_residual", "fc_norm", "norm_before_fc"),
}
# What a draft vocabulary's offsets hold until they are loaded: no id lies there.
UNKNOWN = torch.iinfo(torch.long).min // 2
# Why no encoder-decoder has one.
CONTINUES = "an EAGLE head continues the states of a causal LM"


@strict
class EagleConfig(PreTrainedConfig):
    """The shape of an EAGLE head. Defaults are the original's, for a target of 4096 states.

    Attributes:
        method: "eagle" (EAGLE-1 and 2, which share a network): `fc` joins embedding and state, and the first layer has
            no input norm. "eagle3": `fc` fuses several of the target's states, and the first layer attends over
            embedding and feature side by side.
        target_hidden_size: of the target's states; `hidden_size` unless given, and always so for "eagle".
        vocab_size: the target's.
        draft_vocab_size: ids that the head can say; all unless given. Fewer need its own LM head, and `d2t`.
        feature_layers: indices into transformers' `hidden_states` of the target; -1 is behind its final norm. None
            leaves it to `layers_of`.
        use_fc: the target's states pass through `fc`; else its final one is the feature as it is ("eagle3" only).
        fc_bias: of `fc`.
        qkv_bias: of the projections into the attention.
        o_bias: of the one out of it.
        mlp_bias: of the MLP's three.
        qk_norm: queries and keys are normed, as in Qwen3.
        kv_lora_rank: where it is given, layers attend as DeepSeek-V3's do, over latents of this size; the fields that
            follow are that model's.
        own_embeddings: the head has its own; else the drafter uses the target's.
        own_lm_head: likewise.
        embed_norm: embeddings are normed before `fc` ("eagle" only).
        feature_norm: and so are features.
        first_layernorm: the first layer has an input norm, as the others do ("eagle" only).
        norm_before_residual: the first layer's residual is the normed feature ("eagle3" only).
        fc_norm: each of the target's states is normed by itself before `fc`.
        norm_before_fc: all of them are normed together before `fc`.
        final_norm: states are normed before the LM head; unless said only for "eagle3".
        norm_output: and it is the normed state that is fed back.
        sliding_window: how far back the layers attend; None for all the way.
        target: what is recorded of the target the head was trained for.
    """

    model_type = "hf_specgen_eagle"
    # What the Llama modules call it.
    attribute_map: ClassVar = {"attention_bias": "qkv_bias"}

    method: str = "eagle3"
    hidden_size: int = 4096
    target_hidden_size: int | None = None
    intermediate_size: int = 14336
    num_hidden_layers: int = 1
    num_attention_heads: int = 32
    num_key_value_heads: int | None = None
    head_dim: int | None = None
    hidden_act: str = "silu"
    rms_norm_eps: float = 1e-5
    rope_parameters: dict[str, Any] | None = None
    max_position_embeddings: int = 2048
    initializer_range: float = 0.02
    attention_dropout: int | float | None = 0.0
    vocab_size: int = 128256
    draft_vocab_size: int | None = None
    feature_layers: list[int] | None = None
    use_fc: bool = True
    fc_bias: bool = False
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    kv_lora_rank: int | None = None
    q_lora_rank: int | None = None
    qk_nope_head_dim: int | None = None
    qk_rope_head_dim: int | None = None
    v_head_dim: int | None = None
    rope_interleave: bool = True
    own_embeddings: bool = False
    own_lm_head: bool = False
    embed_norm: bool = False
    feature_norm: bool = False
    first_layernorm: bool = False
    norm_before_residual: bool = False
    fc_norm: bool = False
    norm_before_fc: bool = False
    final_norm: bool | None = None
    norm_output: bool = False
    sliding_window: int | None = None
    tie_word_embeddings: bool = False
    target: dict[str, Any] | None = None

    def __post_init__(self, **kwargs: Any) -> None:
        """Fills in what follows from the rest.

        Raises:
            ValueError: the fields contradict each other.
        """
        if self.kv_lora_rank is not None:
            self.head_dim = self.qk_rope_head_dim  # as far as the rotary turns go
        self.head_dim = self.head_dim or self.hidden_size // self.num_attention_heads
        self.num_key_value_heads = self.num_key_value_heads or self.num_attention_heads
        self.target_hidden_size = self.target_hidden_size or self.hidden_size
        self.draft_vocab_size = self.draft_vocab_size or self.vocab_size
        if self.final_norm is None:
            self.final_norm = self.method == "eagle3"
        if self.feature_layers is None and (self.method == "eagle" or not self.use_fc):
            self.feature_layers = [-1]
        if fault := self._fault():
            raise ValueError(fault)
        super().__post_init__(**kwargs)  # type: ignore[no-untyped-call]

    def _fault(self) -> str | None:
        if self.method not in METHODS:
            return f"method must be one of {', '.join(METHODS)}, not {self.method!r}"
        if self.kv_lora_rank and not (self.qk_nope_head_dim and self.qk_rope_head_dim and self.v_head_dim):
            return "kv_lora_rank needs qk_nope_head_dim, qk_rope_head_dim and v_head_dim"
        for method, fields in METHODS.items():
            for field in fields if method != self.method else ():
                if getattr(self, field):
                    return f"{field} belongs to method {method!r}, not to {self.method!r}"
        if self.method == "eagle" and not self.use_fc:
            return "a head of method 'eagle' is not without fc"
        if self.feature_layers == []:
            return "feature_layers is empty: name the target's hidden_states that the head reads"
        one = self.method == "eagle" or not self.use_fc
        if one and (self.target_hidden_size != self.hidden_size or self.sources > 1):
            return (
                f"without fc to fuse them the head continues one state of the target's as it is, not {self.sources} of "
                f"size {self.target_hidden_size} by its own of {self.hidden_size}"
            )
        if self.draft_vocab_size != self.vocab_size and not self.own_lm_head:
            return (
                f"a draft vocabulary of {self.draft_vocab_size} of the target's {self.vocab_size} ids needs own_lm_head"
            )
        return None

    @property
    def sources(self) -> int:
        """How many of the target's states it reads."""
        return 3 if self.feature_layers is None else len(self.feature_layers)

    def layers_of(self, num_hidden_layers: int) -> tuple[int, ...]:
        """`feature_layers`, or EAGLE-3's own: an early, a middle and a late one.

        Args:
            num_hidden_layers: the target's.

        Raises:
            ValueError: the target does not have them.
        """
        last = num_hidden_layers
        layers = (2, last // 2, last - 3) if self.feature_layers is None else tuple(self.feature_layers)
        # What others number so is the last layer's output before the final norm, which transformers does not return.
        if (self.feature_layers is None and last < 4) or not all(-last - 1 <= layer < last for layer in layers):
            raise ValueError(
                f"the head reads the target's hidden_states {layers}, and a target of {last} layers has 0 to "
                f"{last - 1} and, behind the final norm, -1: load the head that was trained for this target, or name "
                "its feature_layers"
            )
        return layers


class EagleOutput(NamedTuple):
    """What a pass of an EAGLE head returns.

    Attributes:
        hidden: `(batch, width, hidden)`, for the LM head.
        features: `(batch, width, hidden)`, the features of the children of these places.
    """

    hidden: Tensor
    features: Tensor


class KeysOnly:
    """Stock attention that with `keys_only` caches keys and values as ever, and attends to nothing."""

    def forward(self: Any, hidden_states: Tensor, keys_only: bool = False, **kwargs: Any) -> tuple[Tensor, Any]:
        """Returns `(batch, width, hidden)` and the weights; with `keys_only` what it was given, and None."""
        if not keys_only:
            attended: tuple[Tensor, Any] = super().forward(hidden_states, **kwargs)  # type: ignore[misc]
            return attended
        shape = (*hidden_states.shape[:-1], -1, self.head_dim)
        keys, values = (project(hidden_states).view(shape) for project in (self.k_proj, self.v_proj))
        if self.config.qk_norm:
            keys = self.k_norm(keys)
        keys = keys.transpose(1, 2)
        _, keys = apply_rotary_pos_emb(keys, keys, *kwargs["position_embeddings"])
        kwargs["cache"].update(keys, values.transpose(1, 2), self.layer_idx)
        return hidden_states, None


class EagleAttention(KeysOnly, LlamaAttention):
    """Llama's."""


class NormedAttention(KeysOnly, Qwen3Attention):
    """Qwen3's, with normed queries and keys."""


class EagleLayer(LlamaDecoderLayer):  # type: ignore[no-untyped-call]
    """A Llama layer with the biases and norms of the config; the first one of method "eagle" has no input norm.

    With `keys_only` it caches keys and values, and returns what it was given.
    """

    def __init__(self, config: EagleConfig, layer_idx: int) -> None:
        super().__init__(config, layer_idx)  # type: ignore[arg-type]
        self.self_attn = _attention(config, layer_idx, config.hidden_size)
        if layer_idx == 0 and not config.first_layernorm:
            self.input_layernorm = nn.Identity()  # type: ignore[assignment]

    def forward(self, hidden_states: Tensor, keys_only: bool = False, **kwargs: Any) -> Tensor:
        """Returns `(batch, width, hidden)`."""
        if keys_only:
            self.self_attn(self.input_layernorm(hidden_states), keys_only=True, **kwargs)
            return hidden_states
        return cast(Tensor, super().forward(hidden_states, **kwargs))


class FusingLayer(LlamaDecoderLayer):  # type: ignore[no-untyped-call]
    """The first layer of EAGLE-3: it attends over embedding and feature side by side.

    With `keys_only` it caches keys and values, and returns the features that it was given.
    """

    def __init__(self, config: EagleConfig) -> None:
        super().__init__(config, 0)  # type: ignore[arg-type]
        self.self_attn = _attention(config, 0, 2 * config.hidden_size)
        self.hidden_norm = LlamaRMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.norm_before_residual = config.norm_before_residual

    def forward(self, features: Tensor, inputs_embeds: Tensor, keys_only: bool = False, **kwargs: Any) -> Tensor:
        """Returns `(batch, width, hidden)`."""
        normed = self.hidden_norm(features)
        both = torch.cat([self.input_layernorm(inputs_embeds), normed], dim=-1)
        if keys_only:
            self.self_attn(both, keys_only=True, **kwargs)
            return features
        attended, _ = self.self_attn(both, **kwargs)
        hidden: Tensor = (normed if self.norm_before_residual else features) + attended
        hidden = hidden + self.mlp(self.post_attention_layernorm(hidden))
        return hidden


def _attention(config: EagleConfig, layer: int, size: int) -> Any:
    """Stock attention over states of `size`, with the config's biases."""
    latent = config.kv_lora_rank is not None
    kind: Any = DeepseekV3Attention if latent else NormedAttention if config.qk_norm else EagleAttention
    module = kind(config, layer)
    for name in ("q_proj", "q_a_proj", "kv_a_proj_with_mqa") if latent else ("q_proj", "k_proj", "v_proj"):
        stock = getattr(module, name)
        if stock is not None:
            setattr(module, name, nn.Linear(size, stock.out_features, bias=stock.bias is not None))
    module.o_proj = nn.Linear(module.o_proj.in_features, config.hidden_size, bias=config.o_bias)
    return module


class EagleHead(PreTrainedModel):  # type: ignore[no-untyped-call]
    """The network of an EAGLE drafter. What it lacks (embeddings, LM head) it borrows from the target, call by call.

    Weights start as NaN, so that one that a checkpoint lacks is noticed; see `fresh` for a head to be trained.
    """

    config_class = EagleConfig
    config: EagleConfig
    d2t: Tensor
    base_model_prefix = ""
    supports_gradient_checkpointing = True
    _no_split_modules = ["EagleLayer", "FusingLayer"]  # noqa: RUF012
    _supports_sdpa = True
    _supports_flex_attn = True
    _supports_flash_attn = True
    _supports_attention_backend = True

    def __init__(self, config: EagleConfig) -> None:
        super().__init__(config)
        size, eps = config.hidden_size, config.rms_norm_eps
        fused = config.method == "eagle3"
        read = config.sources * int(config.target_hidden_size or 0)
        if config.own_embeddings:
            self.embed_tokens = nn.Embedding(config.vocab_size, size)
        if config.fc_norm:
            self.fc_norm = nn.ModuleList(LlamaRMSNorm(read // config.sources, eps=eps) for _ in range(config.sources))
        if config.norm_before_fc:
            self.input_norm = LlamaRMSNorm(read, eps=eps)
        if config.embed_norm:
            self.embed_norm = LlamaRMSNorm(size, eps=eps)
        if config.feature_norm:
            self.feature_norm = LlamaRMSNorm(size, eps=eps)
        if config.use_fc:
            self.fc = nn.Linear(read if fused else 2 * size, size, bias=config.fc_bias)
        first = FusingLayer(config) if fused else EagleLayer(config, 0)
        self.layers = nn.ModuleList([first, *(EagleLayer(config, i) for i in range(1, config.num_hidden_layers))])
        if config.final_norm:
            self.norm = LlamaRMSNorm(size, eps=eps)
        if config.own_lm_head:
            self.lm_head = nn.Linear(size, int(config.draft_vocab_size or 0), bias=False)
        if config.draft_vocab_size != config.vocab_size:
            self.register_buffer("d2t", torch.full((int(config.draft_vocab_size or 0),), UNKNOWN))
        self.rotary_emb = HeadRotaryEmbedding(config)  # type: ignore[arg-type]
        self.post_init()  # type: ignore[no-untyped-call]

    def _init_weights(self, module: nn.Module) -> None:
        """NaN, whatever it is; the rotary frequencies and the offsets follow from the config."""
        super()._init_weights(module)  # type: ignore[no-untyped-call]
        for parameter in module.parameters(recurse=False):
            init.constant_(parameter, torch.nan)
        if module is self and self.config.draft_vocab_size != self.config.vocab_size:
            init.constant_(self.d2t, UNKNOWN)

    @classmethod
    def fresh(
        cls,
        target: PreTrainedModel,
        method: str = "eagle3",
        num_hidden_layers: int = 1,
        feature_layers: Sequence[int] | None = None,
        token_map: Sequence[int] | None = None,
    ) -> EagleHead:
        """A head to be trained: it hands the target's (last) state on, and its layers add nothing yet.

        Sizes come from the target's config. For a target without weights (on the meta device) the head has none either.

        Args:
            target: the model it is for, whose embeddings and LM head it borrows.
            method: see `EagleConfig`.
            num_hidden_layers: of the head.
            feature_layers: see `EagleConfig`.
            token_map: ascending ids that it can say, for which it gets a copy of the target's LM head; None for all.

        Raises:
            ValueError: the target is not one whose states a head can continue, or does not have these layers or ids, or
                its LM head cannot be copied.
        """
        if target.config.is_encoder_decoder:
            raise ValueError(f"{type(target).__name__} is an encoder-decoder; {CONTINUES}")
        text: Any = target.config.get_text_config(decoder=True)
        ids = None if token_map is None else checked_map(token_map, text.vocab_size)
        config = EagleConfig(
            **_sizes_of(text),
            method=method,
            num_hidden_layers=num_hidden_layers,
            draft_vocab_size=None if ids is None else len(ids),
            feature_layers=None if feature_layers is None else list(feature_layers),
            own_lm_head=ids is not None,
            target=TargetRecord.of(target).to_dict(),
        )
        config.layers_of(text.num_hidden_layers)
        with torch.device(target.device):
            head = cls(config)
        head.to(dtype=target.dtype)  # type: ignore[call-arg]
        head._begin(target, ids)
        return head

    @torch.no_grad()
    def _begin(self, target: PreTrainedModel, token_map: list[int] | None) -> None:
        for name, parameter in self.named_parameters():
            if parameter.ndim == 1:
                parameter.fill_(0.0 if name.endswith("bias") else 1.0)
            elif name.endswith(("o_proj.weight", "down_proj.weight")):
                parameter.zero_()
            else:
                parameter.normal_(std=self.config.initializer_range)
        if self.config.use_fc:
            self.fc.weight[:, -self.config.hidden_size :] += torch.eye(self.config.hidden_size).to(self.fc.weight)
        if token_map is not None:
            copy_lm_head(lm_head_of(target), self.lm_head, token_map)
            if self.config.draft_vocab_size != self.config.vocab_size:
                ids = torch.tensor(token_map, device=self.device)
                self.d2t.copy_(ids - torch.arange(len(ids), device=self.device))

    @property
    def borrows(self) -> tuple[str, ...]:
        """What it uses of the target's: "embeddings", "LM head"."""
        own = {"embeddings": self.config.own_embeddings, "LM head": self.config.own_lm_head}
        return tuple(what for what, held in own.items() if not held)

    @property
    def to_target(self) -> Tensor | None:
        """`(draft vocabulary,)` the target's id for each of the head's own; None where they are the same."""
        if self.config.draft_vocab_size == self.config.vocab_size:
            return None
        return torch.arange(len(self.d2t), device=self.d2t.device) + self.d2t

    def fuse(self, states: Tensor) -> Tensor:
        """`(..., hidden)` features from the target's states, `(..., sources * target_hidden)` side by side."""
        config = self.config
        if config.fc_norm:
            parts = states.chunk(len(self.fc_norm), dim=-1)
            states = torch.cat([norm(part) for norm, part in zip(self.fc_norm, parts, strict=True)], dim=-1)
        if config.norm_before_fc:
            states = self.input_norm(states)
        fused: Tensor = self.fc(states) if config.method == "eagle3" and config.use_fc else states
        return fused

    def forward(
        self,
        inputs_embeds: Tensor,
        features: Tensor,
        position_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        cache: Cache | None = None,
        last_only: bool = False,
    ) -> EagleOutput:
        """A pass over entries.

        Args:
            inputs_embeds: `(batch, width, hidden)` of the tokens.
            features: `(batch, width, hidden)` of the tokens before them: from `fuse`, or of the output at the parent.
            position_ids: `(batch, width)`; counted from what the cache holds, unless given.
            attention_mask: `(batch, length)` with 0 for padding, or four-dimensional as the layers take it; causal
                unless given.
            cache: of the entries before.
            last_only: only the last entry is asked about, and the output has a width of 1. A head of one layer then
                takes no more than keys and values of the others, which is a third of the work. The mask is not
                four-dimensional.
        """
        config = self.config
        if position_ids is None:
            seen = 0 if cache is None else int(cache.get_seq_length())
            position_ids = torch.arange(seen, seen + features.shape[1], device=features.device).unsqueeze(0)
        turns: Sequence[Tensor] = self.rotary_emb(features, position_ids)
        if last_only and cache is not None and features.shape[1] > 1 and self._leaves_keys_only:
            before = inputs_embeds[:, :-1], features[:, :-1]
            self._first(*before, position_embeddings=[part[:, :-1] for part in turns], cache=cache, keys_only=True)
            parts = inputs_embeds, features, position_ids, *turns
            inputs_embeds, features, position_ids, *turns = (part[:, -1:] for part in parts)
        masked = create_causal_mask if config.sliding_window is None else create_sliding_window_causal_mask
        kwargs = {
            "attention_mask": masked(config, features, attention_mask, cache, position_ids),
            "position_ids": position_ids,
            "position_embeddings": turns,
            "cache": cache,
        }
        hidden = self._first(inputs_embeds, features, **kwargs)
        for layer in self.layers[1:]:
            hidden = layer(hidden, **kwargs)
        if last_only:
            hidden = hidden[:, -1:]
        normed = self.norm(hidden) if config.final_norm else hidden
        return EagleOutput(normed, normed if config.norm_output else hidden)

    @property
    def _leaves_keys_only(self) -> bool:
        """Of an entry that nobody asks about, later ones read keys and values alone."""
        config = self.config
        # Stock's cache holds one entry too many for a window of one.
        return config.num_hidden_layers == 1 and config.kv_lora_rank is None and config.sliding_window != 1

    def _first(self, inputs_embeds: Tensor, features: Tensor, **kwargs: Any) -> Tensor:
        """The first layer: over embedding and feature, side by side or joined."""
        hidden: Tensor
        if self.config.method == "eagle3":
            hidden = self.layers[0](features, inputs_embeds=inputs_embeds, **kwargs)
        else:
            hidden = self.layers[0](self._joined(inputs_embeds, features), **kwargs)
        return hidden

    def _joined(self, inputs_embeds: Tensor, features: Tensor) -> Tensor:
        """What the first layer of method "eagle" is shown."""
        if self.config.embed_norm:
            inputs_embeds = self.embed_norm(inputs_embeds)
        if self.config.feature_norm:
            features = self.feature_norm(features)
        joined: Tensor = self.fc(torch.cat([inputs_embeds, features], dim=-1))
        return joined

    def attending_like(self, model: nn.Module) -> EagleHead:
        """The head itself, or where `model` attends by `attention` a copy that does so and shares all its tensors."""
        if not attention.is_installed(model) or not attention.would_install(self):
            return self
        shared = {id(tensor): tensor for tensor in (*self.parameters(), *self.buffers())}
        view = copy.deepcopy(self, shared)
        attention.install(view)
        return view


def _sizes_of(text: PreTrainedConfig) -> dict[str, Any]:
    """A layer as wide as the target's, by its text config.

    Raises:
        ValueError: its layers are not of attention, or differ in what counts here.
    """
    size, heads, vocabulary = (_said(text, name) for name in ("hidden_size", "num_attention_heads", "vocab_size"))
    if not all(isinstance(number, int) for number in (size, heads, vocabulary)):
        raise ValueError(
            f"{type(text).__name__} does not say hidden_size, num_attention_heads and vocab_size for all its layers: "
            "make the head as EagleHead(EagleConfig(...)) with sizes of your own"
        )
    wide = _said(text, "intermediate_size") or 4 * size
    return {
        "hidden_size": size,
        "intermediate_size": wide if isinstance(wide, int) else max(wide),
        "num_attention_heads": heads,
        "num_key_value_heads": _said(text, "num_key_value_heads") or heads,
        "head_dim": _said(text, "head_dim") or size // heads,
        "rms_norm_eps": _said(text, "rms_norm_eps") or 1e-5,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": (text.to_dict().get("rope_parameters") or {}).get("rope_theta", 10_000.0),
        },
        # A target that is not rotated may know no longest position, and the head then has its own default.
        "max_position_embeddings": _said(text, "max_position_embeddings")
        or _said(text, "max_seq_len")
        or EagleConfig.max_position_embeddings,
        "vocab_size": vocabulary,
    }


def _said(text: PreTrainedConfig, field: str) -> Any:
    """A field of a config; None where there is none, and where its layers differ in it."""
    try:
        return getattr(text, field, None)
    except RuntimeError:
        return None
