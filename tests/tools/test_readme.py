"""What the README shows is there."""

import re

import front
import pytest
from PIL import Image
from project import ROOT, pages

TEXT = (ROOT / "README.md").read_text("utf-8")


def test_its_first_commands_build_and_test():
    first = re.search(r"```bash\n(.*?)```", TEXT, re.S)[1].splitlines()
    assert [line.partition("#")[0].strip() for line in first] == [
        "make book",
        "make test",
    ]


def test_its_links_lead_somewhere():
    links = re.findall(r"\]\(([^)]*)\)", TEXT)
    inside = [link for link in links if link != "../../tree/published"]
    assert len(inside) < len(links)
    assert all((ROOT / link).exists() for link in inside)


def test_it_lists_chapters_and_labs():
    main = r"chapters/\d\d_|labs/lab"
    listed = [page for page in pages() if re.match(main, page)]
    assert listed and all(f"({page}.ipynb)" in TEXT for page in listed)


def test_it_names_no_address_of_its_own():
    assert "://" not in TEXT


@pytest.mark.parametrize("scheme", front.SCHEMES)
def test_the_front_page_is_shown_in_light_and_dark(scheme):
    path = front.FOLDER / f"{scheme}.png"
    assert f'"{path.relative_to(ROOT).as_posix()}"' in TEXT
    assert path.stat().st_size <= 120_000
    with Image.open(path) as picture:
        assert picture.size == (front.VIEW["width"], front.VIEW["height"])
        ground = picture.convert("L").getpixel((2, 2))
    assert (ground > 200) is (scheme == "light")
