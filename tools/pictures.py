"""Write down what each widget draws at first, for readers without JavaScript.

    make pictures

It opens the built book in Chromium. The book's next build puts what it finds
into the pages, where a browser shows it only if it runs no scripts.
"""

import re

import browser
import site_checks as checks
from project import ROOT, pages

FOLDER = ROOT / "book/_pictures"
MARK = 'class="mb-widget"'
PATTERN = re.compile(r'((?:id="|\(#)mb-)[a-z0-9]+-')  # has a random name
WINDOW = {"viewport": checks.DESKTOP, "reduced_motion": "reduce"}

DRAWN = """() => [...document.querySelectorAll(".mb-widget")].map((widget) => {
  const root = widget.querySelector(".mb-root");
  const drawn = [...root.querySelectorAll("svg")].filter(
    (svg) => svg.getBoundingClientRect().height > 40);
  const copies = drawn.map((svg) => {
    const copy = svg.cloneNode(true);
    for (const node of [copy, ...copy.querySelectorAll("*")]) {
      for (const name of ["tabindex", "role", "style"])
        node.removeAttribute(name);
      for (const { name } of [...node.attributes])
        if (name.startsWith("aria-")) node.removeAttribute(name);
    }
    copy.setAttribute("aria-hidden", "true");
    return copy.outerHTML;
  });
  return `<div class="${root.className}">${copies.join("")}</div>\\n`;
})"""


def drawn(page, address):
    """What the widgets of a page draw, one after the other, as HTML.

    Args:
        page: a window of a desktop's width, without motion.
        address: of the built page.
    """
    page.goto(address)
    page.wait_for_function(checks.READY["a widget is not live"])
    return page.evaluate(DRAWN)


def paths(site, name):
    """The files of a page's widgets."""
    text = (site / f"{name}.html").read_text("utf-8")
    stem = name.rpartition("/")[2]
    return [
        FOLDER / f"{stem}-{number}.html"
        for number in range(1, text.count(MARK) + 1)
    ]


def main():
    """Write all pictures anew."""
    site = ROOT / "_build/html"
    FOLDER.mkdir(exist_ok=True)
    for path in FOLDER.glob("*.html"):
        path.unlink()
    with browser.launch() as chromium:
        page = chromium.new_page(**WINDOW)
        for name in pages():
            found = paths(site, name)
            address = (site / f"{name}.html").as_uri()
            texts = drawn(page, address) if found else []
            for path, text in zip(found, texts, strict=True):
                text = PATTERN.sub(rf"\g<1>{path.stem}-", text)
                path.write_text(text, "utf-8")
                print(path.relative_to(ROOT), len(text))


if __name__ == "__main__":
    main()
