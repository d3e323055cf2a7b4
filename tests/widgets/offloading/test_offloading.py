"""The offloading widget: copies that hide or stick out, and its picture."""

import pytest
from widget_pages import control, drag, fits_a_screen, texts, unfold

from membudget.offloading import MACHINES
from membudget.widgets import Offloading, format_bytes
from membudget.widgets.offloading import MODELS, STEP, WIDEST


def test_it_says_whether_copies_hide():
    assert Offloading().sentence() == (
        "Eight blocks of width 4096 on H100 80 GB, with tapes in the host's "
        "memory. The copies stick out: forward and backward take 48 % "
        "longer, and keep 512 MiB on the card in place of 2.00 GiB. They "
        "hide from a width of 9965 on."
    )
    assert "The copies hide: forward and backward take 33 % longer" in (
        Offloading("checkpoints").sentence()
    )
    assert "take no longer" in Offloading(width=16384).sentence()
    assert Offloading("nothing").sentence() == (
        "Eight blocks of width 4096 keep their tapes, 2.00 GiB, on the card."
    )


@pytest.mark.parametrize("machine", MACHINES)
def test_checkpoints_hide_for_every_model(machine):
    """What the subject says: they hide where tapes do not."""
    hide = {what: [] for what in ("tapes", "checkpoints")}
    for width, (what, found) in (
        (width, of) for width in MODELS.values() for of in hide.items()
    ):
        widget = Offloading(what, machine=machine, width=width)
        found.append(widget.run().waited == 0)
    assert all(hide["checkpoints"])
    assert not hide["tapes"][0]
    assert hide["tapes"][-1]


def test_a_longer_sequence_hides_more():
    short = Offloading(tokens=1024)
    long = Offloading(tokens=131072)
    assert short.run().waited > 0
    assert long.run().waited == long.least("tapes") == 0


def test_less_of_the_link_hides_less():
    whole, half = Offloading(full=100), Offloading(full=50)
    assert half.least("tapes") > 1.9 * whole.least("tapes")
    assert half.run().time > whole.run().time


# In a browser ----------------------------------------------------------------


def place(page, width):
    """On the page, a width of the picture's axis."""
    handle = page.locator(".mb-handle").bounding_box()
    box = page.locator(".mb-picture").bounding_box()
    left, right = box["x"] + 40, box["x"] + box["width"] - 6
    y = handle["y"] + handle["height"] / 2
    return left + (right - left) * width / WIDEST, y


def test_the_handle_is_dragged_along_the_axis(show):
    page = show(Offloading(), width=760, reduced_motion="reduce")
    drag(page, place(page, 4096), place(page, 8000), place(page, 10240))
    assert control(page, "width").input_value() == str(10240 // STEP)
    x, _ = place(page, 10240)
    handle = page.locator(".mb-handle").bounding_box()
    assert handle["x"] + handle["width"] / 2 == pytest.approx(x, abs=1)
    assert control(page, "width").evaluate("e => e === document.activeElement")
    assert page.locator(".mb-ghost").count() == 1
    assert "The copies hide" in page.locator(".mb-live").inner_text()


def test_it_stays_on_the_axis(show):
    page = show(Offloading(), width=760, reduced_motion="reduce")
    x, y = place(page, 0)
    drag(page, place(page, 4096), (x - 30, y))
    assert control(page, "width").input_value() == "1"
    drag(page, place(page, STEP), (745, y))  # beyond the axis
    assert control(page, "width").input_value() == str(WIDEST // STEP)


def test_who_grabs_the_lanes_moves_nothing(show):
    page = show(Offloading(), width=760)
    x, y = place(page, 9000)
    drag(page, (x, y - 200), (x + 50, y - 200))
    assert control(page, "width").input_value() == str(4096 // STEP)


def test_what_waits_is_drawn_and_goes(show):
    page = show(Offloading(), width=760)
    waits = page.locator(".mb-picture .mb-fill-over")
    assert waits.count() > 6
    control(page, "what").nth(2).check()
    assert waits.count() == 0
    assert page.locator(".mb-picture rect.mb-fill-recomputation").count() == 8
    assert "ends after 32 passes" in texts(page)
    control(page, "what").nth(0).check()
    assert "ends after 24 passes" in texts(page)
    assert page.locator(".mb-picture rect.mb-fill-recomputation").count() == 0
    whole = format_bytes(Offloading("nothing").run().peak)
    assert f"at most {whole}" in texts(page)


def test_what_ends_beyond_the_axis_says_so(show):
    page = show(Offloading(machine="T4", width=256), width=760)
    (words,) = [t for t in texts(page) if t.startswith("ends")]
    assert words.startswith("ends → after")
    assert page.locator(".mb-break").count() == 2


def test_shares_say_the_speeds(show):
    page = show(Offloading(), width=760)
    unfold(page)
    outputs = page.locator("output").all_inner_texts()
    assert outputs[2:] == ["40 %: 395.76 TFLOP/s", "80 %: 51.2 GB/s"]


@pytest.mark.parametrize("width", [390, 1000])
def test_it_fits_a_screen(show, width):
    assert fits_a_screen(show(Offloading(), width=width))
