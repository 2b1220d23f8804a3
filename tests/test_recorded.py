"""The record of a head's target: what changes it, what does not, and what is said of a target that is another."""

import logging

import accelerate
import pytest
import tiny
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from hf_specgen.heads import recorded
from hf_specgen.heads.recorded import TargetRecord, distance, fingerprint


@pytest.fixture(autouse=True)
def _fresh():
    recorded._warn.cache_clear()


def built(seed=0, tie=False, **changed):
    """A model of a middling size: the fingerprint takes one entry of every eighth row."""
    sizes = {"vocab_size": 2048, "hidden_size": 64, "intermediate_size": 32, "num_hidden_layers": 1}
    config = LlamaConfig(**{**sizes, "num_attention_heads": 2, "tie_word_embeddings": tie, **changed})
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return LlamaForCausalLM(config).eval()


def rounded(model, bits):
    """The model with embeddings that were rounded to `bits` bits, each row by its own largest entry."""
    with torch.no_grad():
        weight = model.get_input_embeddings().weight
        step = weight.abs().amax(1, keepdim=True) / (2 ** (bits - 1) - 1)
        weight.copy_((weight / step).round() * step)
    return model


def warned(caplog, record, model) -> str:
    caplog.clear()
    with caplog.at_level(logging.WARNING):
        record.check(model)
    return caplog.text


def test_a_record_says_what_the_model_is():
    model = built()
    record = TargetRecord.of(model)
    assert (record.name, record.hidden_size, record.vocab_size, record.num_layers) == (None, 64, 2048, 1)
    assert len(record.fingerprint) == recorded.ENTRIES / 4
    assert TargetRecord.from_dict(record.to_dict() | {"of a later version": 1}) == record


def test_the_fingerprint_is_signs_of_entries_of_rows_all_over_the_vocabulary():
    model = built()
    weight = model.get_input_embeddings().weight
    signs = [bool(weight[place * 2048 // 256, place * 7919 % 64] > 0) for place in range(256)]
    assert fingerprint(model) == f"{int(''.join('01'[sign] for sign in signs), 2):064x}"
    assert len({place * 7919 % 64 for place in range(256)}) > 32
    with torch.no_grad():
        weight[2048 // 2 :].neg_()
    assert distance(fingerprint(model), f"{int(''.join('01'[sign] for sign in signs), 2):064x}") == 0.5


CHANGES = {
    "bfloat16": lambda model: model.to(torch.bfloat16),
    "float16": lambda model: model.half(),
    "8 bits": lambda model: rounded(model, 8),
    "4 bits": lambda model: rounded(model, 4),
    "trained on": lambda model: nudged(model),
    "offloaded": lambda model: accelerate.cpu_offload(model),
}


def nudged(model):
    with torch.no_grad():
        weight = model.get_input_embeddings().weight
        weight.add_(0.1 * weight.std() * torch.randn(weight.shape, generator=torch.Generator().manual_seed(1)))
    return model


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("tie", [False, True])
def test_rounding_and_training_on_keep_the_record(caplog, change, tie):
    record = TargetRecord.of(built(tie=tie))
    changed = CHANGES[change](built(tie=tie))
    assert distance(record.fingerprint, fingerprint(changed)) < recorded.TURNED / 2
    assert warned(caplog, record, changed) == ""


@pytest.mark.parametrize("seed", range(1, 6))
def test_another_model_of_the_same_size_is_warned_of_once(caplog, seed):
    record, other = TargetRecord.of(built()), built(seed)
    assert distance(record.fingerprint, fingerprint(other)) > 1.5 * recorded.TURNED
    assert "of their signs" in warned(caplog, record, other)
    assert warned(caplog, record, other) == ""


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"hidden_size": 32}, "hidden_size=64; LlamaForCausalLM has hidden_size=32"),
        ({"vocab_size": 2049}, "vocab_size=2048; LlamaForCausalLM has vocab_size=2049"),
        ({"num_hidden_layers": 2}, "num_layers=1; LlamaForCausalLM has num_layers=2"),
    ],
)
def test_other_sizes_are_refused_and_both_named(changed, words):
    with pytest.raises(ValueError, match=f"the head was trained for a model with {words}"):
        TargetRecord.of(built()).check(built(**changed))


def test_names_are_compared_where_there_is_no_fingerprint(caplog):
    model = built()
    model.config.name_or_path = "/models/Some-7B/"
    assert warned(caplog, TargetRecord(name="org/some-7b"), model) == ""
    assert "trained for org/other-7b, not for /models/Some-7B/" in warned(caplog, TargetRecord("org/other-7b"), model)
    same = TargetRecord("org/other-7b", fingerprint=fingerprint(model))
    assert warned(caplog, same, model) == ""


def test_what_is_not_known_is_not_compared(caplog):
    assert warned(caplog, TargetRecord(), built()) == ""
    with torch.device("meta"):
        empty = LlamaForCausalLM(built().config)
    assert fingerprint(empty) is None
    assert TargetRecord.of(empty) == TargetRecord(None, 64, 2048, 1, None)
    assert warned(caplog, TargetRecord.of(built()), empty) == ""


class Quantized(nn.Module):
    """Embeddings that only their module can read."""

    def __init__(self, embeddings):
        super().__init__()
        self.scale = embeddings.weight.abs().amax() / 127
        self.register_buffer("weight", (embeddings.weight / self.scale).round().to(torch.int8))

    def forward(self, ids):
        return self.weight[ids] * self.scale


class Part(nn.Module):
    """A rank's part of the embeddings."""

    def __init__(self, embeddings):
        super().__init__()
        self.weight = nn.Parameter(embeddings.weight[: embeddings.weight.shape[0] // 2])

    def forward(self, ids):
        pytest.fail("another rank's rows were asked for")


def test_quantized_embeddings_are_read_through_their_module():
    model = built()
    record = TargetRecord.of(model)
    model.set_input_embeddings(Quantized(model.get_input_embeddings()))
    assert distance(record.fingerprint, fingerprint(model)) < 0.05


def test_sharded_embeddings_are_let_be():
    model = built()
    model.set_input_embeddings(Part(model.get_input_embeddings()))
    assert fingerprint(model) is None


def test_a_model_is_neither_run_nor_written_to():
    model = tiny.llama()
    model.register_forward_pre_hook(lambda *_: pytest.fail("a forward pass was made"))
    before = {name: value.clone() for name, value in model.state_dict().items()}, model.config.to_dict()
    TargetRecord.of(model).check(model)
    assert all(torch.equal(value, before[0][name]) for name, value in model.state_dict().items())
    assert model.config.to_dict() == before[1]
    assert all(parameter.grad is None for parameter in model.parameters())


def test_a_folder_is_recorded_by_its_name_and_not_by_where_it_lies(tmp_path):
    model = tiny.llama()
    folder = tmp_path / "some-model"
    folder.mkdir()
    model.config.name_or_path = f"{folder}/"
    assert TargetRecord.of(model).name == "some-model"
