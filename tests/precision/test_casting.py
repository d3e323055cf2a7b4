"""Autocast by hand, against PyTorch's own and its lists of operators."""

import math
import re
from functools import partial
from itertools import cycle, product

import pytest
import torch
import torch.nn.functional as F
from precision_helpers import begins, equal, pytorch_lists, says
from torch import nn
from torch.utils.checkpoint import checkpoint

from membudget.measuring import SavedBytes, trace_step
from membudget.models import GPT, Llama, convnet, mlp_blocks
from membudget.precision import LISTS, Autocast, list_of
from tests.soak import SOAK
from tests.versions import here

DTYPES = [torch.bfloat16, torch.float16]
KEYS = {"cpu": "AutocastCPU", "cuda": "AutocastCUDA"}

# The lists ---------------------------------------------------------------

INSIDE = (
    r"_.*|convolution|cudnn_.*|mkldnn_.*|native_.*|.*_forward"
    r"|nll_loss2d|grid_sampler_[23]d"
)
"""What no loop calls: the operators inside those that are listed."""
LEFT_OUT = {
    "linear algebra": r"linalg_.*|(lu|cholesky|triangular)_(solve|inverse)"
    r"|cholesky|geqrf|p?inverse|orgqr|ormqr|qr|svd|frobenius_norm"
    r"|nuclear_norm",
    "Fourier transforms": r"fft_.*|stft",
    "complex numbers": r"polar|view_as_complex",
    "upsampling": r"upsample_.*",
    "padding": r"(reflection|replication)_pad[123]d",
    "pooling\nin three dimensions": r"(adaptive_)?(avg|max)_pool3d"
    r"|fractional_max_pool[23]d",
    "unpooling": r"max_unpool[23]d",
    "fake quantisation": r"fake_quantize_.*",
}
"""The families that the docstring of LISTS names."""
OF = {"cross_entropy": "cross_entropy_loss"}
"""The operators whose name is another one than the function's."""


def registered(device):
    """Operators with a kernel of autocast in this PyTorch."""
    return {
        name.removeprefix("aten::").split(".")[0]
        for name in torch._C._dispatch_get_all_op_names()
        if torch._C._dispatch_has_kernel_for_dispatch_key(name, KEYS[device])
    }


def listed(device):
    return {n for names in LISTS[device].values() for n in names}


@pytest.mark.parametrize("device", LISTS)
def test_the_lists_are_the_dispatchers(device):
    ours = {OF.get(name, name) for name in listed(device)}
    assert ours <= registered(device)
    families = "|".join([INSIDE, *LEFT_OUT.values()])
    if device == "cuda":
        families += "|binary_cross_entropy"  # refused
        assert {"log_softmax", "nll_loss"} <= LISTS["cuda"]["fp32"]
    missing = registered(device) - ours
    assert {n for n in missing if not re.fullmatch(families, n)} == set()
    lists = LISTS[device]  # and no operator is in two
    assert lists.keys() == {"16 bits", "fp32", "widest"}
    assert sum(map(len, lists.values())) == len(listed(device))


def test_a_family_that_is_left_out_is_there_to_be_left_out():
    both = registered("cpu") | registered("cuda")
    for names in LEFT_OUT.values():
        assert any(re.fullmatch(names, name) for name in both), names


THEIRS = pytorch_lists()
POLICIES = {
    **dict.fromkeys(("torch_16", "nn_16", "torch_fp16"), "16 bits"),
    **dict.fromkeys(("nn_fp16", "linalg_fp16", "methods_fp16"), "16 bits"),
    **dict.fromkeys(("torch_fp32", "nn_fp32", "methods_fp32"), "fp32"),
    "torch_need_autocast_promote": "widest",
    "torch_expect_builtin_promote": "",
    "methods_expect_builtin_promote": "",
}
"""Names of PyTorch's lists, and the policy."""


def cases(device):
    """What PyTorch's tests of autocast call: policy, name, call."""
    for group, items in vars(THEIRS[device]).items():
        for name, arguments, *rest in items if group in POLICIES else ():
            options = rest[0] if rest and isinstance(rest[0], dict) else {}
            yield POLICIES[group], name, _call(group, name), arguments, options


def _call(group, name):
    home = {"nn": torch._C._nn, "linalg": torch._C._linalg}
    if group.startswith("methods"):
        return lambda x, *args: getattr(x, name)(*args)
    # looked up later: a name may be missing in other versions
    return lambda *args, **options: getattr(
        home.get(group.split("_")[0], torch), name
    )(*args, **options)


@pytest.mark.parametrize("device", LISTS)
def test_policies_are_those_of_pytorchs_tests(device):
    seen = set()
    for policy, name, *_ in cases(device):
        if name in ("cat", "stack") and device == "cuda":
            assert list_of(name, device) == ""
        elif not re.fullmatch("|".join([INSIDE, LEFT_OUT["padding"]]), name):
            seen.add(name)
            found = list_of(name, device)
            aliases = {"__matmul__": "matmul", "__pow__": "pow"}
            if policy or name not in aliases:
                assert found == policy, name
    assert len(seen) > (30 if device == "cpu" else 70)


@pytest.mark.parametrize("device", LISTS)
def test_what_pytorchs_tests_leave_out_is_called_here(device):
    tested = {name.strip("_") for _, name, *_ in cases(device)}
    called = {"cpu": ALONE, "cuda": CUDA}[device]
    assert listed(device) - tested <= called.keys()


def test_lists_by_name():
    """By default CUDA's, and by other names of an operator."""
    assert (list_of("softmax"), list_of("softmax", "cpu")) == ("fp32", "")
    assert (list_of("cat"), list_of("concat", "cpu")) == ("", "widest")
    assert list_of("__matmul__") == list_of("__rmatmul__") == "16 bits"
    assert list_of("__pow__") == list_of("__rpow__") == "fp32"
    assert list_of("grid_sample") == "widest"
    assert list_of("relu") == list_of("") == list_of("no such") == ""


def test_the_defaults_and_a_dtype_that_autocast_does_not_take():
    cast = Autocast()
    assert (cast.device, cast.dtype) == ("cuda", torch.bfloat16)
    message = "dtype is torch.float64: use torch.bfloat16 or torch.float16"
    with pytest.raises(ValueError, match=says(message)):
        Autocast("cpu", torch.float64)


# Operator by operator ----------------------------------------------------


def result(call, context):
    """What a call returns, or its kind of error."""
    torch.manual_seed(0)
    try:
        with context:
            return call()
    except (RuntimeError, ValueError) as error:
        return type(error).__name__


def test_the_cpus_operators_bit_by_bit():
    """Whatever PyTorch's tests call, on the arguments they use."""
    compared = 0
    for policy, name, call, arguments, options in cases("cpu"):
        if policy and not list_of(name, "cpu"):
            continue
        run = partial(call, *arguments, **options)
        theirs = result(run, torch.autocast("cpu", torch.bfloat16))
        ours = result(run, Autocast("cpu", torch.bfloat16))
        assert isinstance(theirs, torch.Tensor), name
        assert equal(ours, theirs), name
        compared += 1
    assert compared > 50


def numbers(*shape, dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator).to(dtype)


X, W, V = numbers(4, 8), numbers(8, 8, seed=1), numbers(8, seed=2)
H, H8 = X.bfloat16(), W.bfloat16()
CUBE = numbers(2, 3, 3)
ZEROS = torch.zeros(4, dtype=torch.long)
ALONE = {
    "cdist": lambda: torch.cdist(H, H),
    "cross_entropy": lambda: F.cross_entropy(H, ZEROS),
    "cross_entropy, weights": lambda: F.cross_entropy(
        H, ZEROS, V.abs().bfloat16(), label_smoothing=0.1
    ),
    "ctc_loss": lambda: F.ctc_loss(
        numbers(4, 1, 8, dtype=torch.bfloat16).log_softmax(-1),
        torch.ones(1, 2, dtype=torch.long),
        (4,),
        (2,),
    ),
    "grid_sampler": lambda: F.grid_sample(
        numbers(1, 1, 4, 4, dtype=torch.bfloat16),
        numbers(1, 2, 2, 2, dtype=torch.bfloat16),
        align_corners=False,
    ),
    "index_copy": lambda: torch.index_copy(X, 0, ZEROS[:1], H[1:2]),
    "kl_div": lambda: F.kl_div(H, H.exp(), reduction="batchmean"),
    "linalg_vecdot": lambda: torch.linalg.vecdot(X, X),
    "nanquantile": lambda: torch.nanquantile(H, 0.5),
    "prod": lambda: H.prod(),
    "prod, dim": lambda: torch.prod(H, 0),
    "prod, dtype": lambda: torch.prod(H, dtype=torch.float64),
    "prod, 16 bits": lambda: torch.prod(H, dtype=torch.bfloat16),
    "quantile": lambda: torch.quantile(H, 0.25),
    "scaled_dot_product_attention": lambda: F.scaled_dot_product_attention(
        CUBE, CUBE, CUBE.bfloat16(), attn_mask=CUBE
    ),
    "trace": lambda: H8.trace(),
    "matmul, @": lambda: X @ W,
    "matmul, reflected": lambda: W.__rmatmul__(X),
    "linear, keywords": lambda: F.linear(input=X, weight=W, bias=V),
    "binary_cross_entropy": lambda: F.binary_cross_entropy(
        H.sigmoid(), (X > 0).bfloat16()
    ),
    "cat of 16 bits": lambda: torch.cat([H, H]),
    "cat, concat": lambda: torch.concat([H, X]),
    "cat of nothing": lambda: torch.cat([]),
    "hstack": lambda: torch.hstack([H, X]),
    # fp64 stays as it is
    "matmul of fp64": lambda: X.double() @ W.double(),
    "fp64 and fp32": lambda: X.double() @ W,
    "loss of fp64 and 16 bits": lambda: F.mse_loss(X.double(), H),
    "cat of fp64": lambda: torch.cat([X.double(), H]),
    "whole numbers": lambda: ZEROS[None] @ ZEROS[:, None],
    "cat of whole numbers": lambda: torch.cat([ZEROS, ZEROS]),
    # no list
    "softmax": lambda: F.softmax(H, -1),
    "layer_norm, weights": lambda: F.layer_norm(X, (8,), V, V),
    "embedding": lambda: F.embedding(ZEROS, W),
    # what says its dtype itself: in place, out=
    "addmm_": lambda: torch.zeros(4, 8).addmm_(X, W),
    "mm, out": lambda: torch.mm(X, W, out=torch.zeros(4, 8)),
    "cat, out": lambda: torch.cat([X, X], out=torch.zeros(8, 8)),
    "out of another dtype": lambda: torch.mm(
        X, W, out=torch.zeros(4, 8).half()
    ),
    "index_copy_": lambda: X.clone().index_copy_(0, ZEROS[:1], X[1:2]),
}


@pytest.mark.parametrize("name", ALONE)
def test_calls_on_the_cpu_bit_by_bit(name):
    theirs = result(ALONE[name], torch.autocast("cpu", torch.bfloat16))
    ours = result(ALONE[name], Autocast("cpu", torch.bfloat16))
    assert equal(ours, theirs)


@pytest.mark.filterwarnings("ignore:.*(chain_matmul|cross)")
def test_dtypes_of_cudas_operators():
    """On the CPU's tensors, the operators of PyTorch's tests for CUDA."""
    compared = 0
    for policy, name, call, arguments, options in cases("cuda"):
        if name == "einsum" or (policy and not list_of(name)):
            continue  # einsum: below; the others are inside of these
        run = partial(call, *arguments, **options)
        found = result(run, Autocast("cuda", torch.float16))
        found = found[0] if isinstance(found, tuple) else found
        if policy:
            sixteen = policy == "16 bits"
            dtype = torch.float16 if sixteen else torch.float32
            assert found.dtype == dtype, name
        else:
            assert equal(found, run()), name
        compared += 1
    assert compared > 90


A = numbers(4, 4)
A16 = A.half()
CUDA = {
    "linear": (lambda a, h: F.linear(a, a), torch.float16),
    "einsum": (lambda a, h: torch.einsum("ij,jk->ik", a, a), torch.float16),
    "scaled_dot_product_attention": (
        lambda a, h: F.scaled_dot_product_attention(a[None], a[None], a[None]),
        torch.float16,
    ),
    "huber_loss": (lambda a, h: F.huber_loss(h, h), torch.float32),
    "softmax": (lambda a, h: F.softmax(h, -1), torch.float32),
    "softmax, dtype": (
        lambda a, h: F.softmax(h, -1, dtype=torch.float16),
        torch.float16,
    ),
    "sum, dtype": (lambda a, h: h.sum(dtype=torch.float64), torch.float64),
    "rms_norm": (
        lambda a, h: nn.RMSNorm(4)(h),
        torch.float16 if here("rms_norm is on no list") else torch.float32,
    ),
    "batch_norm": (lambda a, h: nn.BatchNorm1d(4)(h), torch.float16),
    "power": (lambda a, h: h**2, torch.float32),
    "reflected power": (lambda a, h: 2**h, torch.float32),
    "exp in place": (lambda a, h: h.clone().exp_(), torch.float16),
    "cross_entropy": (
        lambda a, h: F.cross_entropy(h, h.argmax(-1)),
        torch.float32,
    ),
    "gelu": (lambda a, h: F.gelu(h), torch.float16),
    "add": (lambda a, h: h + a, torch.float32),
    "cat": (lambda a, h: torch.cat([h, a]), torch.float32),
    "atan2 of 16 bits": (lambda a, h: torch.atan2(h, h), torch.float16),
    "fp64": (lambda a, h: a.double() @ a.double(), torch.float64),
    "whole numbers": (lambda a, h: h[0].long().sum(), torch.int64),
}


@pytest.mark.parametrize("name", CUDA)
def test_dtypes_under_cudas_lists(name):
    run, dtype = CUDA[name]
    with Autocast("cuda", torch.float16):
        assert run(A, A16).dtype == dtype


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("name", CUDA)
def test_dtypes_on_a_gpu(name):
    run, dtype = CUDA[name]
    with torch.device("cuda"), torch.autocast("cuda", torch.float16):
        assert run(A.cuda(), A16.cuda()).dtype == dtype


def test_binary_cross_entropy_is_refused_on_cuda_alone():
    def run():
        return F.binary_cross_entropy(A16.sigmoid(), A16.sigmoid())

    with (
        pytest.raises(RuntimeError, match=begins("CUDA's autocast refuses")),
        Autocast("cuda"),
    ):
        run()
    with Autocast("cpu"):
        assert run().dtype == torch.float32
    with Autocast("cuda"):
        F.binary_cross_entropy_with_logits(A16, A16.sigmoid())


# Whole networks ----------------------------------------------------------


class Shared(nn.Module):
    """A weight that is used three times, a frozen one, and a loss in fp32."""

    def __init__(self):
        super().__init__()
        self.one = nn.Linear(8, 8)
        self.two = nn.Linear(8, 8)
        self.two.weight.requires_grad_(False)
        self.norm = nn.LayerNorm(8)

    def forward(self, x):
        x = self.one(self.one(x)) + self.two(x)
        return torch.stack([self.norm(x), F.linear(x, self.one.weight)]).sum(0)


def pictures(channels, side):
    return lambda: (
        numbers(4, channels, side, side, seed=3),
        torch.arange(4) % 10,
    )


def vectors(width):
    return lambda: (numbers(6, width, seed=3), torch.arange(6) % 8)


def tokens():
    generator = torch.Generator().manual_seed(3)
    ids = torch.randint(40, (2, 13), generator=generator)
    return ids[:, :-1], ids[:, 1:]


NETS = {
    "mlp blocks": (lambda: mlp_blocks(12, 2), vectors(12)),
    "shared": (Shared, vectors(8)),
    "convnet": (lambda: convnet((4, 8)), pictures(3, 8)),
    "gpt": (lambda: GPT(40, 16, 16, 2, 2), tokens),
    "gpt, not fused": (lambda: GPT(40, 16, 16, 2, 2, fused=False), tokens),
    "gpt, dropout": (
        lambda: GPT(40, 16, 16, 1, 2, fused=False, dropout=0.2, tied=True),
        tokens,
    ),
    "llama": (lambda: Llama(40, 16, 2, 4, 2, 24), tokens),
}


def loss_under(context):
    """A loss whose forward pass runs under a new context."""

    def loss(model, x, y):
        with context():
            output = model(x)
            return F.cross_entropy(output.flatten(0, -2), y.flatten())

    return loss


def measured(net, context):
    """Loss, gradients, bytes saved, and the peak of a step."""
    make, batch = NETS[net]
    torch.manual_seed(0)
    model = make()
    x, y = batch()
    loss = loss_under(context)
    torch.manual_seed(1)
    with SavedBytes(model, x, y) as saved:
        value = loss(model, x, y)
    value.backward()
    found = [value.detach(), [p.grad for p in model.parameters()]]
    tracker = trace_step(model, loss, x, y)
    return found, saved.total, tracker.peak, tracker.timeline


CASES = [*(product(NETS, DTYPES) if SOAK else zip(NETS, cycle(DTYPES)))]


@pytest.mark.parametrize(("net", "dtype"), CASES)
def test_a_step_is_autocasts(net, dtype):
    """Bit by bit, and byte by byte at every moment."""
    theirs = measured(net, lambda: torch.autocast("cpu", dtype))
    ours = measured(net, lambda: Autocast("cpu", dtype))
    assert equal(ours[0], theirs[0])
    assert ours[1:3] == theirs[1:3]
    assert max(ours[3]) == max(theirs[3])


def test_the_two_dtypes_differ():
    """The test above sees a cast that is not made."""
    plain, one, two = (
        measured("mlp blocks", context)[0]
        for context in (
            lambda: torch.autocast("cpu", enabled=False),
            lambda: Autocast("cpu", torch.bfloat16),
            lambda: Autocast("cpu", torch.float16),
        )
    )
    assert not (equal(plain, one) or equal(plain, two) or equal(one, two))


def test_cudas_lists_keep_the_log_softmax_twice():
    """In 16 bits, as it comes out, and as an fp32 copy for the loss."""
    logits = torch.randn(6, 10, dtype=torch.bfloat16, requires_grad=True)
    kept = {}
    for device in LISTS:
        with Autocast(device), SavedBytes(logits) as saved:
            F.cross_entropy(logits, torch.zeros(6, dtype=torch.long))
        kept[device] = saved.total
    assert kept["cuda"] - kept["cpu"] == 2 * logits.numel()


def test_cudas_cross_entropy_with_smoothed_labels_is_in_fp32():
    logits, labels = torch.randn(6, 10), torch.arange(6)
    with Autocast("cuda"):
        ours = F.cross_entropy(logits.half(), labels, label_smoothing=0.1)
    theirs = F.cross_entropy(
        logits.half().float(), labels, label_smoothing=0.1
    )
    assert torch.equal(ours, theirs)


# The cache ---------------------------------------------------------------


def saved_by_two(context, leaf):
    """Bytes of all that two products with one weight save."""
    x = X.clone().requires_grad_()
    with SavedBytes() as saved, context:
        F.linear(F.linear(x, leaf), leaf)
    return saved.total


LEAVES = {
    "parameter": lambda: nn.Parameter(W.clone()),
    "view": lambda: torch.stack([W, W])[0].requires_grad_(),
    "parameter of a view": lambda: nn.Parameter(torch.stack([W, W])[0]),
    "no leaf": lambda: W.clone().requires_grad_() * 1,
    "frozen": lambda: W.clone(),
    "fp16": lambda: W.half().requires_grad_(),
}


@pytest.mark.parametrize("leaf", LEAVES)
def test_which_copies_are_kept(leaf):
    both = torch.autocast("cpu", torch.bfloat16), Autocast("cpu")
    theirs, ours = (saved_by_two(cast, LEAVES[leaf]()) for cast in both)
    assert ours == theirs


def test_copies_without_a_graph_are_not_used_with_one():
    found = []
    for context in (torch.autocast("cpu", torch.bfloat16), Autocast("cpu")):
        weight = nn.Parameter(W.clone())
        with context:
            with torch.no_grad():
                without = X @ weight
            with_graph = X @ weight
        assert not without.requires_grad
        with_graph.float().sum().backward()
        found.append(weight.grad)
    assert equal(*found)


def kept(cast):
    return len(cast._copies)


def test_the_cache_is_emptied_at_exit():
    cast, weight = Autocast("cpu"), nn.Parameter(W.clone())
    with cast:
        X @ weight
        assert kept(cast) == 1
    assert kept(cast) == 0
    with pytest.raises(KeyError), cast:
        X @ weight
        assert kept(cast) == 1
        raise KeyError
    assert kept(cast) == 0
    assert (X @ weight).dtype == torch.float32


# What it is not ----------------------------------------------------------


def test_what_runs_inside_a_function_is_not_seen():
    """As the docstring says; PyTorch's own sees through these."""
    torch.manual_seed(0)
    recurrent = nn.LSTM(8, 8)
    for run in (
        lambda: nn.MultiheadAttention(8, 2)(X[None], X[None], X[None])[0],
        lambda: recurrent(X[None])[0],
        lambda: torch.einsum("ij,jk->ik", X, W),
        lambda: torch.tensordot(X, W, 1),
    ):
        with torch.autocast("cpu", torch.bfloat16):
            theirs = run()
        with Autocast("cpu"):
            ours = run()
        assert theirs.dtype == torch.bfloat16
        assert ours.dtype == torch.float32


def test_a_recomputation_does_not_run_under_it():
    """PyTorch's checkpoint restores its own autocast, not this one."""
    layer = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
    with Autocast("cpu"):
        loss = checkpoint(layer, X, use_reentrant=False).float().sum()
    with pytest.raises(torch.utils.checkpoint.CheckpointError):
        loss.backward()
    with torch.autocast("cpu", torch.bfloat16):
        loss = checkpoint(layer, X, use_reentrant=False).float().sum()
    loss.backward()
    assert all(math.isfinite(p.grad.sum()) for p in layer.parameters())
