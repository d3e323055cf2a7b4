"""Formulas as MathML, written when the book is built, and their font.

A browser draws MathML by itself: no script has to come first, and nothing
moves when it has. The font has the characters that the pages show.
"""

import html
import io
import re
import unicodedata
from pathlib import Path

import ziamath
from docutils import nodes
from fontTools import subset
from fontTools.ttLib import TTFont
from latex2mathml.converter import convert
from sphinx.errors import ExtensionError

FONT = Path(ziamath.__file__).parent / "fonts/STIXTwoMath-Regular.ttf"
FILE = "_static/formulas.woff2"
COPYRIGHT, LICENCE, ADDRESS = 0, 13, 14  # of a font's names

MATH = re.compile(r"<math.*?</math>", re.S)
TIGHT = re.compile(r"<mo([^>]*)>(/|\||&#x0002F;|&#x0007C;|min|max)</mo>")
"""Operators without a blank beside them."""

TAG = re.compile(r"<[^>]*>")
ITALICS = map(
    chr, [0x210E, *range(0x1D434, 0x1D468), *range(0x1D6E2, 0x1D71C)]
)
UPRIGHT = {italic: unicodedata.normalize("NFKC", italic) for italic in ITALICS}
"""Letters as a browser slants them where a variable has one."""


def mathml(tex, display):
    """A formula as MathML; ``display`` is ``"inline"`` or ``"block"``."""
    try:
        found = convert(tex, display=display)
    except Exception as error:
        raise ExtensionError(f"no formula: {tex!r}", error) from error
    return TIGHT.sub(r"<mo\1 lspace='0' rspace='0'>\2</mo>", found)


def inline(writer, node):
    formula = mathml(node.astext(), "inline")
    writer.body.append(f'<span class="math">{formula}</span>')
    raise nodes.SkipNode


def block(writer, node):
    formula = mathml(node.astext(), "block")
    writer.body.append(f'<div class="math">{formula}</div>')
    raise nodes.SkipNode


def characters(page):
    """Those of a page's formulas, and the slanted ones."""
    shown = {
        character
        for formula in MATH.findall(page)
        for character in html.unescape(TAG.sub("", formula))
    }
    return shown | {it for it, plain in UPRIGHT.items() if plain in shown}


def write(out):
    """Write the font with the characters of a site's formulas."""
    used = set()
    for page in out.rglob("*.html"):
        used |= characters(page.read_text("utf-8"))
    font = TTFont(FONT)
    options = subset.Options(
        layout_features=["*"], name_IDs=[COPYRIGHT, LICENCE, ADDRESS]
    )
    subsetter = subset.Subsetter(options)
    subsetter.populate(unicodes=map(ord, used))
    subsetter.subset(font)
    font.flavor = "woff2"
    written = io.BytesIO()
    font.save(written)
    (out / FILE).write_bytes(written.getvalue())
