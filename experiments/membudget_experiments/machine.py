"""The machine and the code that a record names, and nothing that is private.

No host name, user name or path.
"""

import contextlib
import json
import os
import platform
import re
import subprocess
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

import torch

HERE = Path(__file__).resolve().parent

RECORDS_IN_SOURCES = "src/membudget/records/json"
COMMIT = "MEMBUDGET_COMMIT"
"""Environment variable that states the commit where there is no git."""


def describe_device(device: torch.device) -> dict:
    """The record's part ``device``; memory in bytes."""
    if device.type == "cpu":
        return {
            "kind": "cpu",
            "name": _processor(),
            "memory": physical_memory(),
            "capability": torch.backends.cpu.get_cpu_capability(),
            "driver": None,
            "cuda": None,
            "threads": torch.get_num_threads(),
        }
    properties = torch.cuda.get_device_properties(device)
    return {
        "kind": device.type,
        "name": properties.name,
        "memory": properties.total_memory,
        "capability": f"{properties.major}.{properties.minor}",
        "driver": _driver(),
        "cuda": torch.version.cuda,
        "threads": None,
    }


def describe_software() -> dict:
    """The record's part ``software``."""
    settings = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
    return {
        "torch": torch.__version__,
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
        "matmul_precision": torch.get_float32_matmul_precision(),
        "allocator_settings": next(
            (os.environ[name] for name in settings if os.environ.get(name)),
            None,
        ),
    }


def commit() -> tuple[str | None, bool | None]:
    """The commit of this code, and whether the package is as committed.

    Without git the commit is that of the environment variable
    ``MEMBUDGET_COMMIT``, if it is set, or else the one from which pip has
    installed the package, and nothing is known of changes. Records do not
    count as changes.

    Raises:
        ValueError: the variable holds no commit.
    """
    head = _output("git", "rev-parse", "HEAD")
    tracked = _output("git", "ls-files", "--error-unmatch", "machine.py")
    if head and tracked:
        code = ("--", ".", ":(top)src", f":(top,exclude){RECORDS_IN_SOURCES}")
        changes = _output("git", "status", "--porcelain", *code)
        return head, changes == ""
    stated = os.environ.get(COMMIT)
    if stated and not re.fullmatch("[0-9a-f]{40}", stated):
        raise ValueError(
            f"{COMMIT} is {stated!r}: set it to the output of "
            "git rev-parse HEAD, or unset it"
        )
    return stated or _installed_commit(), None


def _installed_commit() -> str | None:
    """The commit that pip has noted for a package from a repository (PEP
    610)."""
    with contextlib.suppress(PackageNotFoundError, ValueError):
        noted = distribution("membudget-experiments").read_text(
            "direct_url.json"
        )
        return json.loads(noted or "{}").get("vcs_info", {}).get("commit_id")
    return None


def size_for(device: torch.device) -> str:
    """The one of :data:`SIZES` that a device is meant for.

    ``t4`` up to 20 GB, ``large`` above; ``tiny`` on a CPU.
    """
    if device.type == "cpu":
        return "tiny"
    total = torch.cuda.get_device_properties(device).total_memory
    return "t4" if total < 20e9 else "large"


def _processor() -> str:
    """The processor's model."""
    with contextlib.suppress(OSError):
        text = Path("/proc/cpuinfo").read_text()
        if found := re.search(r"^model name\s*:\s*(.+)$", text, re.M):
            return " ".join(found[1].split())
    brand = _output("sysctl", "-n", "machdep.cpu.brand_string")
    return brand or platform.processor() or platform.machine() or "CPU"


def physical_memory() -> int | None:
    """Bytes of the CPU's memory; None where the system does not tell."""
    with contextlib.suppress(AttributeError, OSError, ValueError):
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return None


def _driver() -> str | None:
    """The version of NVIDIA's driver."""
    query = ("--query-gpu=driver_version", "--format=csv,noheader")
    text = _output("nvidia-smi", *query)
    return text.split("\n")[0] if text else None


def _output(*command: str) -> str | None:
    """What a command prints; None where it is not there or fails."""
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        done = subprocess.run(
            command, cwd=HERE, capture_output=True, text=True, timeout=120
        )
        return done.stdout.strip() if done.returncode == 0 else None
    return None
