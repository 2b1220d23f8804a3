"""The published heads: whole, small, with where they come from beside them, and worth their passes."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import ModelCard
from running import provenance

import hf_specgen as sg
from hf_specgen.bench import smollm2
from hf_specgen.bench.prompts import FREE
from hf_specgen.cli import encode

ASSETS = Path(__file__).parent.parent / "assets"
HEADS = {"medusa": {"num_assistant_tokens": 4}, "eagle3": {"num_assistant_tokens": 5}}


@pytest.fixture(scope="module")
def smollm() -> tuple[Any, Any]:
    model, tokenizer = smollm2.load()
    return sg.enable(model), tokenizer


@pytest.mark.parametrize("name", [pytest.param("medusa", marks=pytest.mark.slow), "eagle3"])
def test_published_heads_draft_what_is_accepted_and_change_nothing(name: str, smollm: tuple[Any, Any]) -> None:
    model, tokenizer = smollm
    drafter: Any = replace(sg.load_assistant(ASSETS / name, model), nodes=15, **HEADS[name])
    stats, common = sg.Stats(), {**encode(tokenizer, FREE["chat"]), "do_sample": False, "max_new_tokens": 32}
    drafted = model.generate(**common, assistant=drafter, stats=stats)
    assert torch.equal(drafted, model.generate(**common, assistant=sg.Plain()))
    assert stats.mean_accepted_tokens > 1.3


def test_what_is_published_is_small_and_says_where_it_comes_from() -> None:
    files = [path for path in ASSETS.rglob("*") if path.is_file()]
    assert sum(path.stat().st_size for path in files) < 20e6
    for name in HEADS:
        told = provenance.read(ASSETS / name)
        assert told is not None
        (weights,) = provenance.weights_of(ASSETS / name)
        assert told["weights"] == {weights.name: provenance.digest([weights])}
        card = ModelCard.load(ASSETS / name / "README.md")
        assert card.data.base_model == smollm2.REPOSITORY
        assert card.data.license == "apache-2.0"
        report = json.loads((ASSETS / name / "report.json").read_text())
        after = report["results"][-1]
        assert after["identical"] == after["prompts"]
        assert after["mean_accepted_tokens"] > 1.5
