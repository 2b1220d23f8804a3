"""How the loop plugs into transformers: `enable`, `speculate`, `stream`, and the mixin behind them."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, TypeVar, cast

import torch
from torch import Tensor
from transformers import (
    GenerationConfig,
    GenerationMixin,
    LogitsProcessorList,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    StoppingCriteriaList,
)
from transformers.generation.stopping_criteria import MaxLengthCriteria, StopStringCriteria
from transformers.generation.streamers import BaseStreamer

from hf_specgen import attention
from hf_specgen.assistants import ACCEPTED, parts_of, resolve
from hf_specgen.costs import Platform, costs_of
from hf_specgen.draft import Draft, Drafter, Request, named
from hf_specgen.encoder import Source
from hf_specgen.length import Auto, Fixed, Length, Situation, as_length
from hf_specgen.linear import install as install_linear
from hf_specgen.linear import installed as installed_linear
from hf_specgen.linear import uninstall as uninstall_linear
from hf_specgen.loop import Call, decode
from hf_specgen.outputs import Recorder, SpeculativeEncoderDecoderOutput, SpeculativeOutput
from hf_specgen.prompt import Prompt, generative
from hf_specgen.ranks import Ranks
from hf_specgen.refusals import refuse, refuse_config, refuse_mixed, refuse_model, refuse_ranks
from hf_specgen.rows import Ends, Rows
from hf_specgen.sampling import Noise, Processors, fresh_seed
from hf_specgen.stats import Stats, Step
from hf_specgen.target import Target
from hf_specgen.verify import Verifier, by_name
from hf_specgen.walk import Rules, WalkAtOnce, WalkByStep

Model = TypeVar("Model", bound=torch.nn.Module)


@dataclass(frozen=True)
class Options:
    """What a call may say beside the arguments of stock `generate`.

    Attributes:
        assistant: what drafts.
        num_assistant_tokens: how deep to draft: a number, "auto" for what pays by measured costs, or an `Auto` or
            `Fixed`; without it the assistant's own default, which mostly is "auto". The value in a generation config
            is not read, because every config carries stock's 20.
        acceptance: "matching", "rejection", "block", or a verifier.
        seed: makes sampling repeatable and leaves torch's global generator alone; one integer, or one a row.
        stats: is added to.
        streamer: gets the tokens one by one.
        tokenizer: the target's, for stop strings and to compare vocabularies.
        assistant_tokenizer: the drafter's, to compare vocabularies.
        stop_strings: as for stock `generate`.
        prompt_streamed: whether stock `generate` has given the prompt to the streamer already.
        synced_gpus: as for stock `generate`: keep making passes until every rank has finished.
    """

    assistant: Any = None
    num_assistant_tokens: int | str | Length | None = None
    acceptance: str | Verifier | None = "matching"
    seed: int | Sequence[int] | None = None
    stats: Stats | None = None
    streamer: BaseStreamer | None = None
    tokenizer: PreTrainedTokenizerBase | None = None
    assistant_tokenizer: PreTrainedTokenizerBase | None = None
    stop_strings: str | list[str] | None = None
    prompt_streamed: bool = False
    synced_gpus: bool | None = None

    def check(self, batch: int) -> None:
        """Raises ValueError for what no call of `batch` rows can use."""
        if self.assistant is None:
            raise ValueError(f"assistant= is missing; it is {ACCEPTED}")
        if not isinstance(self.stats, Stats | None):
            raise ValueError(f"stats={self.stats!r} is not an hf_specgen.Stats")
        seeds = self.seed if isinstance(self.seed, Sequence) else [self.seed]
        if not all(seed is None or isinstance(seed, int) for seed in seeds):
            raise ValueError(f"seed={self.seed!r} is neither an integer nor a list of one integer a row")
        if isinstance(self.seed, Sequence) and len(self.seed) != batch:
            raise ValueError(f"seed has {len(self.seed)} entries for {batch} rows")


# Options that mean nothing to stock `generate`, and so must not be dropped in silence.
OWN_OPTIONS = ("acceptance", "seed", "stats")


@dataclass(frozen=True)
class Reasons:
    """Why a call has less than everything, in words; None where it has.

    Attributes:
        cropped: why it runs on a `CropCache`.
        chains: why drafts may not branch.
        lockstep: why rows, where there are several, advance together.
    """

    cropped: str | None
    chains: str | None
    lockstep: str | None

    @classmethod
    def of(cls, target: Target, rules: Rules, options: Options) -> Reasons:
        """The reasons of a call."""
        cropped = target.cropped is not None
        chains = lockstep = None
        if not target.trees:
            chains = "a CropCache takes no branches" if cropped else "a recurrent state follows one path"
        if not target.ragged:
            lockstep = "a CropCache cuts all rows alike"
        if rules.verifier.chain_only:
            chains = f"acceptance={rules.verifier.name!r} takes no branches"
        length = min(criterion.max_length for criterion in rules.criteria if isinstance(criterion, MaxLengthCriteria))
        if target.switch is not None and length > target.switch.position:
            lockstep = f"{target.switch.kind} turns all rows by the position of the longest"
        if rules.must_lockstep():
            lockstep = "a logits processor or a stopping criterion looks at the whole batch"
        elif options.streamer is not None:
            lockstep = "the streamer takes a token of every row at a time"
        return cls(target.cropped, chains, lockstep)


@dataclass(frozen=True)
class Prepared:
    """A call with everything that outlives its loop."""

    call: Call
    recorder: Recorder
    config: GenerationConfig
    options: Options
    reasons: Reasons


class Door:
    """A `custom_generate=` callable: transformers prepares inputs, processors and criteria, then calls it.

    transformers reads the callable's signature to learn which keyword arguments it may hand over; it is made from
    `Options`, so that the options have one home.

    Args:
        finish: what becomes of the prepared call.
    """

    def __init__(self, finish: Callable[[Prepared], Any]) -> None:
        self.finish = finish
        stock = ("model", "input_ids", "logits_processor", "stopping_criteria", "generation_config", "inputs_tensor")
        keyword = inspect.Parameter.KEYWORD_ONLY
        self.__signature__ = inspect.Signature(
            [inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD) for name in stock]
            + [inspect.Parameter(field.name, keyword, default=field.default) for field in fields(Options)]
            + [inspect.Parameter("model_kwargs", inspect.Parameter.VAR_KEYWORD)]
        )

    def __call__(self, model: PreTrainedModel, input_ids: Tensor, **kwargs: Any) -> Any:
        """Called by `generate`; raises ValueError for what is not supported before any forward pass."""
        options = Options(**{field.name: kwargs.pop(field.name) for field in fields(Options) if field.name in kwargs})
        processors, criteria = kwargs.pop("logits_processor"), kwargs.pop("stopping_criteria")
        config, inputs = kwargs.pop("generation_config"), kwargs.pop("inputs_tensor", None)
        prompt = Prompt(input_ids, config, kwargs)
        if model.config.is_encoder_decoder:
            source = Source.of(inputs, input_ids.shape[0], kwargs)
            prompt = replace(prompt, prefix="decoder_", source=source)
        return self.finish(prepare(model, prompt, processors, criteria, options))


def prepare(
    model: PreTrainedModel,
    prompt: Prompt,
    processors: LogitsProcessorList,
    criteria: StoppingCriteriaList,
    options: Options,
) -> Prepared:
    """Builds a call, or says by name why there can be none."""
    config, batch = prompt.generation_config, prompt.input_ids.shape[0]
    criteria = _with_stop_strings(criteria, options)
    max_length = min(criterion.max_length for criterion in criteria if isinstance(criterion, MaxLengthCriteria))
    prompt.use_dynamic_default(model)
    refuse(model, prompt, max_length)
    options.check(batch)
    assistant = resolve(options.assistant, model)
    target = Target(model, prompt, hidden_states=bool(config.return_dict_in_generate and config.output_hidden_states))
    seed = fresh_seed() if config.do_sample and options.seed is None else options.seed
    noise = Noise.of(seed, batch, prompt.input_ids.device) if config.do_sample and seed is not None else None
    ranks = Ranks.of(model, prompt.input_ids.device, options.synced_gpus)
    refuse_ranks(target, ranks)
    rules = Rules(
        Processors(processors),
        criteria,
        by_name("matching" if options.acceptance is None else options.acceptance),
        noise,
        ranks=ranks,
    )
    if rules.verifier.all_nodes and not rules.processors.pure:
        raise ValueError(
            f"acceptance={rules.verifier.name!r} needs the scores of every node at once, but some of "
            f"{[type(processor).__name__ for processor in processors]} depend on what was decided; use 'matching'"
        )
    reasons = Reasons.of(target, rules, options)
    together = batch > 1 and reasons.lockstep is not None
    rules = rules.in_lockstep(together)
    chain = reasons.chains is not None
    length = as_length(assistant.tokens if options.num_assistant_tokens is None else options.num_assistant_tokens)
    session = assistant.drafter.start(
        model,
        Request(
            batch=batch,
            chain=chain,
            sampled=noise is not None,
            wants_probs=rules.verifier.wants_probs,
            wants_confidence=not isinstance(length, Fixed),
            processors=rules.processors.for_drafts(),
            eos=rules.eos,
            tokenizer=options.tokenizer,
            assistant_tokenizer=options.assistant_tokenizer,
            source=prompt.source,
        ),
    )
    target.read(session.needs.hidden_layers)
    pad = getattr(config, "_pad_token_tensor", None)
    ends = Ends(max_length, 0 if pad is None else int(pad), together=together and not rules.eos)
    recorder = Recorder(config, batch, prompt.source)
    call = Call(
        target=target,
        rows=Rows(prompt.input_ids, prompt.attention_mask, ends),
        walk=WalkAtOnce(rules, recorder) if rules.prefix_free else WalkByStep(rules, recorder, batch),
        session=session,
        controller=length
        if isinstance(length, Fixed)
        else length.start(_situation(model, target, assistant.drafter, length)),
        noise=noise,
        coupled=rules.verifier.coupled,
        chain=chain,
        stats=Stats() if options.stats is None else options.stats,
        ranks=ranks,
    )
    return Prepared(call, recorder, config, options, reasons)


def _platform(model: PreTrainedModel, device: torch.device) -> Platform:
    """What a model's passes run on."""
    return Platform(torch.get_num_threads(), installed_linear(model)) if device.type == "cpu" else Platform(0)


def _situation(model: PreTrainedModel, target: Target, drafter: Drafter, length: Length) -> Situation:
    """What a controller is told; a fixed length asks for nothing, and is spared the looking."""
    return Situation(
        batch=target.prompt.input_ids.shape[0],
        drafter=named(drafter),
        parts=parts_of(drafter) if isinstance(length, Auto) else (),
        platform=_platform(model, target.device),
        costs=costs_of(model),
        prompt=target.prompt.input_ids.numel(),
    )


def _with_stop_strings(criteria: StoppingCriteriaList, options: Options) -> StoppingCriteriaList:
    if options.stop_strings is None:
        return criteria
    if options.tokenizer is None:
        raise ValueError(
            "stop_strings needs tokenizer=. With custom_generate= transformers hands none over: bind it, "
            "custom_generate=functools.partial(hf_specgen.speculate, tokenizer=tokenizer)"
        )
    return StoppingCriteriaList([*criteria, StopStringCriteria(options.tokenizer, options.stop_strings)])


def _finish(prepared: Prepared) -> Tensor | SpeculativeOutput | SpeculativeEncoderDecoderOutput:
    """Runs a call to its end: what `generate` returns."""
    call = prepared.call
    streamer: Any = prepared.options.streamer
    if streamer is not None and not prepared.options.prompt_streamed:
        streamer.put(call.rows.prompt.cpu())
    for step in decode(call):
        if streamer is not None:
            for column in range(max(map(len, step.tokens))):
                streamer.put(
                    torch.tensor([row[column] if column < len(row) else call.rows.ends.pad for row in step.tokens])
                )
    if streamer is not None:
        streamer.end()
    if not prepared.config.return_dict_in_generate:
        return call.rows.sequences()
    return prepared.recorder.output(call.rows.sequences(), _whole_cache(call), call.stats)


@torch.no_grad()
def _whole_cache(call: Call) -> Any:
    """The cache to go on with. Stock's holds the last token of rows that ended early, so theirs is fed at last."""
    rows, target = call.rows, call.target
    behind = sorted({new for new in rows.generated if new < max(rows.generated)}) if target.ragged else []
    apart = target.follows_length
    for ends in [[new] for new in behind] if apart else [behind] if behind else []:
        idle = [new not in ends for new in rows.generated]
        call.ranks.anyone(True)
        target.verify(rows.roots(), Draft.empty(rows.batch, target.device), idle, ends[0] if apart else None)
        target.cache.commit([None if ended else () for ended in idle])
    while call.ranks.anyone(False):
        target.idle()
    return target.cache.release()


def _steps(prepared: Prepared) -> Iterator[Step]:
    return decode(prepared.call)


speculate = Door(_finish)
speculate.__doc__ = """Speculative decoding as a `custom_generate=` of stock transformers; nothing is enabled.

    model.generate(**inputs, custom_generate=speculate, assistant=drafter)

transformers hands a callable neither streamer nor tokenizer; bind those:

    model.generate(**inputs, custom_generate=functools.partial(speculate, streamer=s, tokenizer=t), assistant=drafter)
"""

_stream = Door(_steps)
_rehearsal = Door(lambda prepared: prepared)


def rehearse(model: torch.nn.Module, **kwargs: Any) -> Prepared:
    """A call as an enabled model's `generate` prepares it, up to its first pass and without it.

    Args:
        model: enabled or not.
        **kwargs: whatever `model.generate(..., assistant=...)` takes.

    Raises:
        ValueError: what `generate` raises.
    """
    inner = generative(model)
    SpecGenMixin._refuse_arguments(cast(SpecGenMixin, inner), kwargs)
    kwargs.pop("custom_generate", None)
    names = ("tokenizer", "assistant_tokenizer", "streamer", "synced_gpus")
    bound = {name: kwargs.pop(name) for name in names if name in kwargs}
    # A class's own `generate` may compute (Whisper's does) before it comes to the common one.
    plain: Any = getattr(type(model), "_plain_class", type(model))
    own = isinstance(model, PreTrainedModel) and plain.generate is not GenerationMixin.generate
    generate: Any = functools.partial(GenerationMixin.generate, inner) if own else model.generate
    # The one thing that stock's preparation notes on a model: how long static caches have been.
    noted, name = vars(inner), "_previous_max_cache_length"
    before = {name: noted[name]} if name in noted else {}
    try:
        prepared: Prepared = generate(custom_generate=functools.partial(_rehearsal, **bound), **kwargs)
    finally:
        noted.pop(name, None)
        noted.update(before)
    return prepared


def stream(model: torch.nn.Module, inputs: Tensor | None = None, **kwargs: Any) -> Iterator[Step]:
    """Decodes round by round: a generator of steps, without a thread.

    Args:
        model: enabled or not.
        inputs: prompt ids, unless given as `input_ids=`.
        **kwargs: whatever `model.generate(..., assistant=...)` takes, but for a streamer.

    Returns:
        An iterator of `Step`; the first one is the prompt's pass. Errors are raised here, before the first step.
    """
    if kwargs.pop("streamer", None) is not None:
        raise ValueError("stream() yields the tokens itself; it takes no streamer=")
    if kwargs.get("adapter_names") is not None:
        raise ValueError("PEFT forgets adapter_names= when generate() returns, and stream() decodes after that")
    bound = {name: kwargs.pop(name) for name in ("tokenizer", "assistant_tokenizer", "synced_gpus") if name in kwargs}
    generate: Any = model.generate
    steps: Iterator[Step] = generate(inputs, custom_generate=functools.partial(_stream, **bound), **kwargs)
    return steps


class SpecGenMixin(GenerationMixin):
    """A GenerationMixin whose `generate` takes `assistant=`. `enable` puts it under a model; a class may inherit it."""

    config: Any

    def generate(self, *args: Any, assistant: Any = None, **kwargs: Any) -> Any:
        """Stock `generate`, and with `assistant=` the same tokens faster.

        Args:
            *args: as for stock.
            assistant: "auto", a drafter, a causal LM that drafts, or a dict with vLLM's field names. None: stock,
                untouched.
            **kwargs: as for stock, and `num_assistant_tokens`, `acceptance`, `seed`, `stats`, `tokenizer`,
                `assistant_tokenizer`; see `Options`.

        Returns:
            What stock returns; with `return_dict_in_generate=True` a `SpeculativeOutput`.

        Raises:
            ValueError: for what is not supported, before the first forward pass.
        """
        if assistant is None:
            stray = [name for name in OWN_OPTIONS if kwargs.get(name) is not None]
            if not isinstance(kwargs.get("num_assistant_tokens"), int | None):  # a number is stock's own argument
                stray.append("num_assistant_tokens")
            if stray:
                raise ValueError(
                    f"{', '.join(stray)} without assistant=: stock generate knows no such argument; "
                    "pass assistant=hf_specgen.Plain() to decode plainly in this package's loop"
                )
            return super().generate(*args, **kwargs)
        self._refuse_arguments(kwargs)
        door = kwargs.pop("custom_generate", None) or speculate
        if (length := kwargs.pop("num_assistant_tokens", None)) is not None:
            # Models with a `generate` of their own (Whisper) would put it into a config, where nobody reads it.
            door = functools.partial(door, num_assistant_tokens=length)
        return super().generate(*args, assistant=assistant, custom_generate=door, **kwargs)

    def _refuse_arguments(self, kwargs: dict[str, Any]) -> None:
        """What stock `generate` would act on before a callable is ever called."""
        for name in ("assistant_model", "prompt_lookup_num_tokens", "use_mtp", "assistant_early_exit"):
            if kwargs.get(name):
                raise ValueError(f"{name}= asks for stock assisted generation; pass it or assistant=, not both")
        if kwargs.get("custom_generate") is not None and not _is_door(kwargs["custom_generate"]):
            raise ValueError("custom_generate= replaces the decoding loop, and so does assistant=; pass one of them")
        if kwargs.get("return_token_timestamps"):
            raise ValueError("return_token_timestamps= reads the attentions of every token, which assistant= has not")
        if kwargs.get("cache_implementation") == "paged":
            raise ValueError("cache_implementation='paged' is continuous batching, which assistant= does not take")
        refuse_mixed(self, kwargs.get("cache", kwargs.get("past_key_values")))

    def _validate_generation_mode(
        self, generation_mode: Any, generation_config: GenerationConfig, generation_mode_kwargs: dict[str, Any]
    ) -> None:
        """As stock; and where stock runs an encoder before it calls our callable, says already here what cannot be."""
        stock: Any = super()
        stock._validate_generation_mode(generation_mode, generation_config, generation_mode_kwargs)
        if generation_mode_kwargs.get("assistant") is None:
            return
        if self.config.is_encoder_decoder or stock._supports_mm_encoder_outputs():
            refuse_config(generation_config)
            refuse_model(self, max_length=0)

    def init_continuous_batching(self, *args: Any, **kwargs: Any) -> Any:
        """As stock, which knows attention functions by stock's names only."""
        attention.uninstall(cast(torch.nn.Module, self))
        return super().init_continuous_batching(*args, **kwargs)

    def generate_batch(self, *args: Any, **kwargs: Any) -> Any:
        """As stock."""
        try:
            return super().generate_batch(*args, **kwargs)
        finally:
            attention.install(cast(torch.nn.Module, self))

    def _extract_generation_mode_kwargs(
        self, custom_generate: Any, kwargs: dict[str, Any], synced_gpus: Any, assistant_model: Any, streamer: Any
    ) -> dict[str, Any]:
        """Keeps for our own callable what stock takes away from every callable: streamer, tokenizers, synced_gpus."""
        kept = {name: kwargs.get(name) for name in ("tokenizer", "assistant_tokenizer")} | {"synced_gpus": synced_gpus}
        mode: dict[str, Any] = super()._extract_generation_mode_kwargs(
            custom_generate, kwargs, synced_gpus, assistant_model, streamer
        )
        if _behind(custom_generate) is speculate:
            mode.update({name: value for name, value in kept.items() if value is not None})
            if streamer is not None:
                mode.update(streamer=streamer, prompt_streamed=True)
        return mode


def _behind(custom_generate: Any) -> Any:
    """The callable without the arguments that are bound to it."""
    while isinstance(custom_generate, functools.partial):
        custom_generate = custom_generate.func
    return custom_generate


def _is_door(custom_generate: Any) -> bool:
    return isinstance(_behind(custom_generate), Door)


@functools.cache
def _enabled_class(plain: Any) -> Any:
    """`plain` with the mixin in front, under the same name: what prints or saves the name must not change."""
    body = {
        "__module__": plain.__module__,
        "__qualname__": plain.__qualname__,
        "__doc__": plain.__doc__,
        "__reduce_ex__": lambda self, protocol: (_revived, (plain,), self.__dict__),
        "_plain_class": plain,
    }
    return type(plain.__name__, (SpecGenMixin, plain), body)


def _revived(plain: Any) -> PreTrainedModel:
    """Pickle looks a class up by its name and would find the plain one; so it is made anew from that."""
    enabled = _enabled_class(plain)
    model: PreTrainedModel = enabled.__new__(enabled)
    return model


def enable(model: Model, linear: str | None = None) -> Model:
    """Makes `model.generate` take `assistant=`. Twice is harmless; `disable` undoes it.

    The model's class becomes a subclass of itself, and sdpa attention becomes one that does not copy keys and values to
    all query heads. Without `assistant=` the model generates as before.

    Args:
        model: a transformers model that can generate, or a wrapper around one.
        linear: how linear layers on the CPU multiply by few tokens: "packed", by far the fastest, at the price of a
            second copy of their weights; "transposed", without one; None leaves them as they are, stock at first.
            Another value switches. See `hf_specgen.linear`.

    Returns:
        The same model.

    Raises:
        ValueError: no layer can multiply as `linear` says.
    """
    inner = generative(model)
    if linear is not None:
        install_linear(inner, linear)
    if not isinstance(inner, SpecGenMixin):
        kind: Any = type(inner)
        inner.__class__ = _enabled_class(kind)
        attention.install(inner)
    return model


def disable(model: Model) -> Model:
    """Undoes `enable`. Harmless on a model that is not enabled.

    Args:
        model: what was enabled.

    Returns:
        The same model.

    Raises:
        ValueError: another class was put over the enabled one since.
    """
    inner = generative(model)
    plain = getattr(type(inner), "_plain_class", None)
    if plain is not None:
        if "_plain_class" not in vars(type(inner)):
            raise ValueError(
                f"the class {type(inner).__name__} was put over the enabled one, as fully_shard does, and would be "
                "lost: disable the model first"
            )
        attention.uninstall(inner)
        uninstall_linear(inner)
        inner.__class__ = plain
    return model
