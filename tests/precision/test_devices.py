"""Which formats a device has, on machines that are not here."""

import os
import traceback

import pytest
import torch
from precision_helpers import begins, says

from membudget.precision import FORMATS, devices, support, tf32

GPUS = {
    "M60": ((5, 2), {"fp32"}, set()),
    "P100": ((6, 0), {"fp32"}, {"fp16"}),  # cuBLAS has no bf16 products there
    "V100": ((7, 0), {"fp32", "fp16"}, {"bf16"}),
    "T4": ((7, 5), {"fp32", "fp16"}, {"bf16"}),
    "A100": ((8, 0), {"fp32", "tf32", "bf16", "fp16"}, set()),
    "L4": ((8, 9), set(FORMATS), set()),
    "B200": ((10, 0), set(FORMATS), set()),
}
"""Their capability, what they have units for, and what they emulate."""


@pytest.fixture
def gpu(monkeypatch):
    """Two GPUs, the second of this name."""

    def install(name):
        of = {0: (5, 2), 1: GPUS[name][0]}
        cuda = torch.cuda
        monkeypatch.setattr(cuda, "is_available", lambda: True)
        monkeypatch.setattr(cuda, "device_count", lambda: 2)
        monkeypatch.setattr(cuda, "current_device", lambda: 1)
        monkeypatch.setattr(
            cuda, "get_device_capability", lambda d: of[torch.device(d).index]
        )

    return install


@pytest.fixture
def processor(monkeypatch):
    """A CPU with or without units for 16 bits; None: PyTorch cannot tell."""

    def install(bf16, fp16):
        for of, name, answer in (
            (torch.cpu, "_is_avx512_bf16_supported", bf16),
            (torch.ops.mkldnn, "_is_mkldnn_fp16_supported", fp16),
        ):
            ask = None if answer is None else lambda a=answer: a
            monkeypatch.setattr(of, name, ask, raising=False)

    return install


# Support -----------------------------------------------------------------


@pytest.mark.parametrize("name", GPUS)
def test_gpus(gpu, name):
    gpu(name)
    _, native, emulated = GPUS[name]
    expected = dict.fromkeys(FORMATS, "absent")
    expected |= dict.fromkeys(native, "native")
    expected |= dict.fromkeys(emulated, "emulated")
    assert {f: support(f, "cuda:1") for f in FORMATS} == expected


def test_every_gpu_for_itself(gpu):
    gpu("A100")
    assert support("bf16", "cuda:0") == "absent"
    assert support("bf16", torch.device("cuda:1")) == "native"
    assert support("bf16") == support("bf16", "cuda") == "native"


@pytest.mark.parametrize(
    ("bf16", "fp16"), [(True, False), (False, True), (None, None)]
)
def test_processors(processor, bf16, fp16):
    processor(bf16, fp16)
    assert {f: support(f, "cpu") for f in FORMATS} == {
        **dict.fromkeys(FORMATS, "absent"),
        "fp32": "native",
        "bf16": "native" if bf16 else "emulated",
        "fp16": "native" if fp16 else "emulated",
    }


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs no GPU")
def test_without_a_gpu_it_is_the_cpu():
    for format in FORMATS:
        assert support(format) == support(format, "cpu")
    assert support("fp32", torch.device("cpu")) == "native"


# tf32 --------------------------------------------------------------------


def read(setting):
    """What it is, or that PyTorch refuses to tell (of a mix of its APIs)."""
    try:
        return setting()
    except RuntimeError:
        return "refused"


def settings():
    """All that PyTorch tells of fp32 products, by its old and new names."""
    matmul, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
    return {
        "matmul": matmul.fp32_precision,
        "convolution": cudnn.conv.fp32_precision,
        "recurrent": cudnn.rnn.fp32_precision,
        "all": torch.backends.fp32_precision,
        "old matmul": read(lambda: matmul.allow_tf32),
        "old cudnn": read(lambda: cudnn.allow_tf32),
        "old precision": read(torch.get_float32_matmul_precision),
    }


def legacy(matmul, cudnn):
    torch.backends.cuda.matmul.allow_tf32 = matmul
    torch.backends.cudnn.allow_tf32 = cudnn


def new(place, value):
    place.fp32_precision = value


BEFORE = {
    "nothing": lambda: None,
    "matmul alone": lambda: legacy(True, False),
    "convolutions alone": lambda: legacy(False, True),
    "high": lambda: torch.set_float32_matmul_precision("high"),
    "new, ieee": lambda: new(torch.backends.cuda.matmul, "ieee"),
    "new, convolutions": lambda: new(torch.backends.cudnn.conv, "ieee"),
    "new, all": lambda: new(torch.backends, "ieee"),
}
"""What a program may have said before the block."""


def in_a_child(run):
    """Run it in a process of its own, whose settings end with it."""
    child = os.fork()
    if not child:
        code = 1
        try:
            run()
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    assert os.waitpid(child, 0)[1] == 0


@pytest.mark.parametrize("before", BEFORE)
def test_tf32_in_the_block_alone(gpu, before):
    gpu("A100")

    def run():
        BEFORE[before]()
        was = settings()
        with tf32("cuda"):
            inside = settings()
            with tf32():
                assert settings() == inside
            assert settings() == inside
        assert settings() == was
        assert inside["matmul"] == inside["convolution"] == "tf32"
        with pytest.raises(KeyError), tf32("cuda"):
            assert settings() == inside
            raise KeyError
        assert settings() == was

    in_a_child(run)


def test_a_gpu_without_tf32(gpu):
    gpu("T4")
    before = settings()
    message = (
        "cuda:1 has no tf32, which CUDA devices of capability 8.0 and above "
        "have: use fp32, or fp16 on a GPU that is older"
    )
    with pytest.raises(ValueError, match=says(message)), tf32("cuda"):
        pytest.fail("entered without tf32")
    assert settings() == before


def test_a_cpu_without_tf32():
    with pytest.raises(ValueError, match=begins("cpu has no tf32")):
        tf32("cpu").__enter__()


def test_since_when():
    """Every format but fp32 has its capability, and those have not more."""
    assert set(devices.SINCE) | {"fp32"} == set(FORMATS)
