"""What every widget promises its reader, in a browser without a kernel."""

from functools import partial
from itertools import pairwise

import pytest
import widget_pages as pages
from kind import agree, set_to, shows
from kinds import KINDS, every_kind

from membudget.widgets import bundle
from tests.soak import SOAK

pytestmark = [every_kind, pytest.mark.few(3)]


@pytest.fixture
def show(show):
    """For who wants less motion: nothing plays by itself."""
    return partial(show, reduced_motion="reduce")


@pytest.fixture
def widget(kind):
    return kind.make()


def steps(kind, widget, states):
    """The widget in each state, and what the controls hold in it."""
    for traits in states:
        set_to(widget, traits)
        yield list(kind.controls(widget).items())


@pytest.mark.few(len(KINDS))
def test_first_picture(show, kind, widget):
    page = show(widget)
    agree(kind, page, widget)
    title = page.locator(".mb-title").first
    assert title.inner_text().startswith(kind.title)
    assert page.locator(".mb-fallback").count() == 0
    assert page.locator(".mb-problem").locator("visible=true").count() == 0
    nothing_moves_by_itself(kind, page)
    no_part_is_told_by_colour_alone(kind, page)
    every_part_has_a_role_and_a_name(kind, page)
    nothing_is_left_of_another_one(page)


def nothing_moves_by_itself(kind, page):
    assert page.evaluate("document.getAnimations().length") == 0
    style = bundle.style_text(kind.name)
    assert "transition" not in style and "animation" not in style


def nothing_is_left_of_another_one(page):
    listeners, children, *left = page.evaluate(pages.CLEAN_UP)
    assert listeners >= 1 and children >= 1
    assert left == [0, 0]


def no_part_is_told_by_colour_alone(kind, page):
    """Neighbours differ in their pattern as well."""
    looks = page.eval_on_selector_all(
        ".mb-swatch",
        """(all) => all.map((swatch) => {
          const [plain, over] = swatch.querySelectorAll("rect");
          const id = over?.getAttribute("fill").slice(5, -1);
          const pattern = document.getElementById(id);
          const turn = pattern?.getAttribute("patternTransform");
          const look = `${pattern?.innerHTML ?? "plain"} ${turn}`;
          return [getComputedStyle(plain).fill, look];
        })""",
    )[: kind.parts]
    assert len(set(map(tuple, looks))) == len(looks) == kind.parts
    for (_, one), (_, next_) in pairwise(looks):
        assert one != next_


def every_part_has_a_role_and_a_name(kind, page):
    pages.unfold(page)
    images = page.get_by_role("img").all()
    assert len(images) == page.locator(".mb-picture").count() >= 1
    assert all(image.get_attribute("aria-label") for image in images)
    parts = page.locator("input, select, button, summary")
    named = """(all) => all.map((e) => [
        "labels" in e && e.labels.length === 1 || e.innerText > "",
        e.dataset.lmSuppressShortcuts,
        e.type !== "range" || e.getAttribute("aria-valuetext") > "",
      ].join())"""
    # JupyterLab would else take the arrow keys for its shortcuts.
    assert set(parts.evaluate_all(named)) == {"true,true,true"}
    for key, words in kind.spoken.items():
        spoken = pages.control(page, key).get_attribute("aria-valuetext")
        assert spoken == words
    columns = page.get_by_role("columnheader").all_inner_texts()
    assert tuple(columns[: len(kind.columns)]) == kind.columns
    assert page.get_by_role("rowheader").count() >= 4
    assert page.locator("p[aria-live=polite]").count() == 1


def test_the_page_shows_the_state_python_gave(show, kind):
    shown = [kind.make(**arguments) for arguments in kind.given]
    page = show(*shown)
    for place, widget in enumerate(shown):
        agree(kind, page, widget, place)
        label = getattr(widget, "label", "")
        assert page.get_by_text(label).count() or not label
    ids = page.eval_on_selector_all("[id]", "all => all.map(e => e.id)")
    assert len(ids) == len(set(ids)) > 5 * len(shown)
    first = kind.rest[0] if kind.rest else kind.tabs[-1]
    pages.control(page, first).first.press("ArrowRight")
    for place, widget in enumerate(shown[1:], 1):
        agree(kind, page, widget, place)


@pytest.mark.parametrize(
    "width, font",
    [
        pytest.param(320, pages.WIDE_FONT, id="320-wide"),
        pytest.param(1000, pages.WIDE_FONT, id="1000-wide"),
        *([pytest.param(390, "", id="390")] if SOAK else []),
    ],
)
def test_every_control(show, kind, widget, width, font):
    """Its numbers and words are Python's, and its labels have room."""
    page = show(widget, width=width, style=font)
    texts = [pages.OUTSIDE, pages.OVERLAPPING]
    texts += [pages.CROSSED] if kind.crossed else []
    look = f"""(root) => ({{
      ...({pages.SEEN})(root),
      misfits: [{", ".join(texts)}].flatMap((test) => test()),
    }})"""
    states = list(steps(kind, widget, kind.states))
    seen = pages.walk(page, states, look)
    widget = kind.make()
    for traits, answer in zip(kind.states, seen, strict=True):
        set_to(widget, traits)
        shows(kind, widget, answer)
        assert answer["misfits"] == [], traits


def test_all_by_tab(show, kind, widget):
    page = show(widget)
    focus = "document.activeElement.dataset.key"
    outline = "getComputedStyle(document.activeElement).outline"
    for key in kind.tabs:
        page.keyboard.press("Tab")
        assert page.evaluate(focus) == key
        assert "solid 2px" in page.evaluate(outline)


def test_sliders_by_keyboard(show, kind, widget):
    page = show(widget)
    pages.unfold(page)
    before = kind.controls(widget)
    for slider in page.locator("input[type=range]").all():
        key, start = slider.get_attribute("data-key"), slider.input_value()
        assert start == str(before[key])
        least = start == slider.get_attribute("min")
        there, back = ("Right", "Left") if least else ("Left", "Right")
        slider.press(f"Arrow{there}")
        moved = int(slider.input_value()) - int(start)
        assert moved == (1 if least else -1)
        slider.press(f"Arrow{back}")
        assert slider.input_value() == start


def test_the_sentence_is_said_once_it_rests(show, kind, widget):
    """A screen reader hears where the slider stops, not each number."""
    if kind.rest is None:
        return
    key, traits = kind.rest
    said = pages.said(show(widget), f'[data-key="{key}"]')
    set_to(widget, traits)
    assert len(said) == 1
    assert [word for word in kind.said(widget) if word not in said[0]] == []


def test_with_a_kernel(show, kind, widget):
    """Its changes are shown, and the reader's come to it."""
    page = show(widget)
    page.evaluate(pages.KERNEL)
    agree(kind, page, widget)
    for arguments in kind.given:
        other = kind.make(**arguments)
        page.evaluate("traits => window.change(traits)", other.state())
        agree(kind, page, other)
    page.evaluate("traits => window.change(traits)", widget.state())
    wanted = kind.make()
    for traits in kind.states[:20:4]:
        (entries,) = steps(kind, wanted, [traits])
        pages.walk(page, [entries])
        for sent in page.evaluate("window.sent.splice(0)"):
            widget.set_state(sent)
        assert widget.state() == wanted.state()


@pytest.mark.parametrize(
    "width, style",
    [
        pytest.param(320, "", id="320"),
        pytest.param(1280, pages.DARK, id="1280-dark"),
        *([pytest.param(390, pages.DARK, id="390-dark")] if SOAK else []),
    ],
)
def test_every_width_and_theme(show, kind, width, style):
    page = show(kind.make(**kind.given[0]), width=width, style=style)
    pages.walk(page, [[]])
    assert page.evaluate("document.documentElement.scrollWidth") == width
    assert page.evaluate(pages.OUTSIDE) == []
    colours = pages.colours(
        page,
        ".mb-root, .mb-root :is(td, th, dd, label, summary, p, figcaption, "
        "button, select, [type=text], [type=number])",
    )
    assert colours == {"rgb(206, 214, 221)" if style else "rgb(0, 0, 0)"}


@pytest.mark.parametrize("width", [390, 760] if SOAK else [390])
def test_nothing_jumps_while_it_is_moved(show, kind, width):
    """The sentences have room for their longest."""
    for arguments, moves in kind.moves:
        widget = kind.make(**arguments)
        page = show(widget, width=width)
        states = list(steps(kind, widget, moves))
        assert len(set(pages.walk(page, states, pages.TOPS))) == 1


def test_without_javascript(show, kind):
    shown = [kind.make(), *(kind.make(**given) for given in kind.given)]
    page = show(*shown, java_script_enabled=False, width=360)
    for widget, place in zip(
        shown, page.locator(".mb-widget").all(), strict=True
    ):
        words = place.inner_text()
        assert words.startswith(widget.sentence())
        assert words.endswith("(Run this cell for a picture to play with.)")
    assert page.locator("input, select, button, svg").count() == 0


def test_reset(show, kind, widget):
    """Back to what Python gave, with one press."""
    page = show(widget)
    assert pages.control(page, "reset").is_disabled()
    pages.walk(page, steps(kind, kind.make(), kind.states[:6]))
    pages.control(page, "reset").click()
    agree(kind, page, widget)
    assert page.locator(".mb-ghost").count() == 0


def test_a_link_shows_the_same(open_page, kind, widget):
    """The address holds what the controls hold."""
    page = open_page(widget)
    state = kind.states[len(kind.states) // 3]
    set_to(widget, state)
    pages.walk(page, [list(kind.controls(widget).items())])
    page.reload()
    agree(kind, page, widget)
