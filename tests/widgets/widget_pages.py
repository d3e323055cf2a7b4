"""Pages that hold widgets, as the book does, and what tests ask of them."""

from pathlib import Path

from membudget.widgets import bundle

ROOT = Path(__file__).resolve().parents[2]
HOST = ROOT / "book" / "_static" / "widget-host.js"
DARK = """
:root { --pst-color-text-base: #ced6dd; --pst-color-background: #14181e;
        color-scheme: dark; }
body { background: #14181e; }
"""

OUTSIDE = """() => [...document.querySelectorAll(".mb-picture text")]
    .filter((text) => {
      const box = text.getBoundingClientRect();
      const svg = text.closest("svg").getBoundingClientRect();
      return box.left < svg.left - 0.5 || box.right > svg.right + 0.5 ||
        box.top < svg.top - 0.5 || box.bottom > svg.bottom + 0.5 ||
        box.height < 11;
    }).map((text) => text.textContent)"""
"""The texts that leave their picture, or are smaller than written."""

OVERLAPPING = """() => {
  const boxes = [...document.querySelectorAll(".mb-picture")]
    .flatMap((svg) => [...svg.querySelectorAll("text")])
    .map((t) => [t.textContent, t.getBoundingClientRect()]);
  return boxes.flatMap(([one, a], i) => boxes.slice(i + 1)
    .filter(([, b]) => a.left < b.right && b.left < a.right &&
      a.top + 2 < b.bottom && b.top + 2 < a.bottom)
    .map(([two]) => `${one} / ${two}`));
}"""
"""Pairs of texts of the pictures that overlap."""

CLEAN_UP = """async () => {
  const text = document.querySelector('[type="text/x-esm"]');
  const type = "text/javascript";
  const blob = new Blob([text.textContent], { type });
  const module = await import(URL.createObjectURL(blob));
  const json = document.querySelector(".mb-state").textContent;
  const [state, calls] = [JSON.parse(json), new Set()];
  const model = {
    get: (key) => state[key],
    set: (key, value) => (state[key] = value),
    save_changes() {},
    on: (event, call) => calls.add(call),
    off: (event, call) => calls.delete(call),
  };
  const el = document.createElement("div");
  document.body.append(el);
  const end = module.default.render({ model, el });
  const before = [calls.size, el.children.length];
  end();
  return [...before, calls.size, el.children.length];
}"""
"""Listeners and elements while a second widget is there, and after it."""


def document(*widgets, style=""):
    """A page that holds the widgets, as the book does."""
    name = widgets[0].name
    outputs = [w._repr_mimebundle_()[0]["text/html"] for w in widgets]
    return (
        '<!doctype html><html lang="en"><meta charset="utf-8">'
        f"<style>{style}{bundle.style_text(name)}</style>"
        f"<body>{''.join(outputs)}"
        f'<script type="text/x-esm" data-widget="{name}">'
        f"{bundle.module_text(name)}</script>"
        f"<script>{HOST.read_text()}</script>"
    )


def said(page, slider):
    """What a screen reader hears while a slider takes five quick steps."""
    return page.evaluate(
        """async (selector) => {
          const live = document.querySelector("[aria-live]");
          const said = [];
          new MutationObserver(() => said.push(live.textContent))
            .observe(live, { childList: true });
          const slider = document.querySelector(selector);
          for (let i = 0; i < 5; i++) {
            slider.stepUp();
            slider.dispatchEvent(new Event("input"));
            await new Promise((done) => setTimeout(done, 20));
          }
          await new Promise((done) => setTimeout(done, 800));
          return said;
        }""",
        slider,
    )
