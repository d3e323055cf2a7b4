"""Pages that hold widgets, as the book does, and what tests ask of them."""

from membudget.widgets import bundle

WIDE_FONT = "body, .mb-root { font-family: 'DejaVu Sans', Verdana; }"
BOOK_FONT = WIDE_FONT + "html { font-size: 17px; }"
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

CROSSED = """() => {
  const boxes = [...document.querySelectorAll(".mb-picture text")]
    .map((text) => [text.textContent, text.getBoundingClientRect()]);
  const found = [];
  for (const line of document.querySelectorAll(".mb-picture *")) {
    if (getComputedStyle(line).strokeDasharray === "none") continue;
    const around = line.getBoundingClientRect();
    const near = boxes.filter(([, box]) =>
      around.left < box.right + 1 && box.left < around.right + 1 &&
      around.top < box.bottom + 1 && box.top < around.bottom + 1);
    if (!near.length) continue;  // to go along a long path takes its time
    const [length, at] = [line.getTotalLength(), line.getScreenCTM()];
    const points = [];
    for (let way = 0; way <= length; way += 1)
      points.push(line.getPointAtLength(way).matrixTransform(at));
    for (const [text, box] of near) {
      if (points.some(({ x, y }) => x > box.left && x < box.right &&
          y > box.top + 2 && y < box.bottom - 2))
        found.push(`${line.getAttribute("class")} / ${text}`);
    }
  }
  return found;
}"""
"""Dashed lines of the pictures that go through a text."""

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


KERNEL = """async () => {
  const text = document.querySelector('[type="text/x-esm"]').textContent;
  const blob = new Blob([text], { type: "text/javascript" });
  const module = await import(URL.createObjectURL(blob));
  const state = JSON.parse(document.querySelector(".mb-state").textContent);
  let now = {};
  const calls = [];
  const change = (traits) => {
    Object.assign(state, traits);
    calls.forEach((call) => call());
  };
  Object.assign(window, { change, sent: [] });
  const model = {
    get: (key) => state[key],
    set: (key, value) => change({ [key]: (now[key] = value) }),
    save_changes: () => { window.sent.push(now); now = {}; },
    on: (event, call) => calls.push(call),
    off() {},
  };
  const el = document.createElement("div");
  document.querySelector(".mb-widget").replaceChildren(el);
  module.default.render({ model, el });
}"""
"""Draws the widget anew with a kernel: `change` is its, `sent` our changes."""


ENTER = """([number, settings]) => {
  const root = document.querySelectorAll(".mb-root")[number];
  let entered = 0;
  for (const [key, value] of settings) {
    const fail = (what) => {
      throw new Error(`${key} = ${value}: ${what}`);
    };
    const all = [...root.querySelectorAll(`[data-key="${key}"]`)];
    const input = all[0]?.type === "radio"
      ? all.find((one) => one.value === value)
      : all[0];
    if (!input) fail("there is no such control");
    const held = input.type === "checkbox" ? input.checked : input.value;
    if (input.type !== "radio" && String(held) === String(value)) continue;
    if (input.type === "radio" && input.checked) continue;
    entered += 1;
    if (input.disabled || input.readOnly) fail("cannot be changed");
    if (!input.checkVisibility({ visibilityProperty: true }))
      fail("cannot be seen");
    input.focus();
    if (["checkbox", "radio"].includes(input.type)) {
      const wanted = input.type === "radio" || value;
      input.scrollIntoView({ block: "center" });
      const box = input.getBoundingClientRect();
      const hit = document.elementFromPoint(
        box.x + box.width / 2, box.y + box.height / 2,
      );
      if (hit !== input && !input.labels[0].contains(hit)) fail("is covered");
      input.click();
      if (input.checked !== wanted) fail("does not take it");
      continue;
    }
    const option = [...(input.options ?? [])]
      .find((one) => [one.text, one.value].includes(String(value)));
    if (input.options && !option) fail("is not offered");
    const text = option?.value ?? String(value);
    input.value = text;
    if (input.value !== text) fail("does not take it");
    input.dispatchEvent(new Event("input", { bubbles: true }));
    input.dispatchEvent(new Event("change", { bubbles: true }));
  }
  return entered;
}"""
"""Enters settings as the reader does, without a way to Python for each. What
stands there already is left alone; returns how many are not."""

SEEN = """(root) => {
  const all = (selector) => [...root.querySelectorAll(selector)];
  const held = all("[data-key]:not(button)")
    .filter((e) => (e.type !== "radio" || e.checked))
    .map((e) => [e.dataset.key, e.type === "checkbox" ? e.checked : e.value]);
  return {
    numbers: Object.fromEntries(all("[data-number]")
      .map((e) => [e.dataset.number, e.dataset.value ?? null])),
    labels: all(".mb-picture").map((e) => e.getAttribute("aria-label")),
    controls: Object.fromEntries(held),
    said: all("p[aria-live=polite]")
      .filter((e) => e.checkVisibility({ visibilityProperty: true }))
      .map((e) => e.innerText),
  };
}"""
"""What a widget shows: its numbers, the labels of its pictures, what its
controls hold, and what is to be seen where it is read out."""


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
        f"<script>{bundle.host_text()}</script>"
    )


def unfold(page):
    """Opens what is folded."""
    page.evaluate("""() => document.querySelectorAll("details")
        .forEach((fold) => (fold.open = true))""")


def control(page, key):
    """The control of a trait."""
    return page.locator(f'[data-key="{key}"]')


def texts(page):
    """All that is written in the pictures."""
    return page.locator(".mb-picture text").all_text_contents()


def drag(page, *places, drop=True):
    """Press the mouse at the first place, move over the others, release."""
    for i, place in enumerate(places):
        page.mouse.move(*place)
        if i == 0:
            page.mouse.down()
    if drop:
        page.mouse.up()


def said(page, slider):
    """What a screen reader hears while a slider takes five quick steps.

    20 ms lie between them, by a clock of the page's own: a busy machine's
    may be more than the sentence waits.
    """
    return page.evaluate(
        """async (selector) => {
          const due = new Map();
          let [now, last] = [0, 1e9];  // numbers that no other timer has
          window.setTimeout = (act, wait) => {
            due.set((last += 1), [now + wait, act]);
            return last;
          };
          const forget = window.clearTimeout;
          window.clearTimeout = (number) =>
            due.delete(number) || forget(number);
          const pass = async (time) => {
            await scheduler.postTask(() => {});  // it is drawn by then
            now += time;
            for (const [number, [at, act]] of [...due])
              if (at <= now && due.delete(number)) act();
          };
          const said = [];
          for (const live of document.querySelectorAll("p[aria-live]"))
            new MutationObserver(() => said.push(live.textContent))
              .observe(live, { childList: true });
          const slider = document.querySelector(selector);
          for (let i = 0; i < 5; i++) {
            slider.stepUp();
            slider.dispatchEvent(new Event("input"));
            await pass(20);
          }
          await pass(800);
          return said;
        }""",
        slider,
    )


def colours(page, selector):
    """The colours of the text in the elements, which are all there.

    In one go: Playwright's `eval_on_selector_all` first looks for the elements
    and then asks them, and one that was drawn anew in between has no colour.
    """
    found = page.evaluate(
        """(selector) => [...document.querySelectorAll(selector)]
            .map((e) => getComputedStyle(e).color)""",
        selector,
    )
    assert found
    return set(found)


TOPS = """() => [...document.querySelectorAll(".mb-picture")]
  .map((e) => Math.round(e.getBoundingClientRect().top + scrollY)).join()"""
"""Where the pictures begin, for `walk`."""

BELOW = """(root) =>
  Math.round(root.querySelector(".mb-fold").getBoundingClientRect().top +
             scrollY)"""
"""Where what stands below the sentence begins, for `walk`."""

IMMEDIATE = """() => {
  const later = window.setTimeout;
  window.setTimeout = (act) => later(act);
}"""
"""What would wait until the reader pauses does not wait."""


def walk(page, states, look=SEEN, widget=0):
    """Brings a widget to each state by its controls; what is seen there.

    Args:
        page: what `show` gave.
        states: for each state the pairs of a control's key and its value.
        look: JavaScript, a function of the widget's element.
        widget: the number of the widget on the page.
    """
    page.wait_for_function(
        "[...document.querySelectorAll('.mb-picture')]"
        ".every((svg) => svg.viewBox.baseVal.width !== 640)"
    )
    unfold(page)
    states = [list(state) for state in states]
    seen = page.evaluate(
        f"""async ([number, states]) => {{
          const [enter, look] = [{ENTER}, {look}];
          const root = document.querySelectorAll(".mb-root")[number];
          const seen = [];
          for (const state of states) {{
            for (const entry of state) {{
              if (enter([number, [entry]]))
                await scheduler.postTask(() => {{}});  // it is drawn by then
            }}
            for (let i = 0; i < 2; i += 1)
              await new Promise((go) => setTimeout(go));
            seen.push(look(root));
          }}
          return seen;
        }}""",
        [widget, states],
    )
    assert len(seen) == len(states) > 0
    return seen


def fits_a_screen(page):
    """Whether a widget, or on a phone its picture, is seen as a whole."""
    root = page.locator(".mb-root").bounding_box()
    picture = page.locator(".mb-picture").bounding_box()
    tall = picture["y"] + picture["height"] - root["y"]
    phone = page.viewport_size["width"] < 480
    return tall <= 784 if phone else root["height"] <= 700
