"""The target in one call: its passes, its positions, its extra inputs. The loop sees nothing else of the model."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationMixin, PreTrainedModel
from transformers.generation.utils import MULTIMODAL_INPUTS_TO_DROP_OUTSIDE_PREFILL

from hf_specgen.cache import (
    CropCache,
    RowCache,
    SlotCache,
    has_attention,
    has_indexer,
    has_recurrent,
    is_users,
    why_not_slots,
)
from hf_specgen.draft import Draft
from hf_specgen.indexer import OneByOne
from hf_specgen.prompt import Prompt, generative
from hf_specgen.ranks import is_fully_sharded, several
from hf_specgen.recurrent import why_not_recurrent
from hf_specgen.rope import Switch, drops_cache, switches

# Models whose attention counts positions by the cache (ALiBi, a local window, a temperature), not by position ids, or
# that drop the position ids they are given.
OWN_POSITIONS = frozenset(
    [
        *("bloom", "mpt", "gpt_neo", "llama4_text"),
        *("exaone4_5", "hyperclovax_vision_v2", "kosmos-2.5", "kosmos_2_5_text_model", "kosmos_2_text_model"),
    ]
)
# Kernels that take no 4-D mask.
MASKLESS_ATTENTION = ("flash", "flex", "paged")
# Models whose inner layers keep several vectors a token, so that only their last state can be read.
SEVERAL_STATES = frozenset(["gemma3n", "gemma3n_text", "hy_v4"])
# Inputs that run along the sequence beside the ids, and how stock continues them: the last value, or zero for text.
TOKEN_TYPES = {"token_type_ids": True, "mm_token_type_ids": False, "moe_mm_token_type_ids": False}


@dataclass(frozen=True)
class Pass:
    """What one forward returned.

    Attributes:
        logits: `(batch, width, vocab)`: one place for the root, then one a node. The prompt's pass has one.
        hidden_states: for each layer `(batch, width, hidden)`, where asked for; the prompt's pass has the whole prompt.
        states: `(batch, width, size)` the layers that a session reads, one behind the other; likewise.
        is_prompt: the prompt's pass.
    """

    logits: Tensor
    hidden_states: tuple[Tensor, ...] | None = None
    states: Tensor | None = None
    is_prompt: bool = False


def padding_of_positions(model: PreTrainedModel) -> list[int]:
    """The padding ids that a model leaves out where it counts positions by the ids of a pass, as fairseq's do.

    A text may hold such an id, and then the ids behind it in one pass are counted otherwise than each by itself.
    """
    counts = ("create_position_ids_from_input_ids", "make_positions")
    found: set[Any] = {
        module.padding_idx for module in model.modules() if any(hasattr(type(module), name) for name in counts)
    }
    return sorted(found - {None})


def why_cropped(model: PreTrainedModel, prompt: Prompt) -> str | None:
    """Why this call runs on a `CropCache`, in chains and with rows in lockstep; None if a `SlotCache` takes it.

    A `SlotCache` serves ragged rows and trees, and copies nothing on roll-back.
    """
    cache, config = prompt.model_kwargs["cache"], model.config.get_text_config(decoder=True)
    attention = config._attn_implementation or ""
    if is_users(cache) and not has_recurrent(cache):
        return f"the {type(cache).__name__} is the caller's"
    if (reason := why_not_slots(cache) or why_not_recurrent(model, cache.layers)) is not None:
        return reason
    placed = "position_ids" in inspect.signature(model.forward).parameters and prompt.position_ids is not None
    if not placed and has_attention(cache):
        return "the model takes no position ids"
    if any(name in attention for name in MASKLESS_ATTENTION):
        return f"{attention} takes no mask of a tree"
    for kind in (config.model_type, model.config.model_type):
        if kind in OWN_POSITIONS or getattr(config, "alibi", False):
            return f"{kind} counts positions by its cache and not by position ids"
    if model.config.model_type == "paligemma" and getattr(config, "layer_types", None):
        return "PaliGemma 2 makes the masks of its kinds of layers by itself"
    return "the attention mask has holes" if prompt.padding() is None else None


def _shows_states(model: PreTrainedModel) -> bool:
    """Whether a model can return its hidden states: by transformers' recording, or by an argument of old."""
    recorded = any("hidden_states" in (getattr(part, "_can_record_outputs", None) or ()) for part in model.modules())
    return recorded or "output_hidden_states" in inspect.signature(model.forward).parameters


class Target:
    """A model and its cache in one call.

    Args:
        model: the target.
        prompt: what transformers prepared.
        hidden_states: whether passes return them.

    Attributes:
        device: where it takes its inputs.
        cropped: why the cache is a `CropCache`; None for a `SlotCache`.
        cache: of the call; there from the prompt's pass on.
        prompt_lengths: for each row the tokens of the prompt, padding not counted; from the prompt's pass on.
    """

    def __init__(self, model: PreTrainedModel, prompt: Prompt, hidden_states: bool = False) -> None:
        self.model: Any = model  # transformers types a model's methods as tensors
        self.prompt = prompt
        self.hidden_states = hidden_states
        self._layers: tuple[int, ...] = ()
        self._prefix = prompt.prefix
        self.cropped = why_cropped(model, prompt)
        self.slots = self.cropped is None
        self._recurrent = has_recurrent(prompt.model_kwargs["cache"])
        self._indexed = has_indexer(prompt.model_kwargs["cache"])
        # Properties that walk through all parameters: asked once, not once a pass.
        # With offloaded weights the model is nowhere (meta); its inputs go where the prompt is.
        self.device: torch.device = prompt.input_ids.device if model.device.type == "meta" else model.device
        self.dtype: torch.dtype = model.dtype
        self._ids: int = model.config.get_text_config(decoder=True).vocab_size
        prepare = getattr(self.model.prepare_inputs_for_generation, "__func__", None)
        # Stock's own preparation only sorts arguments; ours are sorted already.
        self._sorted = (
            self.slots and prepare is GenerationMixin.prepare_inputs_for_generation and not model.is_remote_code()
        )
        self._gaps = [] if self.slots else padding_of_positions(model)
        self.cache: RowCache
        self.prompt_lengths: list[int]
        self._extras: dict[str, Any] = {}
        self._types: list[str] = []
        self._offset: Tensor | None = None
        self._shifted = False
        self._counted = torch.empty((0, 1, 1), dtype=torch.long)
        self._began = False
        found = switches(model)
        # Calls that meet one of several are refused.
        self.switch: Switch | None = found.pop() if len(found) == 1 else None
        self._start: list[int] = []
        self._longest = self._columns = 0
        self._before_switch = self._rebuilt = False

    @property
    def ragged(self) -> bool:
        """Rows may keep different numbers of tokens."""
        return self.slots

    @property
    def trees(self) -> bool:
        """A pass may branch."""
        return self.slots and not self._recurrent

    @property
    def forgets(self) -> bool:
        """What has been committed can be taken back; a recurrent state only goes back to a mark."""
        return not self._recurrent

    def read(self, layers: Sequence[int]) -> None:
        """Has all passes return `Pass.states` of these layers, see `Needs.hidden_layers`.

        Raises:
            ValueError: the model has no such layer, or does not return its states.
        """
        config, name = self.model.config.get_text_config(decoder=True), type(self.model).__name__
        if layers and not _shows_states(self.model):
            raise ValueError(f"{name} does not return its hidden states, which the drafter reads")
        counts = ("num_decoder_layers", "decoder_layers") if self._prefix else ()
        count: int = next((getattr(config, name) for name in counts if hasattr(config, name)), config.num_hidden_layers)
        for layer in layers:
            if not -count - 1 <= layer <= count:
                raise ValueError(f"hidden_layers holds {layer}, and {name} has {count} layers")
            if config.model_type in SEVERAL_STATES and layer not in (-1, count):
                raise ValueError(f"the drafter reads hidden states {layer} of {name}, which has not one vector a token")
        self._layers = tuple(layers)

    def _output_hidden_states(self) -> bool | list[int]:
        """What the model is asked for: all layers only if the user wants them, since a long prompt's take memory."""
        if self.hidden_states or (self._layers and self._prefix):  # an encoder's layers are counted otherwise
            return True
        return sorted(set(self._layers))

    def prefill(self) -> Pass:
        """The prompt's pass, as stock makes it, so that the first token and what is cached are stock's to the bit."""
        prompt, kwargs = self.prompt, dict(self.prompt.model_kwargs)
        kwargs["output_hidden_states"] = self._output_hidden_states() or kwargs.get("output_hidden_states")
        padding, batch = prompt.padding(), prompt.input_ids.shape[0]
        outputs = self.model._prefill(prompt.input_ids, prompt.generation_config, kwargs)
        if outputs.get("cache") is None:
            raise ValueError(f"{type(self.model).__name__} returned no cache")
        if self.slots and padding is not None:
            self.cache = SlotCache(outputs.cache, self.model, padding, prompt.columns)
            self.prompt_lengths = [length + 1 for length in self.cache.lengths]
        else:
            self.cache = CropCache(outputs.cache, prompt.attention_mask, batch)
            columns = self.cache.lengths[0] + 1
            mask = prompt.attention_mask
            self.prompt_lengths = [columns] * batch if mask is None else (mask != 0).sum(1).tolist()
        self._began = True
        # What the model itself would hand to its next pass: beside stock's, some families carry inputs of their own.
        decoder = bool(self._prefix)
        self._extras = self._running_inputs(
            self.model._update_model_kwargs_for_generation(outputs, kwargs, is_encoder_decoder=decoder)
        )
        positions = prompt.position_ids
        if positions is not None:
            # What positions exceed the count of cached tokens by: 0 but for padding and positions the caller chose.
            lengths = torch.tensor(self.cache.lengths, device=positions.device).view(-1, 1)
            self._offset = (positions[..., -1:] - lengths).to(self.device)
            self._shifted = positions.ndim > 2 or bool(self._offset.any())
            self._counted = torch.arange(2 * max(self.prompt_lengths) + 256, device=self.device).view(-1, 1, 1)
        # The prompt's tensors (images among them) are not needed again, but for a cache that is to be computed anew.
        kept: dict[str, Any] = {}
        if self.switch is not None and positions is not None:
            kept = {"attention_mask": prompt.attention_mask, "position_ids": positions}
            self._start, self._longest = list(self.cache.lengths), int(positions[..., -1].max())
            self._columns, self._before_switch = prompt.columns, self._longest < self.switch.position
        self.prompt = Prompt(prompt.input_ids, prompt.generation_config, kept, prompt.prefix)
        return self._pass(outputs, outputs.logits[:, -1:], is_prompt=True)

    def _pass(self, outputs: Any, logits: Tensor, is_prompt: bool = False) -> Pass:
        states: tuple[Tensor, ...] | None = outputs.get(self._prefix + "hidden_states")
        read = self._read(states, logits) if self._layers else None
        return Pass(logits, states if self.hidden_states else None, read, is_prompt)

    def _read(self, states: tuple[Tensor | None, ...] | None, logits: Tensor) -> Tensor:
        """The layers that a session reads, side by side."""
        known = len(states or ())
        found = [states[layer] for layer in self._layers if states and -known <= layer < known]
        read = [layer.to(logits.device) for layer in found if layer is not None and layer.ndim == 3]
        if len(read) < len(self._layers):
            raise ValueError(
                f"{type(self.model).__name__} does not return the hidden states {self._layers} that the drafter reads, "
                "one vector a token"
            )
        return torch.cat(read, dim=-1)

    def _running_inputs(self, updated: Mapping[str, Any]) -> dict[str, Any]:
        """What later passes get beside ids, mask, positions and cache; token types shrink to how they continue."""
        left_out = {"cache", "inputs_embeds", "logits_to_keep", "use_cache"}
        left_out.update(self._prefix + name for name in ("attention_mask", "position_ids"))
        left_out.update(MULTIMODAL_INPUTS_TO_DROP_OUTSIDE_PREFILL)
        extras = {
            key: value
            for key, value in updated.items()
            if key not in left_out and not (key in TOKEN_TYPES and value is None)
        }
        self._types = [name for name in TOKEN_TYPES if name in extras]
        for name in self._types:
            last = extras[name][:, -1:]
            extras[name] = last if TOKEN_TYPES[name] else torch.zeros_like(last)
        if extras.get("cross_attention_mask") is not None:
            # Mllama's: the pictures that each token sees. It repeats the last line for the tokens of a pass.
            extras["cross_attention_mask"] = extras["cross_attention_mask"][:, -1:]
        return extras

    @property
    def _decided(self) -> int:
        """Tokens that a row which goes on has gained. Where the embedding switches, rows advance in lockstep."""
        return max(length - start for length, start in zip(self.cache.lengths, self._start, strict=True))

    @property
    def stale(self) -> bool:
        """Whether the next pass lies beyond a switch at which stock computes the whole cache anew: see `rebuild`."""
        if self.switch is None or not self._before_switch:
            return False
        # What is drafted with may have gone beyond; the model is asked as stock asks it at the switch.
        gained = self.switch.position - self._longest
        if gained <= self._decided:
            shown, cached = self.prompt.input_ids.shape[1] + gained, self._columns - 1 + gained
            self._before_switch = drops_cache(self.model, shown, cached)
        return self._before_switch and gained <= self._decided

    @property
    def follows_length(self) -> bool:
        """What a pass does to a token depends on when it is made. After a `rebuild` all are turned alike."""
        return self.switch is not None and not self._rebuilt

    def reach(self) -> int | None:
        """The longest path that the next pass may hold; None if any will do. See `rope`."""
        if self.switch is None:
            return None
        return 0 if self.stale else self.switch.reach(self._longest + self._decided)

    def rebuild(self, ids: Tensor, idle: Sequence[bool]) -> Pass:
        """A pass over everything that was decided, into a cache of its own, as stock makes it where the cache is stale.

        Args:
            ids: `(batch, columns)` as stock holds them.
            idle: for each row whether it has ended.
        """
        lengths, more = self.cache.lengths, ids.shape[1] - self.prompt.input_ids.shape[1]
        self.cache.close()
        mask, positions = self.prompt.attention_mask, self.prompt.position_ids
        if mask is not None:
            mask = torch.nn.functional.pad(mask, (0, more), value=1)
        assert positions is not None
        later = positions[..., -1:] + torch.arange(1, more + 1, device=positions.device)
        positions = torch.cat([positions, later], dim=-1)
        kwargs: dict[str, Any] = {"attention_mask": mask, "position_ids": positions, "use_cache": True}
        if "logits_to_keep" in inspect.signature(self.model.forward).parameters:
            kwargs["logits_to_keep"] = 1
        inputs = self.model.prepare_inputs_for_generation(ids, cache=None, **kwargs, **self._extras)
        inputs["output_hidden_states"] = self._output_hidden_states() or False
        outputs = self.model(**inputs, return_dict=True)
        padding, batch = self.prompt.padding(), ids.shape[0]
        if self.slots and padding is not None:
            self.cache = SlotCache(outputs.cache, self.model, padding, ids.shape[1])
            # Stock's ids go on with padding where a row has ended.
            pairs = zip(self.cache.lengths, lengths, idle, strict=True)
            least = self.cache.least
            self.cache.lengths = [max(old, least) if ended else new for new, old, ended in pairs]
        else:
            self.cache = CropCache(outputs.cache, mask, batch)
        self._before_switch, self._rebuilt = False, True
        passed = self._pass(outputs, outputs.logits[:, -1:])
        last = None if passed.hidden_states is None else tuple(layer[:, -1:] for layer in passed.hidden_states)
        return replace(passed, hidden_states=last, states=None if passed.states is None else passed.states[:, -1:])

    def _positions(self, draft: Draft, idle: Sequence[bool], at: int | None = None) -> Tensor:
        """Position ids of a pass: those of the roots, and by depth of the nodes."""
        lengths = self.cache.lengths
        if any(idle) and self.slots:
            # The last token of a row that has ended may lie beyond the model's last position; one before does not.
            # A CropCache keeps it, at the position where stock does.
            lengths = [max(0, length - ended) for length, ended in zip(lengths, idle, strict=True)]
        if len(lengths) == 1 and not self._shifted and lengths[0] < len(self._counted):
            roots = self._counted[lengths[0]]  # a view costs a third of a new tensor
        else:
            roots = torch.tensor([[length] for length in lengths], device=self.device)
            roots = self._offset + roots if self._shifted and self._offset is not None else roots
        if self.switch is not None and any(idle):
            # Stock goes on counting where a row has ended, and its longest row turns all others.
            ended = torch.tensor(idle, device=self.device).view(-1, 1)
            roots = roots.masked_fill(ended, self._longest + (self._decided if at is None else at))
        return roots + draft.tree.depth if draft.nodes else roots

    def close(self) -> None:
        """Leaves a cache that belongs to the caller as one without a call in progress."""
        if self._began:
            self.cache.close()

    def idle(self) -> None:
        """One forward whose outcome nobody reads, for ranks whose passes need this one's share of the weights."""
        ids = torch.zeros((self.prompt.input_ids.shape[0], 1), dtype=torch.long, device=self.device)
        encoded = self._extras if self._prefix else {}
        self.model(**{f"{self._prefix}input_ids": ids}, **encoded, use_cache=False)

    def fit(self, roots: Tensor, draft: Draft) -> Draft:
        """The draft without nodes that a pass would put at other positions than a pass for each: those behind padding.

        Args:
            roots: `(batch,)` each row's last decided token.
            draft: chains; on the target's device.
        """
        if not self._gaps or not draft.nodes:
            return draft
        ids = torch.cat([roots.to(draft.tokens.device).unsqueeze(1), draft.tokens[:, :-1]], dim=1)
        padded = torch.isin(ids, torch.tensor(self._gaps, device=ids.device)).cumsum(1) > 0
        return replace(draft, parents=draft.parents.where(~padded, -1))

    def verify(self, roots: Tensor, draft: Draft, idle: Sequence[bool] = (), at: int | None = None) -> Pass:
        """One forward over `[root, *draft]` of every row.

        Args:
            roots: `(batch,)` each row's last decided token.
            draft: what to check; on the target's device.
            idle: for each row whether its result is of no interest, because it has ended; none are, unless said.
            at: how many tokens a row that goes on had gained when stock made this pass; all of them, unless said.
        """
        ids, width = roots.to(self.device).unsqueeze(1), draft.nodes + 1
        if draft.nodes:
            # An id that the model does not know is never chosen; it only must not be looked up.
            ids = torch.cat([ids, draft.tokens.clamp(0, self._ids - 1)], dim=1)
        self.cache.begin(width, some_idle=any(idle))
        kwargs = dict(self._extras)
        for name in self._types:
            kwargs[name] = kwargs[name].expand(-1, width)
        kwargs[self._prefix + "attention_mask"] = self.cache.mask(draft, self.dtype)
        if self._offset is not None:
            kwargs[self._prefix + "position_ids"] = self._positions(draft, idle, at)
        cache = self.cache.model_cache
        if self._sorted:
            inputs = {"input_ids": ids, "cache": cache, "use_cache": True, **kwargs}
        else:
            inputs = self.model.prepare_inputs_for_generation(ids, cache=cache, use_cache=True, **kwargs)
            inputs.pop("logits_to_keep", None)  # some ask for the last place only, and every node is wanted
        if inputs.get("cache") is not cache:
            raise ValueError(f"{type(self.model).__name__} drops its cache in prepare_inputs_for_generation")
        if self.slots and self._offset is not None and inputs.get("position_ids") is None:
            raise ValueError(f"{type(self.model).__name__} drops its position ids in prepare_inputs_for_generation")
        if self.hidden_states or self._layers:
            inputs["output_hidden_states"] = self._output_hidden_states()
        with self._choosing(*ids.shape):
            outputs = self.model(**inputs, return_dict=True)
        return self._pass(outputs, outputs.logits)

    def _choosing(self, batch: int, width: int) -> AbstractContextManager[Any]:
        """Has an indexer choose for the tokens of a pass as in passes over one; see `indexer`."""
        if width == 1 or not self._indexed:
            return nullcontext()
        return OneByOne(batch, width, self.cache.lengths[0] + width)


# What a call leaves on a module for its own later passes, by the name of the attribute.
CALL_STATE = {
    "rope_deltas": "it keeps how far the positions of the last prompt lie behind its pictures",
    "recurrent_states": "it keeps the recurrent states of the last text in its layers",
    "_encoder_cache": "it keeps the cache of its encoder",
}


def one_thread(model: torch.nn.Module) -> str | None:
    """Why a model must not serve two calls at once, because its own forward keeps something on it; None if it may."""
    inner = generative(model)
    if moving := switches(inner):
        first = min(switch.position for switch in moving)
        return f"its rotary embedding keeps the frequencies of the last pass, which change at position {first}"
    if several() and is_fully_sharded(inner):
        return "its weights are gathered for each pass"
    for module in model.modules():
        for name, reason in CALL_STATE.items():
            if name in vars(module):
                return reason
        hook = vars(module).get("_hf_hook")
        if any(getattr(one, "offload", False) for one in getattr(hook, "hooks", [hook])):
            return "its weights are offloaded, and brought back for each pass"
    return None
