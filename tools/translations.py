"""The course in Chinese: builds it, and keeps its catalogues.

python tools/translations.py build   # the Chinese pages, below the others
python tools/translations.py update  # bring the catalogues up to date
"""

import html
import json
import logging
import re
import shutil
import sys
from collections import Counter

import jieba
import sphinx_intl.basic
from babel.messages import Catalog, pofile
from babel.messages.extract import extract_from_file
from jupyter_book.sphinx import build_sphinx
from project import ROOT, SITE, notebooks

sys.path.append(str(ROOT / "book/_ext"))
import language

OWN = language.LOCALE / language.CHINESE / "LC_MESSAGES"
TEMPLATES = ROOT / "_build/gettext"
BUILT = ROOT / "_build/zh"
PYTHON = "book/_ext/*.py", "src/membudget/widgets/*.py"
SCRIPTS = "book/_static/*.js", "src/membudget/widgets/*.mjs"
CALLS = {"say": None, "later": None}
"""Where the site asks for its words, and how in Python."""
LABEL = re.compile(r'(?<="label": ")[^"]*[a-z]{3}[^"]*(?=", "|"})')
"""What a page calls its widget."""
STRING = r'"((?:[^"\\]|\\.)*)"'
ASKED = re.compile(
    r"\bt`((?:[^`\\]|\\.)*)`"  # t`of ${n}`
    rf"|\bt\(\s*({STRING}(?:\s*\+\s*{STRING})*)"  # t("of " + "{0}", n)
    rf"|\bplural\([^\"`;]*{STRING}",  # plural(n, "segment")
    re.S,
)
"""How a script asks for words. A template has no other one inside."""


def build(out, builder, doctrees, **settings):
    """Run Sphinx as `jupyter-book build -W -n --keep-going -q` does."""
    overrides = {
        "nitpicky": True,
        "external_toc_path": "_toc.yml",
        "latex_individualpages": False,  # Jupyter Book takes it out again
    }
    result = build_sphinx(
        ROOT,
        out,
        noconfig=True,
        path_config=ROOT / "_config.yml",
        confoverrides=overrides | settings,
        doctreedir=doctrees,
        builder=builder,
        warningiserror=True,
        keep_going=True,
        quiet=True,
    )
    if result:
        sys.exit(1)


def build_chinese():
    """The Chinese pages, in a folder of the site."""
    jieba.setLogLevel(logging.WARNING)
    terms = BUILT / "terms.txt"
    terms.parent.mkdir(parents=True, exist_ok=True)
    terms.write_text("".join(f"{term} 100000\n" for term in chinese_terms()))
    build(
        BUILT / "html",
        "html",
        BUILT / "doctrees",
        language=language.CHINESE,
        html_title="显存预算",
        nb_code_prompt_show="显示输出",
        nb_code_prompt_hide="收起输出",
        html_search_options={"dict": str(terms)},
    )
    place = SITE / language.FOLDERS[language.CHINESE]
    shutil.rmtree(place, ignore_errors=True)
    shutil.copytree(BUILT / "html", place)


def chinese_terms():
    """The glossary's terms, which a search takes as one word each."""
    glossary = language.catalogue(language.CHINESE, "book/glossary")
    heads = [text.partition("（")[0] for text in glossary.values()]
    return sorted(
        term for term in heads if re.fullmatch("[\u3400-\u9fff]{2,10}", term)
    )


def templates(out=TEMPLATES, doctrees=ROOT / "_build/.doctrees-gettext"):
    """What is to be translated: a template for each page, and the site's."""
    for old in out, doctrees:
        shutil.rmtree(old, ignore_errors=True)
    build(out, "gettext", doctrees)
    (out / "sphinx.pot").unlink(missing_ok=True)  # the theme's
    with (out / f"{language.SITE}.pot").open("wb") as file:
        pofile.write_po(file, site_words(), width=0)


def site_words():
    """The words of scripts and extensions, and of folds and widgets."""
    found = Catalog(project="Sphinx")
    for path in paths(*PYTHON):
        for _, message, *_ in extract_from_file("python", path, CALLS):
            add(found, message, path)
    for path in paths(*SCRIPTS):
        for message in asked(path.read_text("utf-8")):
            add(found, message, path)
    for path in [*notebooks(), *paths("book/*.md")]:
        text = markdown_and_html(path)
        for place in language.SUMMARY, language.FALLBACK:
            for message in place.findall(text):
                add(found, " ".join(message.split()), path)
        for label in LABEL.findall(text):
            add(found, label, ROOT / "src/membudget/widgets/base.mjs")
    return found


def paths(*patterns):
    return [path for one in patterns for path in sorted(ROOT.glob(one))]


def add(found, message, path):
    """Add a message, and where it stands."""
    found.add(message, locations=[(path.relative_to(ROOT).as_posix(), None)])


def asked(script):
    """The words that a script asks for, as its `t` looks them up."""
    for template, joined, *_, thing in ASKED.findall(script):
        if thing:
            yield f"{{0}} {thing}s"
        elif joined:
            yield "".join(re.findall(STRING, joined))
        else:
            yield keyed(template)


def keyed(template):
    """A template with its values' numbers in their places."""
    key, depth, count = "", 0, 0
    for sign in re.split(r"(\$\{|[{}])", template):
        if sign == "${" and not depth:
            key, depth, count = f"{key}{{{count}}}", 1, count + 1
        elif depth:
            depth += (sign in ("{", "${")) - (sign == "}")
        else:
            key += sign
    return key


def update():
    """Bring the catalogues up to date, and say what is open."""
    templates()
    sphinx_intl.basic.update(
        language.LOCALE, TEMPLATES, [language.CHINESE], 0, ignore_obsolete=True
    )
    relocate(OWN / f"{language.SITE}.po", TEMPLATES / f"{language.SITE}.pot")
    for path in sorted(OWN.rglob("*.po")):
        for message in open_messages(path):
            print(f"{path.relative_to(ROOT)}: {message.id}")


def relocate(path, template):
    """Say where words are asked for now; `sphinx-intl` keeps the old places,
    and a page has the words of its own scripts alone."""
    now, catalogue = (
        pofile.read_po(one.open("rb")) for one in (template, path)
    )
    for message in catalogue:
        if message.id and message.id in now:
            message.locations = now[message.id].locations
    with path.open("wb") as file:
        pofile.write_po(file, catalogue, width=0)


def open_messages(path):
    """The messages of a catalogue without a translation that holds."""
    with path.open("rb") as file:
        messages = [m for m in pofile.read_po(file) if m.id]
    return [m for m in messages if m.fuzzy or not m.string]


CODE = re.compile(r"(?<!`)(`+)(?!`)(.+?)(?<!`)\1(?!`)", re.S)
MATH = re.compile(r"\$\$.+?\$\$|\$[^$\n]+?\$", re.S)
LINK = re.compile(r"(?<=\])\(([^)]*)\)")
ROLE = re.compile(r"\{([\w:-]+)\}`(?:[^`<]*<)?([^`>]*)>?`")
TAG = re.compile(r"<[^>\s][^>]*>")
PLACE = re.compile(r"\{\w*\}")
FIGURE = re.compile(r"\d+(?:[.,\s]\d+)*(?!\d* 月)")
KEPT = {
    "role": ROLE,
    "code": CODE,
    "formula": MATH,
    "link": LINK,
    "tag": TAG,
    "place": PLACE,
    "figure": FIGURE,
}
"""What a translation keeps, each found in what the ones before left."""


def kept(text):
    """How often a message has which code, formula, link, figure …"""
    found = Counter()
    for kind, pattern in KEPT.items():
        for match in pattern.finditer(text):
            words = "".join(match[match.lastindex or 0].split())
            found[f"{kind} {words}"] += 1
        text = pattern.sub(" ", text)
    return found


def differences(message, translation):
    """What only one of the two has, in words."""
    ours = kept(html.unescape(message))
    theirs = kept(html.unescape(translation))
    return [
        *(f"without the {part}" for part in ours - theirs),
        *(f"with the {part}" for part in theirs - ours),
    ]


def markdown_and_html(path):
    """What a page's source says outside its code."""
    text = path.read_text("utf-8")
    if path.suffix == ".md":
        return text
    parts = []
    for cell in json.loads(text)["cells"]:
        if cell["cell_type"] == "markdown":
            parts += cell["source"]
        for output in cell.get("outputs", []):
            parts += output.get("data", {}).get("text/html", [])
    return "".join(parts)


if __name__ == "__main__":
    {"build": build_chinese, "update": update}[sys.argv[1]]()
