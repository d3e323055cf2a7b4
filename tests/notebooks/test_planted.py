"""The test of the tests: plant one fault of each kind, and see red."""

import shutil
import subprocess
import sys

import hygiene
import nbformat
import prose
import pytest
from project import ROOT, notebooks


@pytest.fixture
def course(tmp_path):
    """A copy of the notebooks and of the settings they are checked against."""
    for path in notebooks():
        (tmp_path / path.parent.name).mkdir(exist_ok=True)
        shutil.copy(path, tmp_path / path.parent.name)
    shutil.copy(ROOT / "_toc.yml", tmp_path)
    return tmp_path


@pytest.fixture
def notebook(course):
    """The first notebook of the copy; gives its path."""
    return notebooks(course)[0]


def edit(path, change):
    """Change the notebook's code cells and write it."""
    content = nbformat.read(path, as_version=4)
    change([cell for cell in content.cells if cell.cell_type == "code"])
    nbformat.write(content, path)


def test_nothing_planted(course, notebook):
    assert hygiene.problems(notebook, course) == []
    assert prose.problems(notebook, course) == []


def strip(cells):
    cells[-1].execution_count = None
    cells[-1].outputs = []


def out_of_order(cells):
    cells[-1].execution_count += 1


def stderr(cells):
    cells[-1].outputs = [nbformat.v4.new_output("stream", name="stderr")]


def failed(cells):
    cells[-1].outputs = [nbformat.v4.new_output("error", ename="Error")]


def drift(cells):
    cells[0].source += "\n# drifted"


def long_cell(cells):
    cells[-1].source = "\n".join("x = 1" for _ in range(16))


def wide_line(cells):
    cells[-1].source = "x" * 80


def semicolon(cells):
    cells[-1].source = "plot();"


def private_path(cells):
    cells[-1].source = "open('/home/me/data')"


def picture(cells, data):
    cells[-1].outputs = [nbformat.v4.new_output("display_data", data)]
    cells[-1].metadata = {}


def no_alt_text(cells):
    picture(cells, {"image/svg+xml": ""})


def no_svg(cells):
    picture(cells, {"image/png": ""})


def small_letters(cells):
    text = '<text style="font-size: 8px" x="1">small</text>'
    picture(cells, {"image/svg+xml": f"<svg>{text}</svg>"})


def tag_without_reason(cells):
    cells[-1].metadata["tags"] = ["nbval-skip"]


FAULTS = {
    strip: "executed as None",
    out_of_order: "executed as",
    stderr: "writes to stderr",
    failed: "ends in an error",
    drift: "is not that of tools/setup_cell.py",
    long_cell: "has 16 lines",
    wide_line: "has 80 columns",
    semicolon: "semicolon",
    private_path: "somebody's machine",
    no_alt_text: "without alt text",
    no_svg: "no SVG",
    small_letters: "less than 9 points",
    tag_without_reason: "without a `reason`",
}


@pytest.mark.parametrize("fault", FAULTS, ids=lambda f: f.__name__)
def test_hygiene_turns_red(course, notebook, fault):
    edit(notebook, fault)
    assert FAULTS[fault] in "\n".join(hygiene.problems(notebook, course))


@pytest.mark.parametrize(
    ("sentence", "words"),
    [
        ("The peak is 987.65 MiB.", "987.65 in"),
        ("It has 987 654 weights.", "987 654 in"),
        ("Never before 1.57 MiB, in 0.08 units.", "8.07 need not be given"),
        ("As [chapter 4](02_ledger.ipynb) says.", "leads to 02_ledger"),
        ("The [next chapter](../book/intro.md).", "leads to ../book/intro"),
        ("See [chapter 2](02_ledger.ipynb), section 2.99.", "section 2.99"),
        ("See section 3.99.", "no section 3.99"),
    ],
)
def test_a_sentence_that_is_not_so_turns_red(
    course, notebook, sentence, words
):
    content = nbformat.read(notebook, as_version=4)
    for cell in content.cells:
        if "need not" in words and cell.cell_type == "markdown":
            cell.source = cell.source.replace("8.07", "8.1")
    content.cells.append(nbformat.v4.new_markdown_cell(sentence))
    nbformat.write(content, notebook)
    assert words in "\n".join(prose.problems(notebook, course))


def test_a_stale_output_turns_red(tmp_path):
    code = nbformat.v4.new_code_cell("1 + 1", execution_count=1)
    for name, text in ("fresh", "2"), ("stale", "3"):
        output = nbformat.v4.new_output(
            "execute_result", {"text/plain": text}, execution_count=1
        )
        code.outputs = [output]
        notebook = nbformat.v4.new_notebook(cells=[code])
        nbformat.write(notebook, tmp_path / f"{name}.ipynb")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "--nbval", "."],
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert "FAILED stale.ipynb::Cell 0" in done.stdout
    assert "1 failed, 1 passed" in done.stdout


def test_pictures_are_not_compared(tmp_path):
    """They differ between processors in the last digits."""
    shutil.copy(ROOT / "conftest.py", tmp_path)
    svg = "<svg viewBox='0 0 1 1'><path d='M {} 0'/></svg>"
    source = f"from IPython.display import SVG\nSVG({svg.format('0.1')!r})"
    data = {
        "image/svg+xml": svg.format("0.2"),
        "text/plain": "<IPython.core.display.SVG object>",
    }
    code = nbformat.v4.new_code_cell(source, execution_count=1)
    code.outputs = [
        nbformat.v4.new_output("execute_result", data, execution_count=1)
    ]
    path = tmp_path / "picture.ipynb"
    nbformat.write(nbformat.v4.new_notebook(cells=[code]), path)
    command = [sys.executable, "-m", "pytest", "--nbval", path]
    assert subprocess.run(command, cwd=tmp_path).returncode == 0
    code.outputs[0].data["text/plain"] = "something else"
    nbformat.write(nbformat.v4.new_notebook(cells=[code]), path)
    assert subprocess.run(command, cwd=tmp_path).returncode == 1


def test_the_size_of_a_page(tmp_path):
    path = tmp_path / "page.ipynb"
    cells = [
        nbformat.v4.new_markdown_cell("# It is\n\n$$a = b$$\n\n[a link](x y)"),
        nbformat.v4.new_markdown_cell("```python\nx = 1\n```\nthe end"),
        nbformat.v4.new_code_cell("a = 1\n\nb = 2"),
        nbformat.v4.new_code_cell("c = 3"),
    ]
    nbformat.write(nbformat.v4.new_notebook(cells=cells), path)
    assert prose.size(path) == (6, 2, 3)
