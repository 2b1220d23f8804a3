"""Writes the model card of a drafter, README.md beside its weights, from `provenance.json` and `report.json`.

Training and report write it by themselves. Run it to say what they cannot know, such as the hub id of a target that was
loaded from a folder:

    python training/card.py build/medusa --base_model HuggingFaceTB/SmolLM2-135M-Instruct --license apache-2.0
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from huggingface_hub import ModelCardData
from measures.showing import limits_of
from running import provenance

from hf_specgen.files import write_whole
from hf_specgen.heads.eagle import EagleConfig
from hf_specgen.heads.medusa import MedusaConfig

REPORT, PICTURE = "report.json", "report.png"

USE = """\
```python
import hf_specgen as sg

model, inputs = ...  # {base}, and a prompt's ids and mask
sg.enable(model)
model.generate(**inputs, assistant="{name}", max_new_tokens=256)
```

The text is the one that the model writes without a drafter; only the time differs. vLLM, SGLang
and others load layouts of their own, or say that they take none of this kind:

```
hf-specgen export {name} --to vllm --target TARGET --out DIR    # prints the command that starts it
```
"""


def write(folder: str | Path) -> Path:
    """Writes the card of a folder.

    Args:
        folder: with `provenance.json`, and with `report.json` where there is one.

    Returns:
        The card's path.

    Raises:
        ValueError: the folder does not say where its weights come from.
    """
    folder = Path(folder)
    told = provenance.read(folder)
    if told is None:
        raise ValueError(f"{folder} holds no {provenance.FILE}: a card is written for what a training script has saved")
    measured = folder / REPORT
    report = json.loads(measured.read_text(encoding="utf-8")) if measured.is_file() else None
    card = folder / "README.md"
    kind, title = _what(folder)
    name = folder.resolve().name
    base = told["target"].get("repository") or told["target"].get("name") or "its target"
    parts = [
        f"---\n{_front(told, base, kind)}\n---\n",
        f"# {name}\n\n{title} for {base}: drafts for speculative decoding with hf_specgen.\n",
        f"## Use\n\n{USE.format(base=base, name=name)}",
        f"## Training\n\n{_training(told)}",
        f"## Measured\n\n{_measured(report, (folder / PICTURE).is_file())}",
    ]
    write_whole(card, "\n".join(parts))
    return card


def _what(folder: Path) -> tuple[str, str]:
    """The kind of drafter, for a tag, and in words."""
    held = folder / "config.json"
    told = json.loads(held.read_text(encoding="utf-8")) if held.is_file() else {}
    if told.get("model_type") == MedusaConfig.model_type:
        return "medusa", f"{MedusaConfig.from_pretrained(folder).num_heads} Medusa heads"
    if told.get("model_type") == EagleConfig.model_type:
        method = EagleConfig.from_pretrained(folder).method
        return method, f"An {'EAGLE-3' if method == 'eagle3' else 'EAGLE'} head"
    layers = told.get("num_hidden_layers")
    return "draft-model", f"A sibling of {layers} layers" if layers else "A sibling"


def _front(told: Mapping[str, Any], base: str, kind: str) -> str:
    data = ModelCardData(
        base_model=base,
        library_name="hf_specgen",
        license=told["target"].get("license"),
        tags=["speculative-decoding", "hf_specgen", kind],
        pipeline_tag="text-generation",
    )
    return str(data.to_yaml())


def _training(told: Mapping[str, Any]) -> str:
    data, settings = told["data"], told["settings"]
    info = data.get("info") or {}
    lines = [
        f"- Command: `{told['command']}`",
        f"- Data: {data['name']}"
        + (f", SHA-256 {data['fingerprint'][:16]}" if data["fingerprint"] else "")
        + _made(info),
        f"- Target's fingerprint: {told['target'].get('fingerprint') or 'not known'}",
        f"- Ran on {told['hardware']}, {told['time']}, commit {told['commit'] or 'not known'}",
        f"- {', '.join(f'{name} {version}' for name, version in told['versions'].items())}",
    ]
    table = ["| setting | value |", "|---|---|"]
    table += [
        f"| {name} | {_cell(value)} |" for name, value in {**settings, **told["result"]}.items() if value is not None
    ]
    return "\n".join([*lines, "", *table]) + "\n"


def _made(info: Mapping[str, Any]) -> str:
    """How generated data were made, as far as they say it in a few words."""
    simple = {name: value for name, value in info.items() if isinstance(value, int | float | bool)}
    return f" ({', '.join(f'{name} {value}' for name, value in simple.items())})" if simple else ""


def _measured(report: Mapping[str, Any] | None, picture: bool) -> str:
    if report is None:
        return f"Not yet: `python training/report.py` measures it and writes `{REPORT}`.\n"
    how = report["settings"]
    said = (
        f"{limits_of(how).capitalize()}; the brackets hold 95 % of bootstrap resamples over prompts. "
        "Mean accepted tokens count the target's own: plain decoding is 1.00."
    )
    headings = "| prompts | drafter | number | mean accepted tokens | by depth, given the parent was | texts as plain |"
    lines = [said, "", headings, "|---|---|---|---|---|---|"]
    for row in report["results"]:
        depths = " ".join(f"{share:.2f}" for share in row["acceptance"][:8])
        lines.append(
            f"| {row['group']} | {row['drafter']} | {row['prompts']} | {row['mean_accepted_tokens']:.2f} "
            f"{_bounds(row)}| {depths} | {row['identical']} of {row['prompts']} |"
        )
    if picture:
        lines += ["", f"![acceptance by depth, and mean accepted tokens by prompt]({PICTURE})"]
    if report["speed"]:
        lines += ["", *_speed(report["speed"])]
    lines += ["", *_computed(report["computed"])]
    return "\n".join(lines) + "\n"


def _bounds(row: Mapping[str, Any]) -> str:
    """Nothing for a single prompt, which says nothing of others."""
    return "" if row["prompts"] == 1 else f"[{row['interval'][0]:.2f}, {row['interval'][1]:.2f}] "


def _speed(speed: Mapping[str, Any]) -> list[str]:
    machine = speed["machine"]
    lines = [
        f"Tokens a second against `Plain()`, medians of {speed['repeats']} interleaved runs on {machine['hardware']}:",
        "",
        "| prompts | setting | ratio | mean accepted tokens |",
        "|---|---|---|---|",
    ]
    return lines + [
        f"| {row['category']} | {row['setting']} | {row['speedup']:.2f} | {row['mean_accepted_tokens']:.2f} |"
        for row in speed["rows"]
    ]


def _computed(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    if not rows:
        return []
    said = (
        "**Computed, not measured**: the same accepted lengths at a GPU's costs (`hf_specgen.theory`; reading and "
        "arithmetic in half precision, no launches):"
    )
    lines = [said, "", "| prompts | GPU | ratio |", "|---|---|---|"]
    return lines + [f"| {row['group']} | {row['machine']} | {row['speedup']:.2f} |" for row in rows]


def _cell(value: Any) -> str:
    return str(value).replace("|", "\\|").replace("\n", " ")


def name(folder: str | Path, base_model: str | None = None, license_name: str | None = None) -> None:
    """Keeps what the target is called on the hub, in `provenance.json` and in a head's config, and its license.

    Raises:
        ValueError: as in `write`.
    """
    told = provenance.read(folder)
    if told is None:
        raise ValueError(f"{folder} holds no {provenance.FILE}")
    for key, value in (("repository", base_model), ("license", license_name)):
        told["target"][key] = value or told["target"].get(key)
    provenance.keep(folder, told)
    config = Path(folder, "config.json")
    held = json.loads(config.read_text(encoding="utf-8")) if config.is_file() else {}
    if base_model and isinstance(held.get("target"), dict):
        # By this name an exported head's launch command asks an engine for the target.
        held["target"]["name"] = base_model
        write_whole(config, json.dumps(held, indent=2, sort_keys=True) + "\n")


def main(line: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", help="of the drafter")
    parser.add_argument("--base_model", help="hub id of the target")
    parser.add_argument("--license", help="of the target, as the hub spells it")
    asked = parser.parse_args(line)
    try:
        name(asked.folder, asked.base_model, asked.license)
        print(write(asked.folder))
    except ValueError as error:
        raise SystemExit(str(error)) from error


if __name__ == "__main__":
    main()
