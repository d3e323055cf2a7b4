"""Autocast by hand: which operator takes which precision, and its bytes."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

from membudget.checks import instance, one_of
from membudget.internals import has_kernel_for, tree_map


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


_RMS_NORM = has_kernel_for("aten::rms_norm", "AutocastCUDA")  # since 2.12

LISTS: dict[str, dict[str, frozenset[str]]] = {
    "cpu": {
        "16 bits": _names(
            "addbmm addmm baddbmm bmm conv1d conv2d conv3d conv_tbc "
            "conv_transpose1d conv_transpose2d conv_transpose3d "
            "linalg_vecdot linear matmul mm prelu "
            "scaled_dot_product_attention"
        ),
        "fp32": _names(
            "avg_pool3d binary_cross_entropy "
            "binary_cross_entropy_with_logits cdist cosine_embedding_loss "
            "cross_entropy ctc_loss grid_sampler hinge_embedding_loss "
            "huber_loss kl_div l1_loss margin_ranking_loss mse_loss "
            "multi_margin_loss multilabel_margin_loss nanquantile nll_loss "
            "poisson_nll_loss prod quantile smooth_l1_loss "
            "soft_margin_loss trace triplet_margin_loss"
        ),
        "widest": _names("cat index_copy stack"),
    },
    "cuda": {
        "16 bits": _names(
            "addbmm addmm addmv addr baddbmm bmm chain_matmul conv1d conv2d "
            "conv3d conv_tbc conv_transpose1d conv_transpose2d "
            "conv_transpose3d einsum gru_cell linalg_multi_dot "
            "linalg_vecdot linear lstm_cell matmul mm mv prelu rnn_relu_cell "
            "rnn_tanh_cell scaled_dot_product_attention"
        ),
        "fp32": _names(
            "acos asin binary_cross_entropy_with_logits cdist "
            "cosh cosine_embedding_loss cosine_similarity "
            "cumprod cumsum dist erfinv exp expm1 group_norm "
            "hinge_embedding_loss huber_loss kl_div l1_loss layer_norm log "
            "log10 log1p log2 log_softmax logsumexp margin_ranking_loss "
            "mse_loss multi_margin_loss multilabel_margin_loss nll_loss norm "
            "pdist poisson_nll_loss pow prod reciprocal renorm "
            "rsqrt sinh smooth_l1_loss soft_margin_loss softmax softplus sum "
            "tan triplet_margin_loss"
        )
        | _names("rms_norm" if _RMS_NORM else ""),
        "widest": _names(
            "addcdiv addcmul atan2 bilinear cross dot grid_sampler index_put "
            "scatter_add tensordot vdot"
        ),
    },
}
"""What autocast does with an operator's inputs, for each kind of device.

``"16 bits"``: to the 16-bit format; ``"fp32"``: to fp32; ``"widest"``: to the
widest of theirs. Operators that are in no list run on what they are given:
PyTorch's own promotion makes fp32 of fp32 and 16 bits. From PyTorch's
``aten/src/ATen/autocast_mode.cpp`` (version 2.13); left out are linear
algebra and Fourier transforms, complex numbers, upsampling, padding, pooling
in three dimensions or by fractions, unpooling and fake quantisation.
``cross_entropy`` is two operators, and CUDA's autocast casts the second, the
``nll_loss``, alone. It refuses ``binary_cross_entropy``.
"""

_ALIASES = {
    "__matmul__": "matmul",
    "__rmatmul__": "matmul",
    "__pow__": "pow",
    "__rpow__": "pow",
    "concat": "cat",
    "grid_sample": "grid_sampler",
    "square": "pow",
    "linalg_matmul": "matmul",
}


def list_of(operator: str, device: str = "cuda") -> str:
    """In which list an operator is: a key of :data:`LISTS`' values, or "".

    Args:
        operator: its name in ``torch`` or ``torch.nn.functional``.
        device: ``"cpu"`` or ``"cuda"``.
    """
    instance(operator, str, "operator", "its name")
    lists = LISTS[one_of(device, LISTS, "list of operators for")]
    name = _ALIASES.get(operator, operator)
    return next((key for key, names in lists.items() if name in names), "")


class Autocast(TorchFunctionMode):
    """``torch.autocast``, written out: with the lists of either device.

    Wherever the tensors are, operators take the precision that autocast
    would give them on ``device``. So a CPU shows which casts a GPU makes.
    Copies of trained fp32 leaves are cached until the block ends, as
    PyTorch's are. It is for one block at a time, without ``torch.autocast``
    around it or inside. What runs inside a function is not seen: attention in
    ``nn.MultiheadAttention``, the products in a recurrent layer or cell, on
    the CPU's lists those in ``einsum``, ``tensordot``, ``bilinear`` and
    ``linalg.multi_dot``. Code that asks ``torch.is_autocast_enabled`` is told
    no, ``torch.amp.custom_fwd`` too. A recomputation under
    ``torch.utils.checkpoint`` does not run in the block: hand another one to
    its ``context_fn``. And CUDA's softmax and sum read 16 bits and write fp32
    at once, where this makes a copy in between.

    Args:
        device: whose lists, ``"cpu"`` or ``"cuda"``.
        dtype: the 16-bit format, ``torch.bfloat16`` or ``torch.float16``.

    Raises:
        RuntimeError: ``binary_cross_entropy`` with CUDA's lists.

    Example:
        >>> with Autocast("cuda"):
        ...     loss = model(x)
    """

    def __init__(
        self,
        device: str = "cuda",
        dtype: torch.dtype = torch.bfloat16,
    ) -> None:
        super().__init__()
        self.device = one_of(device, LISTS, "list of operators for")
        instance(dtype, torch.dtype, "dtype", "a torch.dtype")
        if dtype not in (torch.bfloat16, torch.float16):
            raise ValueError(
                f"dtype is {dtype}: use torch.bfloat16 or torch.float16"
            )
        self.dtype = dtype
        self._copies: dict[tuple, tuple[torch.Tensor, torch.Tensor]] = {}

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if name == "binary_cross_entropy" and self.device == "cuda":
            raise RuntimeError(
                "CUDA's autocast refuses binary_cross_entropy, whose "
                "gradient can overflow in fp16: use "
                "binary_cross_entropy_with_logits"
            )
        if name == "cross_entropy" and self.device == "cuda":
            return _cross_entropy(func, *args, **kwargs)
        rule = list_of(name, self.device)
        if rule and not _explicit(name, kwargs):
            target = _target(rule, (args, kwargs), self.dtype)
            # the last argument first, as PyTorch's C++ does
            kwargs = tree_map(lambda item: self._cast(item, target), kwargs)
            args = [
                tree_map(lambda item: self._cast(item, target), item)
                for item in reversed(args)
            ][::-1]
        return func(*args, **kwargs)

    def __exit__(self, *error: object) -> None:
        self._copies.clear()
        super().__exit__(*error)

    def _cast(self, item: Any, target: torch.dtype) -> Any:
        if not _floats(item) or item.dtype == target:
            return item
        if not (_weight(item) and target != torch.float32):
            return item.to(target)
        key = id(item), target
        if key not in self._copies:
            self._copies[key] = item, item.to(target)
        return self._copies[key][1]


def _cross_entropy(
    func: Callable[..., torch.Tensor],
    x: torch.Tensor,
    target: torch.Tensor,
    weight: torch.Tensor | None = None,
    *,
    label_smoothing: float = 0.0,
    **rest: Any,
) -> torch.Tensor:
    """As CUDA's autocast runs it.

    The log-softmax asks for its input's dtype, which leaves it as it is. Its
    result is cast for ``nll_loss``. With smoothed labels or probabilities as
    targets all is cast here.
    """
    if label_smoothing or target.is_floating_point():
        rest["label_smoothing"] = label_smoothing
        return func(x.float(), target, weight, **rest)
    logs = F.log_softmax(x, min(1, x.ndim - 1))
    weight = None if weight is None else weight.float()
    return F.nll_loss(logs.float(), target, weight, **rest)


def _target(rule: str, arguments: object, dtype: torch.dtype) -> torch.dtype:
    if rule == "16 bits":
        return dtype
    found: list[torch.dtype] = []
    tree_map(
        lambda item: found.append(item.dtype) if _floats(item) else None,
        arguments,
    )
    if rule == "fp32" or torch.float32 in found:
        return torch.float32
    return found[0] if found else torch.float32


def _explicit(name: str, kwargs: dict) -> bool:
    """Whether the call itself says in which dtype its result is."""
    in_place = name.endswith("_") and not name.endswith("__")
    out, dtype = kwargs.get("out"), kwargs.get("dtype")
    return in_place or out is not None or dtype is not None


def _weight(item: torch.Tensor) -> bool:
    """Whether its copy is worth keeping: PyTorch's own condition."""
    trained = item.requires_grad and item.is_leaf and not item._is_view()
    return trained and item.dtype == torch.float32 and torch.is_grad_enabled()


def _floats(item: object) -> bool:
    """Whether autocast may cast it: fp64 and whole numbers stay."""
    return (
        isinstance(item, torch.Tensor)
        and item.is_floating_point()
        and item.dtype != torch.float64
    )
