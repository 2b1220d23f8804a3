"""Linear layers for few tokens: stock's results to rounding, whatever happens to the weights, and no trace."""

from __future__ import annotations

import copy
import gc
import io
import json
import pickle
import statistics
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import peft
import pytest
import tiny
import torch
from tiny import ONE, RAGGED, Scripted, run
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AutoModelForCausalLM, PreTrainedModel

import hf_specgen as sg
from hf_specgen import linear
from hf_specgen.costs import costs_of
from hf_specgen.linear import KINDS, PackedLinear, TransposedLinear, install, installed, packed_bytes, uninstall

needs_onednn = pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="this torch has no oneDNN")
BOTH = [pytest.param("packed", marks=needs_onednn), "transposed"]
TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 2e-2}
# To both sides of every limit between one way of multiplying and another.
ROWS = (1, 2, 3, 4, 5, 6, 16, 17, 40)


def layer(kind: str, bias: bool = True, dtype: torch.dtype = torch.float32) -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(48, 80, bias=bias)).to(dtype)
    install(model, kind)
    return model


def model32() -> PreTrainedModel:
    return tiny.llama().float()


def differs(model: nn.Sequential, rows: int) -> float:
    """How far the layer is from stock's product with the weights as they are now."""
    x = torch.randn(rows, 48, dtype=model[0].weight.dtype)
    with torch.no_grad():
        stock = F.linear(x, model[0].weight, model[0].bias)
        return float((model(x) - stock).abs().max() / stock.abs().max())


# ------------------------------------------------------------------------------------------------------- the product


@pytest.mark.parametrize("kind", BOTH)
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_a_layer_is_stocks_to_rounding(kind, bias, dtype):
    try:
        model = layer(kind, bias, dtype)
    except ValueError:
        assert dtype != torch.float32
        return
    for rows in ROWS:
        assert differs(model, rows) < TOLERANCE[dtype]
    x = torch.randn(3, 2, 48, dtype=dtype)
    with torch.no_grad():
        for shaped in (x, x.transpose(0, 1), x[:1, :1], x[0, 0], x[:0], x.expand(2, 3, 2, 48)):
            out, stock = model(shaped), F.linear(shaped, model[0].weight, model[0].bias)
            torch.testing.assert_close(out, stock, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])
            assert out.is_contiguous()


@pytest.mark.parametrize("kind", BOTH)
def test_few_rows_do_not_go_through_stock(kind, monkeypatch):
    model = layer(kind)
    seen = []
    stock = F.linear
    monkeypatch.setattr(linear.F, "linear", lambda *args: seen.append(args) or stock(*args))
    with torch.no_grad():
        for rows in (1, 2, 4):
            model(torch.randn(rows, 48))
        assert not seen
        model(torch.randn(200, 48))
    assert len(seen) == (kind == "transposed")


@pytest.mark.parametrize("kind", BOTH)
def test_logits_of_a_model_are_stocks_to_rounding(kind):
    torch.manual_seed(0)
    model = tiny.LlamaForCausalLM(tiny.LlamaConfig(**tiny._sizes())).eval()
    ids = torch.tensor([ONE.rows[0]])
    with torch.no_grad():
        stock = {width: model(ids[:, :width]).logits for width in (1, 2, 5, 14)}
        sg.enable(model, linear=kind)
        for width, logits in stock.items():
            torch.testing.assert_close(model(ids[:, :width]).logits, logits, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("rows", [ONE, RAGGED], ids=["one", "ragged"])
@pytest.mark.parametrize(
    ("kind", "dtype"),
    [
        pytest.param("packed", torch.float32, marks=needs_onednn),
        ("transposed", torch.float32),
        ("transposed", torch.float64),
    ],
)
def test_the_text_is_stocks(kind, dtype, rows):
    stock = run(tiny.llama().to(dtype), rows, max_new_tokens=48)
    model = sg.enable(tiny.llama().to(dtype), linear=kind)
    assert run(model, rows, max_new_tokens=48) == stock
    assert run(model, rows, max_new_tokens=48, assistant=sg.Plain()) == stock
    for shape in ("chain", "tree"):
        script = Scripted(stock, shape)
        new = 32
        texts = tuple(text[: len(prompt) + new] for text, prompt in zip(stock, rows.rows, strict=True))
        assert run(model, rows, max_new_tokens=new, assistant=script) == texts
        assert script.seen.share("mixed") > 0.5


# ------------------------------------------------------------------------------------------------ weights that change


def _step(weight: nn.Parameter) -> None:
    weight.grad = torch.randn_like(weight)
    torch.optim.AdamW([weight], lr=0.1).step()


def _moved(model: nn.Module) -> None:
    model.to(torch.bfloat16).to(torch.float32)


def _by_numpy(weight: Tensor) -> None:
    weight.detach().numpy()[:] *= 2


def _in_inference_mode(model: nn.Sequential) -> None:
    with torch.inference_mode():
        model[0].weight.add_(1)


def _replaced(model: nn.Sequential) -> None:
    model[0].weight = nn.Parameter(torch.randn(80, 48))


def _cut(model: nn.Sequential) -> None:
    model[0].weight.data, model[0].bias = model[0].weight.data[:30], nn.Parameter(model[0].bias.data[:30])


def _data_swapped(model: nn.Sequential) -> None:
    for _ in range(2):  # the second may come to lie where the first weight lay
        model[0].weight.data = torch.randn(80, 48)


def _loaded(model: nn.Sequential, assign: bool) -> None:
    model.load_state_dict({"0.weight": torch.randn(80, 48), "0.bias": torch.randn(80)}, assign=assign)


CHANGES: dict[str, Callable[[nn.Sequential], Any]] = {
    "optimizer": lambda model: _step(model[0].weight),
    "load": lambda model: _loaded(model, assign=False),
    "load-assign": lambda model: _loaded(model, assign=True),
    "data-in-place": lambda model: model[0].weight.data.add_(0.1),
    "last-rows-of-data": lambda model: model[0].weight.data[-10:].add_(0.1),
    "data-swapped": _data_swapped,
    "numpy": lambda model: _by_numpy(model[0].weight),
    "one-value": lambda model: model[0].weight.detach()[7, 5].fill_(9),
    "inference-mode": _in_inference_mode,
    "dtypes-there-and-back": _moved,
    "to-double": lambda model: model.double(),
    "replaced": _replaced,
    "cut": _cut,
    "bias": lambda model: model[0].bias.data.add_(1),
}


@pytest.mark.parametrize("kind", BOTH)
@pytest.mark.parametrize("change", CHANGES)
def test_a_changed_weight_is_the_one_that_counts(kind, change):
    model = layer(kind)
    for _ in range(2):
        assert differs(model, 4) < 1e-5
        CHANGES[change](model)
        for rows in (1, 4, 40):
            assert differs(model, rows) < 1e-5


@needs_onednn
def test_weights_that_nobody_counts_are_compared():
    with torch.inference_mode():
        model = layer("packed")
        assert model[0].weight.is_inference()
        assert differs(model, 4) < 1e-5
        model[0].weight.mul_(3)
        assert differs(model, 4) < 1e-5


@needs_onednn
def test_installing_again_packs_again():
    model = layer("packed")
    model[0].weight.data[40, 20] += 9  # between what is compared
    assert differs(model, 4) > 1e-3
    install(model, "packed")
    assert differs(model, 4) < 1e-5


@needs_onednn
def test_an_untouched_weight_is_packed_once(monkeypatch):
    made = []
    maker = linear._Copy
    monkeypatch.setattr(linear, "_Copy", lambda weight: made.append(weight) or maker(weight))
    model = layer("packed")
    for rows in ROWS:
        differs(model, rows)
    with torch.inference_mode():
        differs(model, 4)
    assert len(made) == 1


@pytest.mark.parametrize("kind", BOTH)
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")
def test_a_merged_adapter_counts(kind):
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "up_proj"], init_lora_weights=False, task_type="CAUSAL_LM")
    with torch.random.fork_rng():
        torch.manual_seed(1)
        wrapped = peft.get_peft_model(model32(), config).eval()
    ids = torch.tensor([ONE.rows[0][:4]])

    def logits() -> Tensor:
        with torch.no_grad():
            return wrapped(ids).logits

    stock = logits()
    sg.enable(wrapped, linear=kind)
    adapted = [module for module in wrapped.modules() if isinstance(module, peft.tuners.lora.Linear)]
    assert {type(module.base_layer) for module in adapted} == {KINDS[kind]}
    for change in (wrapped.merge_adapter, wrapped.unmerge_adapter):
        torch.testing.assert_close(logits(), stock, rtol=1e-4, atol=1e-3)
        change()
        torch.testing.assert_close(logits(), stock, rtol=1e-4, atol=1e-3)
    with wrapped.disable_adapter():
        assert not torch.allclose(logits(), stock, atol=1e-1)


# ------------------------------------------------------------------------------------------------- enable and disable


@pytest.mark.parametrize("kind", BOTH)
def test_enable_switches_and_disable_undoes(kind):
    model = model32()
    classes = [type(module) for module in model.modules()][1:]
    assert installed(sg.enable(model)) is None
    for _ in range(2):
        sg.enable(model, linear=kind)
        sg.enable(model)  # says nothing about linear layers
        assert installed(model) == kind
    other = "transposed" if kind == "packed" else "packed"
    if other == "transposed" or torch.backends.mkldnn.is_available():
        sg.enable(model, linear=other)
        assert installed(model) == other
    sg.disable(model)
    assert [type(module) for module in model.modules()][1:] == classes
    assert packed_bytes(model) == 0


def test_the_controller_measures_each_kind_for_itself(tmp_path):
    model = sg.enable(model32())

    def measured() -> set[str]:
        run(model, ONE, max_new_tokens=8, assistant=sg.Plain(), num_assistant_tokens="auto")
        costs_of(model).save(tmp_path / "costs.json")
        return set(json.loads((tmp_path / "costs.json").read_text())["seconds"])

    stock = measured()
    sg.enable(model, linear="transposed")
    both = measured()
    assert stock < both
    sg.enable(sg.disable(model))
    assert measured() == both


@needs_onednn
def test_the_copies_take_what_is_said_and_go_with_the_weights():
    before = len(linear._COPIES)
    model = sg.enable(model32(), linear="packed")
    weights = [module.weight for module in model.modules() if isinstance(module, nn.Linear)]
    plain = sum(weight.nbytes for weight in weights)
    assert plain <= packed_bytes(model) <= 2 * plain  # such small ones are filled up
    assert "packed=" in repr(model)
    assert len(linear._COPIES) == before + len(weights)
    model.double()
    with torch.no_grad():
        model(torch.tensor([ONE.rows[0]]))
    assert packed_bytes(model) == 0
    sg.enable(model.float(), linear="packed")
    del model, weights
    gc.collect()
    assert len(linear._COPIES) == before


@needs_onednn
@pytest.mark.cuda
def test_a_model_that_has_moved_away_runs_stock_and_leaves_no_copies():
    model = layer("packed").to("cuda")
    x = torch.randn(4, 48, device="cuda")
    with torch.no_grad():
        assert torch.equal(model(x), F.linear(x, model[0].weight, model[0].bias))
    assert packed_bytes(model) == 0


@needs_onednn
def test_a_shared_weight_is_packed_once():
    model = nn.Sequential(nn.Linear(64, 64, bias=False), nn.Linear(64, 64, bias=False))
    model[1].weight = model[0].weight
    install(model, "packed")
    assert packed_bytes(model) == model[0].weight.nbytes


@pytest.mark.parametrize("kind", BOTH)
def test_copies_pickles_and_checkpoints_know_nothing_of_it(kind, tmp_path):
    model = model32()
    stock = {name: value.clone() for name, value in model.state_dict().items()}
    ids = torch.tensor([ONE.rows[0][:4]])
    with torch.no_grad():
        logits = model(ids).logits
        sg.enable(model, linear=kind)
        model(ids)
        size = len(pickle.dumps(model))
        saved = io.BytesIO()
        torch.save(model, saved)
        saved.seek(0)
        for again in (
            copy.deepcopy(model),
            pickle.loads(pickle.dumps(model)),
            torch.load(saved, weights_only=False),
        ):
            assert installed(again) == kind
            torch.testing.assert_close(again(ids).logits, logits, rtol=1e-4, atol=1e-3)
            again.model.layers[0].mlp.up_proj.weight.mul_(2)
            assert not torch.allclose(again(ids).logits, logits, atol=1e-1)
            torch.testing.assert_close(model(ids).logits, logits, rtol=1e-4, atol=1e-3)
        assert size < len(pickle.dumps(sg.disable(copy.deepcopy(model)))) * 1.1
        assert model.state_dict().keys() == stock.keys()
        assert all(torch.equal(value, stock[name]) for name, value in model.state_dict().items())
        model.save_pretrained(tmp_path)
        fresh = AutoModelForCausalLM.from_pretrained(tmp_path)
        assert installed(fresh) is None
        torch.testing.assert_close(fresh(ids).logits, logits, rtol=1e-4, atol=1e-3)


# ------------------------------------------------------------------------------------------------- what is left alone


@pytest.mark.parametrize("kind", BOTH)
def test_training_runs_stock(kind):
    model, x = layer(kind), torch.randn(4, 48, requires_grad=True)
    stock = copy.deepcopy(model)
    uninstall(stock)
    for each in (model, stock):
        each(x).square().sum().backward()
    assert torch.equal(model[0].weight.grad, stock[0].weight.grad)
    assert torch.equal(model(x), stock(x))


@pytest.mark.parametrize("kind", BOTH)
@pytest.mark.filterwarnings("ignore:`torch.jit.trace:DeprecationWarning")
def test_what_is_not_a_plain_product_runs_stock(kind):
    model, x = layer(kind), torch.randn(4, 48)
    with torch.no_grad():
        with torch.autocast("cpu", torch.bfloat16):
            assert model(x).dtype == torch.bfloat16
        traced = torch.jit.trace(model, x)
        assert "aten::linear" in str(traced.inlined_graph)
        exported = torch.export.export(model, (x,))
        assert "aten.linear" in str(exported.graph)
        torch.testing.assert_close(torch.compile(model, backend="eager", fullgraph=True)(x), model(x))
        torch.testing.assert_close(model(x[:1].to_sparse()), model(x[:1]))
        for wrong in (x.double(), x.bfloat16(), x[:1].double(), torch.randn(4, 47), torch.randn(1, 47)):
            with pytest.raises(RuntimeError):
                model(wrong)


class Scaled(Tensor):
    """A weight that says itself how it multiplies, as quantized ones do."""

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = super().__torch_function__(function, types, args, kwargs)
        return 7 * out if function is F.linear else out


@pytest.mark.parametrize("kind", BOTH)
def test_a_weight_that_multiplies_by_itself_does(kind):
    model, x = layer(kind, bias=False), torch.randn(4, 48)
    with torch.no_grad():
        stock = model(x)
        model[0].weight = nn.Parameter(Scaled(model[0].weight.detach()))
        for rows in (1, 4):
            torch.testing.assert_close(model(x[:rows]).as_subclass(Tensor), 7 * stock[:rows])


@pytest.mark.parametrize("kind", BOTH)
def test_other_layers_stay_as_they_are(kind):
    class Own(nn.Linear):
        pass

    own_forward = nn.Linear(8, 8)
    own_forward.forward = own_forward.forward
    model = nn.ModuleList(
        [nn.Linear(8, 8), Own(8, 8), own_forward, nn.Linear(8, 8, device="meta"), nn.Linear(8, 8).half()]
    )
    install(model, kind)
    assert [type(module) for module in model] == [KINDS[kind], Own, nn.Linear, nn.Linear, nn.Linear]


def test_what_cannot_be_is_refused_before_anything_changes(monkeypatch):
    model = sg.enable(model32(), linear="transposed")
    for kind in ("fast", "Packed", ""):
        with pytest.raises(ValueError, match=r"none of 'packed', 'transposed'"):
            sg.enable(model, linear=kind)
    with pytest.raises(ValueError, match="float32 or float64; there is none"):
        sg.enable(model32().half(), linear="transposed")
    with pytest.raises(ValueError, match="there is none"):
        sg.enable(tiny.llama(), linear="packed")  # float64
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)
    with pytest.raises(ValueError, match="oneDNN"):
        sg.enable(model, linear="packed")
    assert installed(model) == "transposed"
    plain = model32()
    with pytest.raises(ValueError, match="oneDNN"):
        sg.enable(plain, linear="packed")
    assert not isinstance(plain, sg.SpecGenMixin)


# ------------------------------------------------------------------------------------------------------------ threads


@needs_onednn
def test_threads_that_come_at_once_make_one_copy(monkeypatch):
    made = []
    maker = linear._Copy

    def slowly(weight: Tensor) -> Any:
        made.append(threading.get_ident())
        time.sleep(0.05)
        return maker(weight)

    model = layer("packed")
    model[0].weight.data.mul_(2)
    monkeypatch.setattr(linear, "_Copy", slowly)
    x = torch.randn(4, 48)
    start = threading.Barrier(8)

    def call(_: int) -> Tensor:
        start.wait()
        with torch.no_grad():
            return model(x)

    with ThreadPoolExecutor(8) as pool:
        outs = list(pool.map(call, range(8)))
    assert len(made) == 1
    with torch.no_grad():
        torch.testing.assert_close(outs[0], F.linear(x, model[0].weight, model[0].bias))
    assert all(torch.equal(out, outs[0]) for out in outs)


@needs_onednn
@pytest.mark.timing
def test_eight_tokens_through_packed_weights_take_less_than_through_stocks():
    model = nn.ModuleList([nn.Linear(576, 1536, bias=False) for _ in range(40)])  # 142 MB
    stock = copy.deepcopy(model)
    install(model, "packed")
    assert {type(module) for module in model} == {PackedLinear}
    assert not any(isinstance(module, PackedLinear | TransposedLinear) for module in stock)
    x = torch.randn(1, 8, 576)

    def seconds(layers: nn.ModuleList) -> float:
        started = time.perf_counter()
        for each in layers:
            each(x)
        return time.perf_counter() - started

    with torch.no_grad():
        rounds = [(seconds(model), seconds(stock)) for _ in range(9)]
    packed, plain = (statistics.median(times) for times in zip(*rounds, strict=True))
    assert packed < 0.9 * plain, f"{packed * 1e3:.1f} ms against {plain * 1e3:.1f} ms"
