/* Runs the widgets of a page without a kernel.

   A widget's module is the one that Jupyter runs: `{ initialize, render }`.
   Here it gets a stand-in model, whose state stands in the page as JSON, and
   its text comes from <script type="text/x-esm" data-widget="NAME">. It is run
   as a function, at once: import() would wait for every deferred script of the
   theme. Until (and unless) that works, the page shows the static picture,
   .mb-fallback. */
(() => {
  const modules = new Map();

  function load(name) {
    if (!modules.has(name)) {
      const selector = `script[type="text/x-esm"][data-widget="${name}"]`;
      const text = document.querySelector(selector).textContent;
      const body = text
        .replace(/^export default /m, "return ")
        .replace(/^export /gm, "");
      modules.set(name, new Function(`"use strict";${body}`)());
    }
    return modules.get(name);
  }

  function makeModel(state) {
    const listeners = new Map();
    const of = (event) => listeners.get(event) ?? [];
    const emit = (event) => [...of(event)].forEach((call) => call());
    return {
      get: (key) => state[key],
      set(key, value) {
        if (state[key] === value) return;
        state[key] = value;
        emit(`change:${key}`);
        emit("change");
      },
      on: (event, call) => listeners.set(event, [...of(event), call]),
      off: (event, call) =>
        listeners.set(event, call ? of(event).filter((c) => c !== call) : []),
      save_changes() {},
      send() {},
    };
  }

  async function start(host) {
    try {
      const widget = load(host.dataset.widget);
      const state = host.querySelector("script.mb-state").textContent;
      const model = makeModel(JSON.parse(state));
      const el = document.createElement("div");
      if (widget.initialize) await widget.initialize({ model });
      const rendered = widget.render({ model, el });
      host.append(el);
      host.querySelector(".mb-fallback")?.remove();
      await rendered;
    } catch (error) {
      console.error(`The widget "${host.dataset.widget}" failed:`, error);
    }
  }

  document.querySelectorAll(".mb-widget[data-widget]").forEach(start);
})();
