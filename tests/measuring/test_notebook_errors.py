"""What an error that nobody caught keeps alive in a notebook."""

import nbformat
import pytest

CELLS = [
    """
import gc, sys, torch, weakref
seen = []
def step():
    kept = [torch.ones(1000) for _ in range(8)]
    seen.extend(weakref.ref(tensor) for tensor in kept)
    raise torch.OutOfMemoryError
def alive():
    gc.collect()
    print(sum(one() is not None for one in seen))
""",
    "step()",
    "alive()",
    "1/0",
    "alive()",
]


def test_the_traceback_keeps_tensors_until_another_error():
    nbclient = pytest.importorskip("nbclient")
    cells = [nbformat.v4.new_code_cell(text) for text in CELLS]
    notebook = nbformat.v4.new_notebook(cells=cells)
    nbclient.NotebookClient(
        notebook, allow_errors=True, kernel_name="python3", timeout=120
    ).execute()
    said = [
        output.text
        for cell in notebook.cells
        for output in cell.outputs
        if output.get("name") == "stdout"
    ]
    assert said == ["8\n", "0\n"]
