"""What this book adds to Jupyter Book.

* formulas as MathML, with a font (`formulas.py`);
* of the theme's icons those that the pages show (`icons.py`);
* live widgets: a page with ``<div class="mb-widget" data-widget="NAME">`` gets
  that widget's module and style inline, once, and the script that hosts them;
* the directive ``mb-widget``, which shows a notebook's widget on another page;
* the directive ``mb-cards``, which shows pages as cards;
* the directive ``mb-map``, the course as a picture (`course_map.py`), and the
  role ``mb-see``, which leads to a section by its heading (`see.py`);
* the directive ``mb-records``, the list of all measurement records;
* the directives ``mb-clone`` and ``mb-install``, the commands that fetch the
  course and that install its package;
* figures in the page itself, in its letters and colours (`figures.py`);
* buttons and set-up cells that know where the course is published, if anyone
  does; on a site the package's wheel lies beside the pages;
* a link from a page's top to its lines to copy (`hurry.py`);
* folded code below what it draws (`folds.py`);
* what people type into a search, for its index (`find.py`);
* what widgets draw at first, for who runs no scripts (`stills.py`);
* questions to predict, whose options become buttons (`predict.py`);
* a **bold** term of the glossary becomes a link to it. (Notebooks are read on
  Colab as well, which knows no Sphinx roles.)
"""

import hashlib
import html
import importlib.util
import itertools
import json
import re
import sys
from functools import partial
from pathlib import Path

import rcssmin
import rjsmin
from docutils import nodes
from sphinx import addnodes
from sphinx.errors import ConfigError
from sphinx.util import logging
from sphinx.util.docutils import SphinxDirective

ROOT = Path(__file__).resolve().parents[2]
sys.path += [str(ROOT / "tools"), str(Path(__file__).parent)]

import address  # noqa: E402
import chinese  # noqa: E402
import course_map  # noqa: E402
import figures  # noqa: E402
import find  # noqa: E402
import folds  # noqa: E402
import formulas  # noqa: E402
import hurry  # noqa: E402
import icons  # noqa: E402
import language  # noqa: E402
import predict  # noqa: E402
import publish  # noqa: E402
import see  # noqa: E402
import setup_cell  # noqa: E402
import stills  # noqa: E402
import words  # noqa: E402
from language import Sentence, later, of_page, say  # noqa: E402
from project import pages  # noqa: E402

WIDGETS = ROOT / "src/membudget/widgets"
RECORDS = ROOT / "src/membudget/records"
OWN = "ext", "pictures", "static", "templates"
DETOUR = re.compile(r"/\d\d[a-z]_")
SEARCH = re.compile(
    r'<script src="[^"]*/(searchtools|language_data|searchindex)\.js">'
    "</script>"
)
STATE = re.compile(r'(?<=class="mb-state">).*?(?=</script>)', re.S)
PLAIN = re.compile(r'<span class="[npow]">([^<]*)</span>')
EXPORT = re.compile(r"^export (?:(default) )?", re.M)

logger = logging.getLogger(__name__)


class WidgetDirective(SphinxDirective):
    """``{mb-widget} notebook name``: a notebook's committed widget output."""

    required_arguments = 2

    def run(self):
        docname, name = self.arguments
        path = ROOT / f"{docname}.ipynb"
        self.env.note_dependency(str(path))
        html = find_widget(path, name)
        if html is None:
            logger.warning(
                "%s has no output with the widget %r; run `make notebooks`",
                path.name,
                name,
                location=self.get_location(),
            )
            return []
        return [nodes.raw("", html, format="html")]


def find_widget(path, name):
    """The first HTML output of the notebook that holds the widget."""
    if not path.exists():
        return None
    for cell in json.loads(path.read_text("utf-8"))["cells"]:
        for output in cell.get("outputs", []):
            html = "".join(output.get("data", {}).get("text/html", ""))
            if name in language.WIDGET.findall(html):
                return html
    return None


class CardsDirective(SphinxDirective):
    """``{mb-cards}``: pages as cards, in reading order.

    A line of its content is ``page | picture | question``: a notebook without
    its ending, the name of an SVG in ``book/cards``, and what it answers.
    The card is a link with the notebook's own title.
    """

    has_content = True

    def run(self):
        cards = nodes.bullet_list(classes=["mb-cards"])
        for line in self.content:
            parts = [part.strip() for part in line.split("|")]
            if len(parts) != 3:
                raise self.error(f"{line!r} is not: page | picture | question")
            cards += self.card(*parts)
        return [cards]

    def card(self, page, picture, question):
        """One item of the list."""
        if page not in self.env.found_docs:
            raise self.error(f"there is no page {page!r}")
        source = ROOT / f"{page}.ipynb"
        drawing = ROOT / f"book/cards/{picture}.svg"
        for path in (source, drawing):
            self.env.note_dependency(str(path))
        uri = self.env.app.builder.get_relative_uri(self.env.docname, page)
        link = nodes.reference("", "", refuri=uri, internal=True)
        link += nodes.raw("", drawing.read_text("utf-8"), format="html")
        link += nodes.strong(text=of_page(page, title(source)))
        link += Sentence.of(question)
        self.set_source_info(link[-1])
        return nodes.list_item("", nodes.paragraph("", "", link))


def title(path):
    """The first heading of a notebook."""
    cells = json.loads(path.read_text("utf-8"))["cells"]
    return "".join(cells[0]["source"]).splitlines()[0].removeprefix("# ")


class RecordsDirective(SphinxDirective):
    """``{mb-records}``: each experiment, its records, and what is missing."""

    def run(self):
        try:
            found = self.experiments()
        except ValueError as error:
            raise self.error(str(error)) from error
        for sentence in found.findall(Sentence):
            self.set_source_info(sentence)
        return [found]

    def experiments(self):
        """Each experiment as a term, its records as a list."""
        terms = nodes.definition_list()
        for name, experiment in RECORD.catalogue().items():
            entries = nodes.bullet_list()
            for record in RECORD.load(name):
                entries += nodes.list_item("", self.entry(record))
            if missing := RECORD.missing(name):
                entries += nodes.list_item("", as_message(missing))
            summary = as_message(experiment.summary)
            terms += nodes.definition_list_item(
                "",
                nodes.term("", "", nodes.literal(text=name)),
                nodes.definition("", summary, entries),
            )
        return terms

    def entry(self, record):
        """A record's provenance, which leads to the record itself."""
        name = RECORD.file_name(record)
        where, what = RECORD.provenance(record).split("\n")
        file = addnodes.download_reference(
            "",
            "",
            nodes.literal(text=name),
            reftarget=f"/{(RECORD.RECORDS / name).relative_to(ROOT)}",
        )
        text = f": {where}. {what}."
        return nodes.paragraph("", "", file, nodes.Text(text))


def as_message(text):
    """A sentence of an experiment, as a message of its page."""
    return nodes.paragraph("", "", Sentence.of(text))


class CloneDirective(SphinxDirective):
    """``{mb-clone}``: how to fetch the course, if its address is known."""

    def run(self):
        url = self.config.memory_budget_repository
        text = f"git clone {url}\ncd {url.rpartition('/')[2]}"
        return [nodes.literal_block("", text, language="bash")] if url else []


class InstallDirective(SphinxDirective):
    """``{mb-install} membudget``: how to install it, if an address is known.

    Its argument is what pip calls it, with an extra or without.
    """

    required_arguments = 1

    def run(self):
        text = "\n".join(address.installs(*self.arguments))
        return [nodes.literal_block("", text, language="bash")] if text else []


def use_addresses(app, config):
    """Take over where the course is published, before anything is read.

    Pages have the tags ``issues``, ``colab`` and ``install`` to say what is
    true only where the repository takes issues, where Colab finds the
    notebooks, and where a notebook can fetch the package.
    """
    try:
        url, site = address.repository(), address.site()
        requirement, colab = address.requirement(), address.colab()
    except ValueError as error:
        raise ConfigError(str(error)) from None
    config.memory_budget_repository = url
    config.memory_budget_site = site
    config.memory_budget_requirement = requirement
    if requirement:
        app.tags.add("install")
    if url:
        forge = address.forge(url)
        issues = forge != "bitbucket"
        config.html_theme_options |= {
            "repository_url": url,
            "repository_provider": forge,
            "repository_branch": address.SOURCES,
            "use_repository_button": True,
            "use_edit_page_button": True,
            "use_issues_button": issues,
        }
        if issues:
            app.tags.add("issues")
    if colab:
        app.tags.add("colab")


def add_colab(app):
    """Buttons that open the published notebooks on Colab.

    The theme knows one branch. By now it has taken that of the sources for
    its other buttons.
    """
    if app.tags.has("colab"):
        app.config.html_theme_options |= {
            "repository_branch": address.PUBLISHED,
            "launch_buttons": {
                "colab_url": "https://colab.research.google.com"
            },
        }


def fill_set_up_cell(app, docname, source):
    """Show the set-up cell that a reader needs."""
    requirement = app.config.memory_budget_requirement
    if requirement and app.env.doc2path(docname).endswith(".ipynb"):
        source[0] = setup_cell.fill(source[0], requirement)


def publish_package(app, exception):
    """Fill the notebooks to download, too, and put the wheel into a site."""
    if exception or app.builder.format != "html":
        return
    out = Path(app.outdir)
    if requirement := app.config.memory_budget_requirement:
        for path in (out / "_sources").rglob("*.ipynb"):
            text = setup_cell.fill(path.read_text("utf-8"), requirement)
            path.write_text(text, "utf-8")
    for wheel in out.glob("*.whl"):  # of another version
        wheel.unlink()
    if app.config.memory_budget_site and language.language == "en":
        publish.wheels(out)  # once for all languages


# Nothing is drawn before the widgets are live: else what follows one jumps.
WAIT = '<link rel="expect" href="#mb-live" blocking="render">'
LIVE = '<span id="mb-live"></span>'


def add_widgets(app, pagename, templatename, context, doctree):
    """Put the modules that a page's widgets need into the page itself, and
    what they share once.

    Inline, because a browser loads no module from a file:// address.
    """
    names = sorted(set(language.WIDGET.findall(context.get("body") or "")))
    if not names:
        return
    modules = {"base": BUNDLE.base_text()}
    modules |= {name: BUNDLE.own_text(name) for name in names}
    for name, module in modules.items():
        module = light(module).replace("</script", r"<\/script")
        app.add_js_file(
            None, body=module, type="text/x-esm", **{"data-widget": name}
        )
    style = BUNDLE.base_style() + "".join(map(BUNDLE.own_style, names))
    style = rcssmin.cssmin(style)
    context["metatags"] = (
        context.get("metatags", "") + f"<style>{style}</style>{WAIT}"
    )
    # At the end of the text, not deferred: widgets come before the theme.
    host = context["pathto"]("_static/widget-host.js", resource=True)
    context["body"] += f'<script src="{host}"></script>{LIVE}'


def add_predictions(app, pagename, templatename, context, doctree):
    """The script of the questions, on a page that has some.

    At the end of the text, as that of the widgets: buttons are higher than
    the words that they are made of.
    """
    body = context.get("body") or ""
    if 'class="mb-predict' not in body:
        return
    script = context["pathto"]("_static/predict.js", resource=True)
    context["body"] += f'<script src="{script}"></script>'
    if not language.WIDGET.search(body):
        context["metatags"] = context.get("metatags", "") + WAIT
        context["body"] += LIVE


UNUSED = "sphinx-design", "design-tabs"
FIRST = "documentation_options", "doctools"  # other scripts need them at once


def paint_early(app, pagename, templatename, context, doctree):
    """Leave out what no page uses, and let scripts wait for the text."""
    for kind in "css_files", "script_files":
        context[kind] = [
            file
            for file in context[kind]
            if not any(name in str(file.filename) for name in UNUSED)
        ]
    for script in context["script_files"]:
        name = str(script.filename)
        if script.filename and not any(first in name for first in FIRST):
            script.attributes.setdefault("defer", "defer")


def lead_on(app, pagename, templatename, context, doctree):
    """A chapter leads to the next chapter; what goes deeper is a detour.

    From there, back to its chapter and on to the next page that belongs to
    the same one, or else to the next chapter.
    """
    order = pages()
    if pagename not in order:
        return
    here = order.index(pagename)
    after = [page for page in order[here + 1 :] if not DETOUR.search(page)]
    before = [page for page in order[:here] if not DETOUR.search(page)]
    if DETOUR.search(pagename) and here + 1 < len(order):
        after = order[here + 1 :]
    for name, found in ("next", after[:1]), ("prev", before[-1:]):
        context[name] = None
        for page in found:
            title = html.escape(app.env.titles[page].astext())
            link = app.builder.get_relative_uri(pagename, page)
            context[name] = {"link": link, "title": title}


def add_head(app, pagename, templatename, context, doctree):
    """What `book/_templates` write into a page's head."""
    site = app.config.memory_budget_site
    picture = "_static/social.png"
    context["without_icon_script"] = icons.without_script
    context["without_search"] = partial(SEARCH.sub, "")
    context["description"] = words.description(doctree) if doctree else ""
    context["picture"] = (
        f"{site}/{picture}" if site else context["pathto"](picture, 1)
    )


def finish_body(app, pagename, templatename, context, doctree):
    """What is easier to say of a page's HTML."""
    if "body" in context:
        body = words.hold_formulas(context["body"])
        context["body"] = words.mark_chinese(body)


def write_icons(app, exception):
    """Leave of the theme's icons those that the pages show."""
    if exception is None and app.builder.format == "html":
        icons.write(Path(app.outdir))


def light(module):
    """A module as a function's body, which returns what it exports; without
    comments and blanks."""
    body = EXPORT.sub(lambda found: "return " if found[1] else "", module)
    return rjsmin.jsmin(body)


def pack_states(app, pagename, templatename, context, doctree):
    """Write the widgets' states without the blanks that notebooks have."""

    def pack(found):
        state = json.loads(found[0])
        text = json.dumps(state, ensure_ascii=False, separators=(",", ":"))
        return text.replace("</", r"<\/")

    if "body" in context:
        context["body"] = STATE.sub(pack, context["body"])


def plain_code(app, pagename, templatename, context, doctree):
    """Drop the marks of names, operators, punctuation and blanks in code.

    They are half of a chapter's weight, and code reads as well without.
    """
    if "body" in context:
        context["body"] = PLAIN.sub(r"\1", context["body"])


PLAIN_NAMES = {
    # what a screen reader says is what is written
    '<summary aria-label="Toggle hidden content">': "<summary>",
    # roles whose lists have other children, or that are none any more
    '<div role="list" class="citation-list">': '<div class="citation-list">',
    ' role="doc-biblioentry"': "",
}


def plain_names(app, pagename, templatename, context, doctree):
    """Drop names and roles of Sphinx's that a screen reader stumbles over."""
    for old, new in PLAIN_NAMES.items():
        if "body" in context:
            context["body"] = context["body"].replace(old, new)


PARTS = later("Chapters"), later("Labs"), later("Reference")  # in _toc.yml


def name_chevrons(app, pagename, templatename, context, doctree):
    """Say in the menu whose pages a chevron unfolds: the theme's is empty."""
    menu = context.get("generate_toctree_html")
    if menu is None:
        return

    def named(*args, **kwargs):
        soup = menu(*args, **kwargs)
        for summary in soup.find_all("summary") if soup else ():
            chapter = summary.find_parent("li").a.get_text(strip=True)
            summary["aria-label"] = say("Pages below {page}", page=chapter)
        for part in soup.select(".caption-text") if soup else ():
            part.string = say(part.get_text())
        return soup

    context["generate_toctree_html"] = named


def link_terms(app, doctree, docname):
    """Turn bold text that is a term of the glossary into a link to it."""
    terms = {
        name.lower().partition("（")[0]: (page, anchor)  # Chinese（English）
        for name, _, kind, page, anchor, _ in app.env.domains[
            "std"
        ].get_objects()
        if kind == "term" and page != docname
    }
    for bold in list(doctree.findall(nodes.strong)):
        text = " ".join(bold.astext().lower().split())
        forms = (text, text.removesuffix("s"), text.removesuffix("es"))
        found = next((form for form in forms if form in terms), None)
        if found:
            page, anchor = terms[found]
            uri = app.builder.get_relative_uri(docname, page)
            link = nodes.reference(
                refuri=f"{uri}#{anchor}", internal=True, classes=["mb-term"]
            )
            bold.replace_self(link)
            link += bold


def write_font(app, exception):
    """Write the formulas' font."""
    if exception is None and app.builder.format == "html":
        formulas.write(Path(app.outdir))


def load(path):
    """Import a module of the package by its path: no torch is needed."""
    spec = importlib.util.spec_from_file_location(f"mb_{path.stem}", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look there
    spec.loader.exec_module(module)
    return module


def digest(*paths):
    """A hash of files' content."""
    content = b"".join(path.read_bytes() for path in sorted(paths))
    return hashlib.sha256(content).hexdigest()


def pages_digest():
    """A hash of what every page depends on besides its own source."""
    own = [ROOT.glob(f"book/_{kind}/*.*") for kind in OWN]
    words = language.LOCALE.rglob(f"{language.SITE}.po")
    return digest(*WIDGETS.glob("*.*"), *words, *itertools.chain(*own))


def records_digest():
    """A hash of the records and of the experiments."""
    return digest(*RECORDS.glob("*.py"), *RECORDS.rglob("*.json"))


def set_up_digest():
    """A hash of what fills in the set-up cell."""
    return digest(Path(setup_cell.__file__), ROOT / "pyproject.toml")


BUNDLE = load(WIDGETS / "bundle.py")
RECORD = load(RECORDS / "record.py")


def setup(app):
    """Register everything; a changed digest makes Sphinx write all pages.

    The list of records and the set-up cell are read with their pages, so for
    them it reads them all.
    """
    app.add_config_value("memory_budget_digest", pages_digest(), "html")
    app.add_config_value("memory_budget_records", records_digest(), "env")
    app.add_config_value("memory_budget_set_up", set_up_digest(), "env")
    for name in "repository", "site", "requirement":
        app.add_config_value(f"memory_budget_{name}", "", "env")
    app.add_node(figures.Figure, html=(figures.write, None))
    app.add_directive("mb-cards", CardsDirective)
    app.add_directive("mb-clone", CloneDirective)
    app.add_directive("mb-install", InstallDirective)
    app.add_directive("mb-map", course_map.MapDirective)
    app.add_html_math_renderer(
        "mathml", (formulas.inline, None), (formulas.block, None)
    )
    app.add_role("mb-see", see.See())
    app.add_directive("mb-widget", WidgetDirective)
    app.add_directive("mb-records", RecordsDirective)
    app.connect("config-inited", language.use)
    app.connect("config-inited", chinese.use)
    app.connect("config-inited", use_addresses)
    app.connect("builder-inited", add_colab, priority=600)
    app.connect("source-read", fill_set_up_cell)
    app.connect("doctree-resolved", see.resolve)
    app.connect("doctree-resolved", link_terms)
    app.connect("doctree-resolved", words.hold_numbers)
    app.connect("doctree-resolved", predict.mark)
    app.connect("doctree-resolved", folds.gather)
    app.connect("doctree-resolved", hurry.link)
    app.connect("doctree-resolved", find.add)
    app.connect("env-updated", find.keep)
    app.connect("doctree-resolved", figures.take)
    app.connect("html-page-context", pack_states)
    app.connect("html-page-context", plain_code)
    app.connect("html-page-context", plain_names)
    app.connect("html-page-context", name_chevrons, priority=600)
    app.connect("html-page-context", language.translate_html)
    app.connect("html-page-context", language.add_words)
    app.connect("html-page-context", language.lead_over)
    app.connect("html-page-context", stills.add)
    app.connect("html-page-context", add_widgets, priority=600)
    app.connect("html-page-context", add_predictions)
    app.connect("html-page-context", paint_early, priority=900)
    app.connect("html-page-context", lead_on)
    app.connect("html-page-context", add_head)
    app.connect("html-page-context", finish_body)
    app.connect("build-finished", write_font)
    app.connect("build-finished", write_icons)
    app.connect("build-finished", publish_package)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
