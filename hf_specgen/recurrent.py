"""Recurrent layers under speculation: gated delta nets, state-space mixers, short convolutions.

Their state is a sum over all tokens, so rejected ones cannot be cut off it. A pass over several tokens therefore reads
the committed state and never writes it. Afterwards each row's state is advanced over the tokens it keeps:

- the window of the convolution is kept together with the pass's inputs, and each row takes its own part (a copy);
- a row that keeps the whole pass takes the state the model computed;
- otherwise the state follows in closed form from the convolution's inputs and the gates of the pass, which forward
  hooks on the gate projections note down: one small solve or product a layer, no second pass through the mixers.

A token that a row does not keep gets a gate that neither decays nor writes. Padding rows on the left and running the
mixer again would be silently wrong: a zero input still decays the state.

Such a pass cannot branch: a state has one past.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.hooks import RemovableHandle
from transformers.activations import ACT2FN
from transformers.cache_utils import LinearAttentionCacheLayerMixin, LinearAttentionLayer


@dataclass(frozen=True)
class Gates:
    """What a pass put into a mixer's recurrence, token by token, after the convolution.

    Attributes:
        mixed: `(batch, width, channels)`, the convolution's output.
        recorded: the outputs of the gate projections, `(batch, width, ...)` each.
        kept: `(batch, width)` bool: the row keeps the token.
    """

    mixed: Tensor
    recorded: tuple[Tensor, ...]
    kept: Tensor


def gated_delta(mixer: Any, state: Tensor, write: Tensor, decay: Tensor, gates: Gates) -> Tensor:
    """The state of a gated delta net (arXiv 2412.06464) after the kept tokens, in the WY form of arXiv 2406.06484.

    With cumulative log decays G and write strengths b, the corrections u solve the unit lower triangular system
    `u_i + b_i sum_{j<i} exp(G_i - G_j) (k_i . k_j) u_j = b_i (v_i - exp(G_i) S^T k_i)`, and the state becomes
    `exp(G_n) S + sum_i exp(G_n - G_i) k_i u_i^T`.

    Args:
        mixer: the layer's module.
        state: `(batch, heads, key_dim, value_dim)` before the pass.
        write: `(batch, width, heads)`, b before the rows' choice.
        decay: `(batch, width, heads)`, the input of the decay's softplus, without its bias.
        gates: of the pass.
    """
    batch, width = gates.kept.shape
    _, key, value = torch.split(gates.mixed, [mixer.key_dim, mixer.key_dim, mixer.value_dim], dim=-1)
    key = key.reshape(batch, width, -1, mixer.head_k_dim)
    value = value.reshape(batch, width, -1, mixer.head_v_dim).transpose(1, 2).float()
    key = key.repeat_interleave(value.shape[1] // key.shape[2], dim=2).transpose(1, 2).float()
    key = key * torch.rsqrt((key * key).sum(-1, keepdim=True) + 1e-6)
    log_decay = -mixer.A_log.float().exp() * F.softplus(decay.float() + mixer.dt_bias)
    kept = gates.kept.unsqueeze(-1)
    total = (log_decay * kept).transpose(1, 2).cumsum(-1)  # (batch, heads, width)
    strength = (write.float() * kept).transpose(1, 2).unsqueeze(-1)
    before = state.float()
    reach = (total.unsqueeze(-1) - total.unsqueeze(-2)).tril(-1).exp()
    system = (strength * reach * (key @ key.transpose(-1, -2))).tril(-1)
    wanted = strength * (value - total.exp().unsqueeze(-1) * (key @ before))
    corrections = torch.linalg.solve_triangular(system, wanted, upper=False, unitriangular=True)
    end = total[..., -1:]
    late = (end - total).exp().unsqueeze(-1)
    after: Tensor = end.exp().unsqueeze(-1) * before + (late * key).transpose(-1, -2) @ corrections
    return after


def _two_gates(mixer: Any, state: Tensor, gates: Gates) -> Tensor:
    """Qwen 3.5, OLMo hybrid: a projection for the write strength and one for the decay."""
    write, decay = gates.recorded
    # Some let the transition have negative eigenvalues (arXiv 2411.12537).
    scale = 2.0 if getattr(mixer, "allow_neg_eigval", False) else 1.0
    return gated_delta(mixer, state, scale * write.sigmoid(), decay, gates)


def _joined_gates(mixer: Any, state: Tensor, gates: Gates) -> Tensor:
    """Qwen3-Next: one projection for both, laid out by key head."""
    joined = gates.recorded[0]
    share = mixer.num_v_heads // mixer.num_k_heads
    both = joined.reshape(*joined.shape[:2], mixer.num_k_heads, 2, share)
    write, decay = (both[:, :, :, part].flatten(2) for part in (0, 1))
    return gated_delta(mixer, state, write.sigmoid(), decay, gates)


def state_space(mixer: Any, state: Tensor, gates: Gates) -> Tensor:
    """The state of a Mamba-2 mixer (arXiv 2405.21060) after the kept tokens.

    With time steps t and cumulative log decays G it is `exp(G_n) S + sum_i exp(G_n - G_i) t_i x_i B_i^T`.

    Args:
        mixer: the layer's module.
        state: `(batch, heads, head_dim, state_size)` before the pass.
        gates: of the pass; recorded is the whole input projection, whose last part are the time steps.
    """
    batch, width = gates.kept.shape
    groups, size = mixer.n_groups, mixer.ssm_state_size
    inputs, b, _ = torch.split(gates.mixed, [mixer.intermediate_size, groups * size, groups * size], dim=-1)
    inputs = inputs.reshape(batch, width, mixer.num_heads, -1).float()
    b = b.reshape(batch, width, groups, size).repeat_interleave(mixer.num_heads // groups, dim=2).float()
    step = gates.recorded[0][..., -mixer.num_heads :]
    multiplier = getattr(mixer, "mup_vector", None)  # Falcon-H1 scales its projections
    if multiplier is not None:
        step = step * multiplier[..., -mixer.num_heads :]
    step = F.softplus(step + mixer.dt_bias.to(step.dtype)).float() * gates.kept.unsqueeze(-1)
    total = (-mixer.A_log.float().exp() * step).cumsum(1)  # (batch, width, heads)
    weight = step * (total[:, -1:] - total).exp()
    gained = torch.einsum("bwh,bwhp,bwhn->bhpn", weight, inputs, b)
    after: Tensor = total[:, -1].exp()[..., None, None] * state.float() + gained
    return after


@dataclass(frozen=True)
class Recurrence:
    """How a kind of mixer moves its state.

    Attributes:
        projections: names of the submodules whose outputs hold the gates.
        advance: `(mixer, state, gates) -> state`.
    """

    projections: tuple[str, ...]
    advance: Callable[[Any, Tensor, Gates], Tensor]


_STATE_SPACE = Recurrence(("in_proj",), state_space)
_QWEN = Recurrence(("in_proj_b", "in_proj_a"), _two_gates)
# A mixer is known by its class. What is not in here is refused: a state that is moved wrongly shows in no error.
RECURRENCES: dict[str, Recurrence | None] = {
    "Qwen3_5GatedDeltaNet": _QWEN,
    "Qwen3_5MoeGatedDeltaNet": _QWEN,
    "LaraMiniGatedDeltaNet": _QWEN,
    "Qwen3NextGatedDeltaNet": Recurrence(("in_proj_ba",), _joined_gates),
    "OlmoHybridGatedDeltaNet": Recurrence(("b_proj", "a_proj"), _two_gates),
    "FalconH1Mixer": _STATE_SPACE,
    "BambaMixer": _STATE_SPACE,
    "GraniteMoeHybridMambaLayer": _STATE_SPACE,
    "Mamba2Mixer": _STATE_SPACE,
    "NemotronHMamba2Mixer": _STATE_SPACE,
    "Zamba2MambaMixer": _STATE_SPACE,
    # A convolution and nothing behind it.
    "Lfm2ShortConv": None,
    "Lfm2MoeShortConv": None,
    "Lfm3ShortConv": None,
}
# Mixers whose own pass over several tokens does not go on from the cached state: stock gives other logits than it
# gives token by token.
FORGETFUL = frozenset({"MambaMixer", "FalconMambaMixer", "JambaMambaMixer", "ZambaMambaMixer"})


def mixers(model: nn.Module) -> dict[int, nn.Module]:
    """The recurrent mixers of a model that are known here, by layer."""
    found: dict[int, nn.Module] = {}
    for module in model.modules():
        if type(module).__name__ in RECURRENCES:
            index: Any = module.layer_idx
            found[index] = module
    return found


def why_not_recurrent(model: nn.Module, layers: Sequence[Any]) -> str | None:
    """Why the recurrent layers of an empty cache cannot be served, in words; None if they can, or if there are none."""
    recurrent = [index for index, layer in enumerate(layers) if isinstance(layer, LinearAttentionCacheLayerMixin)]
    if not recurrent:
        return None
    known = mixers(model)
    for index in recurrent:
        if index not in known:
            return _unknown(model, index)
    for index in recurrent:
        mixer: Any = known[index]
        name = type(mixer).__name__
        if RECURRENCES[name] is _STATE_SPACE and tuple(mixer.time_step_limit or ()) != (0.0, float("inf")):
            return (
                f"{name} bounds its time step to {tuple(mixer.time_step_limit)} in passes over several tokens and not "
                "in passes over one, so that checking a draft is not decoding"
            )
        if any(parameter.device.type == "meta" for parameter in mixer.parameters()):
            return f"the weights of {name} in layer {index} are offloaded"
    return None


@dataclass(frozen=True)
class Kept:
    """What the rows keep of a pass.

    Attributes:
        counts: `(batch,)` tokens, 0 to width.
        width: tokens of the pass.
        whole: every row keeps all of it.
        in_part: some row keeps some tokens and not others.
    """

    counts: Tensor
    width: int
    whole: bool
    in_part: bool

    @classmethod
    def of(cls, counts: Sequence[int], width: int, device: torch.device) -> Kept:
        """From a count a row, so that nothing is read from the device."""
        whole, in_part = min(counts) == width, any(0 < count < width for count in counts)
        return cls(torch.tensor(counts, device=device), width, whole, in_part)


# Windows and states, by index.
Snapshot = tuple[dict[int, Tensor | None], dict[int, Tensor | None]]


def _unknown(model: nn.Module, index: int) -> str:
    """Why a layer whose mixer is not in the table is not served."""
    kinds = [type(module).__name__ for module in model.modules() if getattr(module, "layer_idx", None) == index]
    if forgetful := [kind for kind in kinds if kind in FORGETFUL]:
        return f"passes of {forgetful[0]} over several tokens do not go on from its cache, so they are not decoding"
    mixer = f" ({', '.join(kinds)})" if kinds else ""
    return f"how the recurrent state of layer {index}{mixer} moves is not known here"


class RecurrentLayer(LinearAttentionCacheLayerMixin):
    """One mixer's window and state.

    In a pass over one token that every row keeps, the model writes them in place, as with stock's layer. In any other
    pass it reads them, and what it would have written waits for `commit`.

    Args:
        stock: the layer that the prompt's pass filled; its tensors are taken over.
        mixer: the module that this layer belongs to.
    """

    is_croppable = True

    def __init__(self, stock: LinearAttentionLayer, mixer: nn.Module) -> None:
        super().__init__(stock.number_of_states)
        self.mixer: Any = mixer
        self.recurrence = RECURRENCES[type(mixer).__name__]
        self.take_over(stock)
        self._windows: dict[int, Tensor] = {}
        self._committed: dict[int, Tensor | None] = {}
        self._pending: dict[int, Tensor | None] = {}
        self._recorded: dict[str, Tensor] = {}
        self._thread: int | None = None
        self._undecided = False
        names = self.recurrence.projections if self.recurrence else ()
        hand_over = [(name, _HandOver(name, weakref.ref(self))) for name in names]
        hooks = [getattr(mixer, name).register_forward_hook(hook) for name, hook in hand_over]
        # They go with the layer, if nobody takes them off before.
        self.close = weakref.finalize(self, _remove, hooks)

    def take_over(self, stock: LinearAttentionLayer) -> None:
        """Holds what a stock layer holds."""
        self.conv_states, self.recurrent_states = dict(stock.conv_states), dict(stock.recurrent_states)
        self.conv_kernel_size = dict(stock.conv_kernel_size)
        self.has_previous_state = dict(stock.has_previous_state)

    def give_back(self, stock: LinearAttentionLayer) -> None:
        """Puts window and state into a stock layer, as of the last commit."""
        state = self._committed if self._undecided else self.recurrent_states
        for mine, theirs in ((self.conv_states, stock.conv_states), (state, stock.recurrent_states)):
            theirs.update(_copied(mine))

    def record(self, name: str, output: Tensor) -> None:
        """Notes down a gate projection's output, if it is of this call's pass."""
        # Other calls run the same mixer, in other threads at the same time.
        if self._thread == threading.get_ident():
            self._recorded[name] = output

    def begin(self, width: int, in_place: bool) -> None:
        """Announces a pass over `width` tokens a row; `in_place`: of one token, which every row will keep."""
        self.record_past = not in_place
        self._pending, self._undecided = {}, not in_place
        if in_place:
            return
        self._thread = threading.get_ident() if width > 1 else None
        # At one token some mixers write their state in place, whatever they were given.
        self._committed = dict(self.recurrent_states)
        if width == 1:
            self.recurrent_states = self._pending = _copied(self._committed)

    def lazy_initialization(self, *args: Any, **kwargs: Any) -> None:
        """Called for a layer that the prompt's pass did not fill, which cannot happen."""
        raise AssertionError("a recurrent layer is filled from the prompt's pass")

    def update_conv_state(self, conv_states: Tensor, state_idx: int = 0, **kwargs: Any) -> Tensor:
        """Called by the mixer: the window and the pass's inputs behind it, `(batch, channels, kernel + width)`."""
        window: Any = self.conv_states[state_idx]
        both = torch.cat([window, conv_states], dim=-1)
        if self.record_past:
            self._windows[state_idx] = both
        else:
            window.copy_(both[..., -window.shape[-1] :])
        return both

    def update_recurrent_state(self, recurrent_states: Tensor, state_idx: int = 0, **kwargs: Any) -> Tensor:
        """Called by the mixer with the state after the whole pass."""
        if self.record_past:
            self._pending[state_idx] = recurrent_states
            return recurrent_states
        held: Any = self.recurrent_states[state_idx]
        return cast(Tensor, held.copy_(recurrent_states))

    def commit(self, kept: Kept) -> None:
        """Keeps for each row its first tokens of the pass."""
        if not self.record_past:
            return
        self._thread, self._undecided = None, False
        counts = kept.counts.to(self.mixer_device)
        for index, both in self._windows.items():
            part = both[..., kept.width :].contiguous() if kept.whole else _window(both, counts, kept.width)
            self.conv_states[index] = part
        for index, before in self._committed.items():
            if before is None:
                continue
            if kept.in_part:
                self.recurrent_states[index] = self._advanced(before, counts, kept.width)
                continue
            after: Any = self._pending[index]
            after = after.to(before.dtype)
            keeps = (counts > 0).view(-1, *[1] * (before.ndim - 1))
            self.recurrent_states[index] = after if kept.whole else after.where(keeps, before)
        self._windows, self._pending, self._recorded = {}, {}, {}

    @property
    def mixer_device(self) -> torch.device:
        """Where the window and the state are."""
        window: Any = self.conv_states[0]
        return cast(torch.device, window.device)

    def _advanced(self, before: Tensor, counts: Tensor, width: int) -> Tensor:
        assert self.recurrence is not None
        conv, both = self.mixer.conv1d, self._windows[0]
        # The convolution's window ends with the token itself: the oldest kept input is not seen any more.
        mixed = F.conv1d(both[..., -(width + conv.kernel_size[0] - 1) :], conv.weight, conv.bias, groups=both.shape[1])
        mixed = ACT2FN[self.mixer.activation](mixed).transpose(1, 2)
        kept = torch.arange(width, device=counts.device) < counts.unsqueeze(1)
        recorded = tuple(self._recorded[name] for name in self.recurrence.projections)
        return self.recurrence.advance(self.mixer, before, Gates(mixed, recorded, kept)).to(before.dtype)

    def snapshot(self) -> Snapshot:
        """Window and state as committed, safe from what comes."""
        return _copied(self.conv_states), _copied(self.recurrent_states)

    def restore(self, snapshot: Snapshot) -> None:
        """Goes back to a snapshot, which is used up."""
        self.conv_states, self.recurrent_states = snapshot


class _HandOver:
    """A forward hook that hands a projection's outputs to a layer; its copy, in a copied model, hands over nothing.

    Args:
        name: of the projection.
        layer: weak, since the hook lies on the user's model.
    """

    def __init__(self, name: str, layer: weakref.ref[RecurrentLayer] | None = None) -> None:
        self.name = name
        self.layer = layer

    def __call__(self, module: nn.Module, args: Any, output: Tensor) -> None:
        held = None if self.layer is None else self.layer()
        if held is not None:
            held.record(self.name, output)

    def __reduce__(self) -> tuple[type[_HandOver], tuple[str]]:
        return _HandOver, (self.name,)


def _remove(hooks: list[RemovableHandle]) -> None:
    for hook in hooks:
        hook.remove()


def _window(both: Tensor, counts: Tensor, width: int) -> Tensor:
    """Each row's part of the window and the inputs behind it, `(batch, channels, kernel)`."""
    kernel = both.shape[-1] - width
    columns = counts.view(-1, 1, 1) + torch.arange(kernel, device=both.device)
    return both.gather(2, columns.expand(-1, both.shape[1], -1))


def _copied(states: dict[int, Tensor | None]) -> dict[int, Tensor | None]:
    return {index: None if state is None else state.clone() for index, state in states.items()}
