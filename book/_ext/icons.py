"""The theme's icons: a font with those that the book shows.

The theme brings all two thousand, once as fonts and once as a script that
replaces each icon by a picture after the page has been drawn.
"""

import base64
import io
import re
from pathlib import Path

import pydata_sphinx_theme
from fontTools import subset
from fontTools.ttLib import TTFont

THEME = Path(pydata_sphinx_theme.__file__).parent
STATIC = THEME / "theme/pydata_sphinx_theme/static"
STYLE = "styles/pydata-sphinx-theme.css"
FONTS = "vendor/fontawesome/webfonts"

NAME = re.compile(r"\bfa-[\w-]+")
RULE = re.compile(r'(?:\.fa-[\w-]+:before,?)+\{content:"([^"]*)"\}')
SOURCE = re.compile(
    r'src:url\([^)]*\) format\("woff2"\),'
    r'url\(\.\./([^)]*\.ttf)\) format\("truetype"\)'
)
ESCAPE = re.compile(r"\\([0-9a-f]{2,6})")
SCRIPT = re.compile(r"<script [^>]*/fontawesome\.js[^>]*></script>")


def without_script(head):
    """The head of a page without the script that replaces icons."""
    return SCRIPT.sub("", head)


def write(out):
    """Write the theme's style with the icons that a site uses in it."""
    static = out / "_static"
    texts = [*out.rglob("*.html"), *static.glob("scripts/*theme.js")]
    used = {
        name
        for path in texts
        for name in NAME.findall(path.read_text("utf-8"))
    }

    def keep(rule):
        return rule[0] if used & set(NAME.findall(rule[0])) else ""

    style = RULE.sub(keep, (STATIC / STYLE).read_text("utf-8"))
    shown = {chr(int(code, 16)) for code in ESCAPE.findall(style)}
    shown |= {letter for letter in style if "\ue000" <= letter <= "\uf8ff"}
    style = SOURCE.sub(lambda src: inline(STATIC / src[1], shown), style)
    (static / STYLE).write_text(style, "utf-8")
    unused = [*(static / FONTS).glob("*"), *static.glob("*/*.map")]
    for path in (*unused, static / "scripts/fontawesome.js"):
        path.unlink(missing_ok=True)


def inline(path, shown):
    """A font with these letters as a source in a style."""
    font = TTFont(path)
    subsetter = subset.Subsetter()
    subsetter.populate(text="".join(shown))
    subsetter.subset(font)
    file = io.BytesIO()
    font.save(file)
    data = base64.b64encode(file.getvalue()).decode()
    return f'src:url(data:font/ttf;base64,{data}) format("truetype")'
