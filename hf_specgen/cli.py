"""`hf-specgen`: the package from a shell."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Annotated, Any

import torch
import transformers
import typer
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerBase

import hf_specgen as sg

app = typer.Typer(help="Speculative decoding for Hugging Face models.", no_args_is_help=True, add_completion=False)

DRAFTED = typer.colors.GREEN


def _versions(asked: bool) -> None:
    if asked:
        typer.echo(f"hf_specgen {sg.__version__}, transformers {transformers.__version__}, torch {torch.__version__}")
        raise typer.Exit


@app.callback()
def main(
    version: Annotated[
        bool, typer.Option("--version", callback=_versions, is_eager=True, help="Print versions and stop.")
    ] = False,
) -> None:
    """Speculative decoding for Hugging Face models."""


@dataclass
class Text:
    """Turns tokens into pieces of text as they come; a piece may have to wait for the rest of a character.

    Args:
        tokenizer: of the target.
    """

    tokenizer: PreTrainedTokenizerBase
    _ids: list[int] = field(default_factory=list)
    _shown: int = 0  # ids whose text is out
    _start: int = 0  # where decoding starts: a token's text may depend on the one before

    def add(self, token: int) -> str:
        """The text that `token` completes; empty while a character is incomplete."""
        self._ids.append(token)
        before = self._decode(self._ids[self._start : self._shown])
        after = self._decode(self._ids[self._start :])
        if after.endswith("�") or len(after) <= len(before):
            return ""
        self._start, self._shown = self._shown, len(self._ids)
        return after[len(before) :]

    def _decode(self, ids: list[int]) -> str:
        return str(self.tokenizer.decode(ids, skip_special_tokens=True))


def pieces(steps: Iterable[sg.Step], tokenizer: PreTrainedTokenizerBase) -> Iterator[tuple[str, bool]]:
    """The text of the first row as it comes, each piece with whether a drafted token brought it."""
    text = Text(tokenizer)
    for step in steps:
        for place, token in enumerate(step.tokens[0]):
            if piece := text.add(token):
                yield piece, place < step.accepted[0]


ASSISTANTS = '"auto", "ngram", "plain", the path or hub id of a trained drafter or a model, or a config in JSON.'


def parse_assistant(assistant: str) -> Any:
    """What `--assistant` names: "ngram", "plain", a dict in JSON, or what `assistant=` takes as a string."""
    if assistant == "ngram":
        return sg.PromptLookup()
    if assistant == "plain":
        return sg.Plain()
    if assistant.startswith("{"):
        try:
            return json.loads(assistant)
        except json.JSONDecodeError as error:
            raise typer.BadParameter(f"--assistant {assistant!r} is not JSON: {error}") from error
    return assistant


@app.command()
def generate(
    prompt: Annotated[str, typer.Argument(help="The prompt; - reads standard input.")],
    model: Annotated[str, typer.Option(help="Path or hub id of the target.")],
    assistant: Annotated[str, typer.Option(help=ASSISTANTS)] = "auto",
    max_new_tokens: Annotated[int, typer.Option(min=1)] = 256,
    raw: Annotated[bool, typer.Option("--raw", help="No chat template.")] = False,
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", help="name=value for generate, e.g. --set temperature=0.7 --set do_sample=true"),
    ] = None,
) -> None:
    """Streams a completion; what was drafted and accepted is green. Counts go to standard error."""
    with _told():
        tokenizer = AutoTokenizer.from_pretrained(model)
        target: Any = AutoModelForCausalLM.from_pretrained(model, dtype="auto")
    target = sg.enable(target.to("cuda" if torch.cuda.is_available() else "cpu").eval())
    inputs = encode(tokenizer, sys.stdin.read() if prompt == "-" else prompt, raw).to(target.device)
    stats = sg.Stats()
    with _told():
        steps = sg.stream(
            target,
            **inputs,
            assistant=parse_assistant(assistant),
            max_new_tokens=max_new_tokens,
            stats=stats,
            tokenizer=tokenizer,
            **dict(map(_setting, settings or [])),
        )
    for piece, drafted in pieces(steps, tokenizer):
        typer.secho(piece, fg=DRAFTED if drafted else None, nl=False)
    typer.echo()
    typer.echo(summary(stats), err=True)


@app.command()
def check(
    model: Annotated[str, typer.Argument(help="Path or hub id of the target.")],
    assistant: Annotated[str | None, typer.Option(help=ASSISTANTS)] = None,
    batch: Annotated[int, typer.Option(min=1, help="Rows.")] = 1,
    probe: Annotated[
        bool, typer.Option("--probe", help="Compare passes over several cached tokens with one; minutes on a CPU.")
    ] = False,
    settings: Annotated[
        list[str] | None, typer.Option("--set", help="name=value for generate, e.g. --set max_new_tokens=500")
    ] = None,
) -> None:
    """Says what a call will use, and what is refused, before it runs. Exits with 1 if it is refused."""
    with _told():
        config = AutoConfig.from_pretrained(model)
        kind = getattr(transformers, (config.architectures or [""])[0], AutoModelForCausalLM)
        target: Any = kind.from_pretrained(model, dtype="auto")
    drafts = None if assistant is None else parse_assistant(assistant)
    published = drafts.get("model") if isinstance(drafts, dict) else None if drafts == "auto" else drafts
    with _told():
        report = sg.check(
            target.to("cuda" if torch.cuda.is_available() else "cpu").eval(),
            drafts,
            probe=probe,
            batch=batch,
            tokenizer=_tokenizer(model),
            assistant_tokenizer=_tokenizer(published),
            **dict(map(_setting, settings or [])),
        )
    typer.echo(str(report))
    raise typer.Exit(0 if report.ok else 1)


@app.command()
def export(
    drafter: Annotated[
        str, typer.Argument(help='Path or hub id of heads or a model, "ngram", "suffix", or a config in JSON.')
    ],
    to: Annotated[str, typer.Option(help="vllm, speculators, sglang, tgi, trtllm or lmdeploy.")],
    out: Annotated[str, typer.Option(help="The folder to write.")],
    target: Annotated[str | None, typer.Option(help="Path or hub id of the target, unless heads remember it.")] = None,
    num_speculative_tokens: Annotated[int | None, typer.Option(min=1, help="How deep the engine is to draft.")] = None,
    dtype: Annotated[str | None, typer.Option(help="float32, float16 or bfloat16; else as it is.")] = None,
) -> None:
    """Writes a drafter as another engine loads it, and prints the command and the config that start it."""
    given = parse_assistant(drafter) if drafter.startswith("{") else drafter
    with _told():
        made = sg.export(given, to, out, target, num_speculative_tokens, dtype)
    typer.echo(f"{made.path}\n\n{made.command}\n\n{json.dumps(made.config, indent=2)}")
    for note in made.notes:
        typer.echo(f"note: {note}", err=True)


@contextmanager
def _told() -> Iterator[None]:
    """Turns what cannot be loaded or is refused into one message."""
    try:
        yield
    except (OSError, ValueError) as error:
        raise typer.BadParameter(str(error)) from error


def _tokenizer(model: Any) -> PreTrainedTokenizerBase | None:
    """The tokenizer that is kept with a model's weights, if there is one."""
    if not isinstance(model, str):
        return None
    try:
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(model)
    except (OSError, ValueError):
        return None
    return tokenizer


def encode(tokenizer: PreTrainedTokenizerBase, prompt: str, raw: bool = False) -> Any:
    """The prompt's ids and mask, through the chat template where the tokenizer has one."""
    if raw or tokenizer.chat_template is None:
        return tokenizer(prompt, return_tensors="pt")
    turn = [{"role": "user", "content": prompt}]
    return tokenizer.apply_chat_template(turn, add_generation_prompt=True, return_tensors="pt", return_dict=True)


def summary(stats: sg.Stats) -> str:
    """One line of what a call did."""
    decoding_s = stats.seconds - stats.prefill_s
    speed = (stats.tokens - stats.first_tokens) / decoding_s if decoding_s else 0.0
    return (
        f"{stats.tokens} tokens in {stats.rounds} rounds, {stats.mean_accepted_tokens:.2f} a round, "
        f"{stats.accepted} of {stats.drafted} drafted tokens accepted, {speed:.1f} tokens/s after the first"
    )


def _setting(text: str) -> tuple[str, Any]:
    name, equals, value = text.partition("=")
    if not equals:
        raise typer.BadParameter(f"--set takes name=value, not {text!r}")
    try:
        return name, json.loads(value)
    except json.JSONDecodeError:
        return name, value
