"""Take the pictures of the front page that the README shows.

    make pictures

opens the built book in Chromium, once light and once dark.
"""

import io

import browser
import site_checks as checks
from PIL import Image
from project import ROOT, SITE

FOLDER = ROOT / "book/front"
SCHEMES = "light", "dark"
VIEW = {"width": 900, "height": 720}
COLOURS = 128


def take(chromium, scheme, path):
    """Write the top of the front page as a picture."""
    page = chromium.new_page(
        viewport=VIEW, color_scheme=scheme, reduced_motion="reduce"
    )
    page.goto((SITE / "book/intro.html").as_uri())
    page.wait_for_function(checks.READY["a widget is not live"])
    taken = io.BytesIO(page.screenshot(animations="disabled"))
    page.close()
    Image.open(taken).quantize(COLOURS).save(path, optimize=True)


def main():
    """Take both anew."""
    FOLDER.mkdir(exist_ok=True)
    with browser.launch() as chromium:
        for scheme in SCHEMES:
            path = FOLDER / f"{scheme}.png"
            take(chromium, scheme, path)
            print(path.relative_to(ROOT), path.stat().st_size)


if __name__ == "__main__":
    main()
