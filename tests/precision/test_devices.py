"""Which formats a device has, on machines that are not here."""

import os
import traceback

import pytest
import torch
from precision_helpers import begins, says

from membudget.precision import FORMATS, devices, support, tf32

GPUS = {
    "M60": (5, 2),
    "P100": (6, 0),
    "V100": (7, 0),
    "T4": (7, 5),
    "A100": (8, 0),
    "L4": (8, 9),
    "H100": (9, 0),
    "B200": (10, 0),
}
NATIVE = {
    "M60": {"fp32"},
    "P100": {"fp32"},
    "V100": {"fp32", "fp16"},
    "T4": {"fp32", "fp16"},
    "A100": {"fp32", "tf32", "bf16", "fp16"},
    "L4": set(FORMATS),
    "H100": set(FORMATS),
    "B200": set(FORMATS),
}
EMULATED = {
    "M60": set(),
    "P100": {"fp16"},  # cuBLAS has no bf16 products there
    "V100": {"bf16"},
    "T4": {"bf16"},
}


@pytest.fixture
def gpu(monkeypatch):
    """Two GPUs, the second of the given capability."""

    def install(capability):
        of = {0: (5, 2), 1: capability}
        cuda = torch.cuda
        monkeypatch.setattr(cuda, "is_available", lambda: True)
        monkeypatch.setattr(cuda, "device_count", lambda: 2)
        monkeypatch.setattr(cuda, "current_device", lambda: 1)
        monkeypatch.setattr(
            cuda, "get_device_capability", lambda d: of[torch.device(d).index]
        )

    return install


# Support -----------------------------------------------------------------


@pytest.mark.parametrize("name", GPUS)
def test_gpus(gpu, name):
    gpu(GPUS[name])
    found = {f: support(f, "cuda:1") for f in FORMATS}
    native = {f for f, how in found.items() if how == "native"}
    assert native == NATIVE[name]
    emulated = {f for f, how in found.items() if how == "emulated"}
    assert emulated == EMULATED.get(name, set())
    assert set(found.values()) <= {"native", "emulated", "absent"}


def test_a_t4_emulates_bf16(gpu):
    gpu(GPUS["T4"])
    assert support("bf16", "cuda") == "emulated"
    assert support("fp16", torch.device("cuda:1")) == "native"
    assert support("tf32", "cuda") == "absent"
    assert support("fp8-e4m3", "cuda") == "absent"


def test_every_gpu_for_itself(gpu):
    gpu(GPUS["A100"])
    assert support("bf16", "cuda:0") == "absent"
    assert support("bf16", "cuda:1") == support("bf16") == "native"


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("bf16", [True, False, None])
@pytest.mark.parametrize("fp16", [True, False, None])
def test_processors(processor, format, bf16, fp16):
    processor(bf16, fp16)
    expected = {
        "fp32": "native",
        "bf16": "native" if bf16 else "emulated",
        "fp16": "native" if fp16 else "emulated",
    }
    assert support(format, "cpu") == expected.get(format, "absent")


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs no GPU")
def test_without_a_gpu_it_is_the_cpu():
    for format in FORMATS:
        assert support(format) == support(format, "cpu")
    assert support("fp32", torch.device("cpu")) == "native"


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs no GPU")
def test_devices_and_formats_that_are_not_there():
    with pytest.raises(ValueError, match=begins("device 'cuda' is not here")):
        support("fp32", "cuda")
    with pytest.raises(ValueError, match=begins("there is no format 'half'")):
        support("half", "cpu")
    with pytest.raises(ValueError, match=begins("there is no format 'half'")):
        support("half", "cuda")


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
    "off": lambda: legacy(False, False),
    "on": lambda: legacy(True, True),
    "matmul alone": lambda: legacy(True, False),
    "convolutions alone": lambda: legacy(False, True),
    "highest": lambda: torch.set_float32_matmul_precision("highest"),
    "high": lambda: torch.set_float32_matmul_precision("high"),
    "medium": lambda: torch.set_float32_matmul_precision("medium"),
    "new, tf32": lambda: new(torch.backends.cuda.matmul, "tf32"),
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
    gpu(GPUS["A100"])

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


@pytest.mark.parametrize("name", ["P100", "V100", "T4"])
def test_a_gpu_without_tf32(gpu, name):
    gpu(GPUS[name])
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
