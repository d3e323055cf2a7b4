"""`make notebooks`: one normal form, and no half-written notebook."""

import nbformat
import notebooks
import pytest


def write(path, *sources):
    cells = [nbformat.v4.new_code_cell(source) for source in sources]
    nbformat.write(nbformat.v4.new_notebook(cells=cells), path)
    return path.read_text()


def test_the_normal_form_is_reached_at_once(tmp_path, capsys):
    path = tmp_path / "good.ipynb"
    write(path, "import ipywidgets", "print(1)\nprint(2)", "ipywidgets.Text()")
    notebooks.refresh(path)
    first = path.read_text()
    notebooks.refresh(path)
    assert path.read_text() == first
    assert capsys.readouterr().out.splitlines()[1].endswith("unchanged")

    notebook = nbformat.reads(first, as_version=4)
    assert "widgets" not in notebook.metadata
    assert notebook.metadata.kernelspec.name == "python3"
    assert [cell.execution_count for cell in notebook.cells] == [1, 2, 3]
    assert notebook.cells[1].outputs[0].text == "1\n2\n"
    assert list(notebook.cells[2].outputs[0].data) == ["text/plain"]


@pytest.mark.parametrize(
    ("source", "sentence"),
    [
        ("1 / 0", "a cell failed"),
        ("import sys; print('!', file=sys.stderr)", "wrote to stderr"),
    ],
)
def test_a_failure_leaves_the_file_alone(tmp_path, source, sentence):
    path = tmp_path / "bad.ipynb"
    before = write(path, "print(1)", source)
    with pytest.raises(SystemExit, match=sentence):
        notebooks.refresh(path)
    assert path.read_text() == before
