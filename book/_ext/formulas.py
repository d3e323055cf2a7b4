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

WIDE = "pst-scrollable-table-container"
"""What the theme lets the keyboard scroll, where it is too wide."""

MATH = re.compile(r"<math.*?</math>", re.S)
TIGHT = re.compile(r"<mo([^>]*)>(/|\||&#x0002F;|&#x0007C;|min|max|silu)</mo>")
"""Operators without a blank beside them."""

DRAWN = {
    # what a letter stands for
    "<mi>:</mi>": "<mo lspace='0' rspace='0.278em'>:</mo>",
    # a trace, a blank only after it
    "<mo>tr</mo>": "<mo lspace='0' rspace='0.167em'>tr</mo>",
    # the circumflex of a font does not grow, the accent does
    "<mo>&#x0005E;</mo></mover>": "<mo>&#x00302;</mo></mover>",
}
"""What a browser would draw otherwise than TeX, and how to say it."""

OVER = re.compile(r'<mfrac linethickness="0"><mrow>(?:(?!</mrow>).)*')
"""The upper number of a binomial, which the fonts of a reader who has none
for formulas let touch the lower one."""

ROOT = "\N{SQUARE ROOT}"
"""The sign that a browser draws, although no root has it in its text."""

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
    for old, new in DRAWN.items():
        found = found.replace(old, new)
    found = OVER.sub(r'\g<0><mspace depth="0.4em" />', found)
    return TIGHT.sub(tight, found)


def tight(operator):
    """An operator without blanks; alone, a bar is as high as a letter."""
    told, sign = operator.groups()
    if "stretchy" not in told:
        told += ' stretchy="false"'
    return f"<mo{told} lspace='0' rspace='0'>{sign}</mo>"


def inline(writer, node):
    formula = mathml(node.astext(), "inline")
    writer.body.append(f'<span class="math">{formula}</span>')
    raise nodes.SkipNode


def block(writer, node):
    formula = mathml(node.astext(), "block")
    writer.body.append(f'<div class="math {WIDE}">{formula}</div>')
    raise nodes.SkipNode


def characters(page):
    """Those of a page's formulas, the slanted ones, and the root."""
    found = "".join(MATH.findall(page))
    shown = set(html.unescape(TAG.sub("", found)))
    if "<msqrt" in found or "<mroot" in found:
        shown.add(ROOT)
    return shown | {it for it, plain in UPRIGHT.items() if plain in shown}


def narrow_roots(font):
    """Give all sizes of the root's sign the width of the smallest.

    Chromium leaves room for the widest one after each root.
    """
    table = font["MATH"].table.MathVariants
    sign = font.getBestCmap()[ord(ROOT)]
    place = table.VertGlyphCoverage.glyphs.index(sign)
    sizes = table.VertGlyphConstruction[place]
    records = sizes.MathGlyphVariantRecord, sizes.GlyphAssembly.PartRecords
    larger = {r.VariantGlyph for r in records[0]} | {
        r.glyph for r in records[1]
    }
    width, _ = font["hmtx"][sign]
    for name in larger:
        before, left = font["hmtx"][name]
        font["glyf"][name].coordinates.scale((width / before, 1))
        font["glyf"][name].recalcBounds(font["glyf"])
        font["hmtx"][name] = width, round(left * width / before)


def write(out):
    """Write the font with the characters of a site's formulas."""
    used = set()
    for page in out.rglob("*.html"):
        used |= characters(page.read_text("utf-8"))
    font = TTFont(FONT)
    narrow_roots(font)
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
