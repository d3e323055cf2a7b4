"""The record of a script's first step, and its page."""

import pytest
import torch
import torch.nn.functional as F

from membudget.command.recording import Recording, page
from membudget.measuring import PeakTracker
from membudget.models import mlp
from membudget.widgets.timeline import BOXES, Step


def setting():
    torch.manual_seed(0)
    model = mlp(inputs=8, width=32, depth=4)
    optimizer = torch.optim.Adam(model.parameters())
    return model, optimizer, torch.ones(64, 8), torch.zeros(64).long()


def step(model, optimizer, x, y):
    F.cross_entropy(model(x), y).backward()
    optimizer.step()
    optimizer.zero_grad()


@pytest.fixture
def recorded(tmp_path, capsys):
    """A recording of the first of two steps."""
    recording = Recording(tmp_path / "step.html")
    things = setting()
    for _ in range(2):
        step(*things)
    recording.end()
    assert "operators" in capsys.readouterr().err
    return recording


def test_the_first_step_is_tracked_until_the_optimizers_end(recorded):
    model, optimizer, x, y = setting()
    with PeakTracker(model, optimizer, x) as tracker:
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
    ours = recorded.tracker
    # The step's last operator is the profiler's, after the hooks.
    assert ours.timeline == tracker.timeline[:-1]
    assert ours.operators == tracker.operators[:-1]
    assert ours.split() == tracker.split()


def test_the_page_holds_all_it_needs(recorded, browser):
    text = recorded.path.read_text("utf-8")
    assert text == page(recorded.tracker, "Sequential")
    asked, said = [], []
    window = browser.new_page()
    window.on("request", lambda request: asked.append(request.url))
    window.on("console", lambda message: said.append(message.text))
    window.on("pageerror", lambda error: said.append(str(error)))
    window.goto(recorded.path.as_uri())
    window.get_by_role("button", name="Peak").click()
    peak = recorded.tracker.peak_moment + 1
    slider = window.locator("input[type=range]")
    assert slider.input_value() == str(peak)
    assert "first training step of Sequential" in window.inner_text("body")
    assert not window.locator(".mb-fallback").count()
    assert (asked, said) == ([recorded.path.as_uri()], [])
    window.close()


def test_a_step_that_fails_is_recorded_so_far(tmp_path, capsys):
    recording = Recording(tmp_path / "step.html")
    model, _, x, _ = setting()
    with pytest.raises(ZeroDivisionError):
        model(x).sum() / (1 // 0)
    recording.end()
    assert recording.tracker.peak_moment == recording.tracker.timeline.index(
        recording.tracker.peak
    )
    assert "<svg" not in recording.path.read_text("utf-8").split("<script")[0]
    assert "at the peak" in capsys.readouterr().err


def test_without_a_training_step_there_is_nothing(tmp_path, capsys):
    recording = Recording(tmp_path / "step.html")
    recording.end()
    assert not recording.path.exists()
    assert "nothing to record" in capsys.readouterr().err


def test_of_many_modules_there_is_a_box_for_each_block():
    model = torch.nn.Sequential(
        *(mlp(inputs=8, width=8, depth=8, outputs=8) for _ in range(4))
    )
    with PeakTracker(model) as tracker:
        model(torch.ones(2, 8)).sum().backward()
    modules = {o.module for o in Step(tracker).operators}
    assert len({o.module for o in tracker.operators}) > BOXES
    assert modules - {"", "Sequential"} == {"0", "1", "2", "3"}
