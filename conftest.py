"""Tests and notebooks on a processor that passes for an older one."""

import os

# oneDNN's products may use what PyTorch's own kernels may: a processor without
# AVX-512 lacks it for both. Else PyTorch packs numbers that it cannot read.
OLDER = {"default": "SSE41", "avx2": "AVX2"}

if limit := OLDER.get(os.environ.get("ATEN_CPU_CAPABILITY", "")):
    os.environ.setdefault("ONEDNN_MAX_CPU_ISA", limit)


def pytest_collection_modifyitems(items):
    """Compare no pictures: nbval itself leaves out those that are no SVG."""
    for notebook in {item.parent for item in items}:
        if hasattr(notebook, "skip_compare"):
            notebook.skip_compare += ("image/svg+xml",)
