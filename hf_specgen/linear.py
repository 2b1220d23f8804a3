"""Linear layers that several tokens pass through for little more than one, on a CPU.

A pass over a few tokens is bound by reading the weights, and stock `F.linear` takes longer than reading does. For one
token it runs a matrix-vector product, which does not reach the memory's bandwidth everywhere; for more it lays every
weight out anew in blocks, in every pass. Two ways around that, both explicit acts of `enable(model, linear=...)`:

"packed": a copy of every weight, laid out once, and oneDNN's product over it. The copies take as much memory as the
linear weights do (`packed_bytes`), and a few passes' time to make.

"transposed": no copy, only the other order of the operands, `(W x^T)^T`, which the library takes without laying
weights out. It serves few tokens, more of them where several threads share the work; the rest is stock.

Milliseconds of a pass of SmolLM2-135M over a context of 256 tokens, by tokens in the pass (width + 1); float32, AMD
EPYC with AVX-512, torch 2.13 with MKL and oneDNN, interleaved medians of 9 on a shared machine:

                             1    2    3    4    6    8   12   16   24   32
    one thread, stock       60   97  120   92  103  110  118  131  157  185
        transposed          53   56   78   76    -    -    -    -    -    -
        packed              52   52   69   65   64   75   83   95  123  137
    two threads, stock      62  108  124   97  103   98  111  115  130  158
        transposed          37   37   48   48   63   69  107   92    -    -
        packed              37   37   50   48   51   60   63   70   86  103

and of its linear layers alone (540 MB), one thread, in float32 and in bfloat16:

    stock                   45   76   99   65   73   77        99  125  144
    transposed              32   31   48   51   74    -         -    -    -
    packed                  39   48   35   33   33   43        60   82  101
    stock, bfloat16         36   36        39        44        55
    packed, bfloat16        23   26        19        24        34

oneDNN's product is not at its best over one and two tokens, so in float32 those go the transposed way with "packed"
too, one token filled up to two columns: a single one would be a matrix-vector product again. Longer passes, prompts
included, stay 10 to 15 % ahead of stock. A weight packed for one row makes a pass over four to 24 half again to twice
as slow; packed for eight or more, they are alike. With AVX2 alone (the same machine) packed takes 48, 60 and 80 for 4,
8 and 16 tokens where stock takes 66, 78 and 102. Weights that fit into the processor's cache gain nothing.

Either way results differ from stock's by rounding, as they do between stock's own kernels for one token and for many.
"""

from __future__ import annotations

import functools
import threading
import weakref

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.utils.import_utils import is_jit_tracing

# The rows oneDNN is told to pack for.
ROWS = 16
# What is compared before each use, besides autograd's count of changes: so many runs of so many values.
PLACES, RUN = 4, 32
# The dtypes in which the other order of the operands is faster.
TRANSPOSED = (torch.float32, torch.float64)


class PackedLinear(nn.Linear):
    """A linear layer that multiplies by a packed copy of its weight, in float32 and bfloat16.

    It holds no more than `nn.Linear` does: the copies lie beside the weights, one for all layers that share a weight.
    """

    def forward(self, x: Tensor) -> Tensor:
        """As `nn.Linear`, to rounding."""
        weight, bias = self.weight, self.bias
        if not _is_plain(x, weight, bias):
            if not weight.is_cpu:
                _COPIES.pop(id(weight), None)
            return F.linear(x, weight, bias)
        if weight.dtype == torch.float32 and x.numel() <= 2 * x.shape[-1]:
            return _transposed(x, weight, bias)
        copy = _copy_of(weight)
        if copy is None:
            return F.linear(x, weight, bias)
        out: Tensor = torch.ops.mkldnn._linear_pointwise(x, copy.packed, bias, "none", [], "")
        return out

    def extra_repr(self) -> str:
        """As `nn.Linear`, and what the copy takes."""
        copy = _COPIES.get(id(self.weight))
        return f"{super().extra_repr()}, packed={0 if copy is None else copy.bytes / 2**20:.1f} MiB"


class TransposedLinear(nn.Linear):
    """A linear layer that takes its operands in the other order where rows are few, in float32 and float64."""

    def forward(self, x: Tensor) -> Tensor:
        """As `nn.Linear`, to rounding."""
        weight, bias = self.weight, self.bias
        if weight.dtype in TRANSPOSED and _is_plain(x, weight, bias) and x.numel() <= _most_rows() * x.shape[-1]:
            return _transposed(x, weight, bias)
        return F.linear(x, weight, bias)


KINDS: dict[str, type[nn.Linear]] = {"packed": PackedLinear, "transposed": TransposedLinear}


def install(model: nn.Module, kind: str) -> None:
    """Puts one of `KINDS` in the place of every plain `nn.Linear` on the CPU, as a class of the same module.

    Subclasses (quantized and adapted layers; but an adapted layer holds plain ones), layers with a forward of their own
    (offloaded ones) and other devices and dtypes stay as they are. A layer whose weight moves, or changes its dtype,
    runs stock from then on. With "packed" the copies are made here, those from before anew.

    A weight that has changed is packed again at its next use. A change shows in autograd's version counter, in the
    storage, or, where it went around both (`weight.data.add_`, NumPy, as PEFT does when it merges), in `PLACES`
    runs of `RUN` values. After changing parts of a weight in that way, install again.

    Args:
        model: any module.
        kind: "packed" or "transposed".

    Raises:
        ValueError: no such kind; this torch has no oneDNN; or no layer can be served.
    """
    if kind not in KINDS:
        raise ValueError(f"linear={kind!r} is none of {', '.join(map(repr, KINDS))}")
    if kind == "packed" and not _has_onednn():
        raise ValueError("linear='packed' needs a torch that is built with oneDNN (mkldnn); 'transposed' does not")
    serves = _packs if kind == "packed" else _transposes
    layers = [layer for layer in _layers(model) if serves(layer.weight)]
    if not layers:
        dtypes = "float32, or bfloat16 where the CPU has it" if kind == "packed" else "float32 or float64"
        raise ValueError(f"linear={kind!r} serves plain torch.nn.Linear layers on the CPU in {dtypes}; there is none")
    uninstall(model)
    for layer in layers:
        layer.__class__ = KINDS[kind]
        if kind == "packed":
            _copy_of(layer.weight)


def installed(model: nn.Module) -> str | None:
    """The kind that `install` has put into a model; None where there is none."""
    classes = {type(module) for module in model.modules()}
    return next((kind for kind, made in KINDS.items() if made in classes), None)


def uninstall(model: nn.Module) -> None:
    """Undoes `install`, and drops the copies."""
    for layer in _layers(model):
        _COPIES.pop(id(layer.weight), None)
        layer.__class__ = nn.Linear


def packed_bytes(model: nn.Module) -> int:
    """What the packed copies of a model's weights take at the moment, in bytes; a shared weight has one."""
    keys = {id(layer.weight) for layer in _layers(model)}
    return sum(copy.bytes for key in keys if (copy := _COPIES.get(key)) is not None)


def _layers(model: nn.Module) -> list[nn.Linear]:
    """The plain linear layers, whichever way they multiply, but for those whose forward another library replaced."""
    kinds = (nn.Linear, *KINDS.values())
    found = [module for module in model.modules() if isinstance(module, nn.Linear) and type(module) in kinds]
    return [layer for layer in found if "forward" not in vars(layer)]


def _packs(weight: Tensor) -> bool:
    dtype = weight.dtype
    known = dtype == torch.float32 or (dtype == torch.bfloat16 and _has_bfloat16())
    return known and _is_dense(weight) and weight.numel() > 0


def _transposes(weight: Tensor) -> bool:
    return weight.dtype in TRANSPOSED and _is_dense(weight)


def _is_dense(weight: Tensor) -> bool:
    """Whether it is itself what is multiplied by: no quantized, distributed, parametrized or offloaded weight."""
    return type(weight) is nn.Parameter and weight.is_cpu and weight.layout == torch.strided and weight.is_contiguous()


def _is_plain(x: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    """Whether a call has nothing to it but the product: no gradients, no autocast, no graph being captured."""
    return (
        not torch.compiler.is_compiling()
        and not is_jit_tracing()
        and type(x) is Tensor
        and type(weight) is nn.Parameter
        and x.dtype == weight.dtype
        and x.layout == torch.strided
        and weight.is_cpu
        and not (torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in (x, weight, bias)))
        and not torch.is_autocast_enabled("cpu")
    )


@functools.cache
def _has_bfloat16() -> bool:
    return _has_onednn() and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def _has_onednn() -> bool:
    return bool(torch.backends.mkldnn.is_available())  # type: ignore[no-untyped-call]


def _most_rows() -> int:
    """The rows up to which the transposed order is faster than stock."""
    return 5 if torch.get_num_threads() == 1 else 16


def _transposed(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    flat = x.reshape(-1, x.shape[-1])
    rows = flat.shape[0]
    if rows == 1:  # with a single column the library turns to its matrix-vector product
        flat = F.pad(flat, (0, 0, 0, 1))
    out = torch.mm(weight, flat.t()) if bias is None else torch.addmm(bias[:, None], weight, flat.t())
    return out.t()[:rows].contiguous().view(*x.shape[:-1], out.shape[0])


class _Copy:
    """A packed weight, and what it was made from."""

    def __init__(self, weight: Tensor) -> None:
        dense = weight.detach()
        # First of all, so that a change during the packing is noticed afterwards.
        self.version, self.address, self.shape = _version(weight), weight.data_ptr(), weight.shape
        key = id(weight)
        self.alive = weakref.ref(weight, lambda _: _COPIES.pop(key, None))
        # From the first row to the last. A view: it keeps the storage, so that no other one gets its address.
        run = min(RUN, weight.numel())
        self.sample = dense.view(-1).as_strided((PLACES, run), ((weight.numel() - run) // (PLACES - 1), 1))
        self.values = self.sample.clone()
        self.packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(dense, ROWS)
        self.bytes = int(torch.ops.mkldnn._nbytes(self.packed))

    def is_of(self, weight: Tensor) -> bool:
        return (
            weight.data_ptr() == self.address
            and _version(weight) == self.version
            and weight.shape == self.shape
            and torch.equal(self.sample, self.values)
        )


def _version(weight: Tensor) -> int:
    """Autograd's count of changes; inference tensors have none."""
    return 0 if weight.is_inference() else weight._version


# By the weights' ids, beside them and not on the modules: whose copies, pickles and state dicts know nothing of it.
_COPIES: dict[int, _Copy] = {}
_LOCK = threading.Lock()


def _copy_of(weight: Tensor) -> _Copy | None:
    """A weight's copy, made anew where the weight has changed; None for what can no longer be packed."""
    copy, key = _COPIES.get(id(weight)), id(weight)
    if copy is not None and copy.is_of(weight):
        return copy
    if not _packs(weight):
        _COPIES.pop(key, None)
        return None
    with _LOCK:
        copy = _COPIES.get(key)  # another thread may have made it meanwhile
        if copy is None or not copy.is_of(weight):
            copy = _COPIES[key] = _Copy(weight)
    return copy
