/* Runs the widgets of a page without a kernel.

   A widget's module is the one that Jupyter runs: `{ initialize, render }`.
   Here it gets a stand-in model, whose state stands in the page as JSON, and
   its text comes from <script type="text/x-esm" data-widget="NAME">, and what
   all share, if the page has it apart, from data-widget="base". It is run
   as a function, at once: import() would wait for every deferred script of the
   theme. Until (and unless) that works, the page shows a sentence,
   .mb-fallback.

   What the reader sets goes into the page's address, so that a picture can be
   shared as a link: ?segments.layers=24, with -2 after the name of the second
   widget of a kind. */
(() => {
  const modules = new Map();

  function load(name) {
    if (!modules.has(name)) {
      const textOf = (name) => {
        const selector = `script[type="text/x-esm"][data-widget="${name}"]`;
        return document.querySelector(selector)?.textContent ?? "";
      };
      const body = (textOf("base") + textOf(name))
        .replace(/^export default /m, "return ")
        .replace(/^export /gm, "");
      modules.set(name, new Function(`"use strict";${body}`)());
    }
    return modules.get(name);
  }

  /* The settings of one widget in the page's address. */
  function makeAddress(name, section) {
    const here = (key) => key.startsWith(`${name}.`);
    const query = () => [...new URLSearchParams(location.search)];
    const own = () => query().filter(([key]) => here(key));
    let waiting;
    const place = (held) => {
      const others = query().filter(([key]) => !here(key));
      const ours = Object.entries(held).map(([k, v]) => [`${name}.${k}`, v]);
      const url = new URL(location);
      url.search = new URLSearchParams([...others, ...ours]);
      return url;
    };
    const put = (held) => {
      try {
        history.replaceState(history.state, "", place(held));
      } catch {
        // a browser may refuse: then there is no link to share
      }
    };
    return {
      link: (held) =>
        Object.assign(place(held), { hash: section ?? "" }).href,
      read: () =>
        Object.fromEntries(
          own().map(([key, value]) => [key.slice(name.length + 1), value]),
        ),
      write(held) {
        clearTimeout(waiting);
        if (own().length || Object.keys(held).length) {
          waiting = setTimeout(() => put(held), 300);
        }
      },
    };
  }

  function makeModel(state, address) {
    const listeners = new Map();
    const of = (event) => listeners.get(event) ?? [];
    const emit = (event) => [...of(event)].forEach((call) => call());
    return {
      address,
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

  const many = new Map(); // widgets of each kind

  async function start(host) {
    const el = document.createElement("div");
    try {
      const kind = host.dataset.widget;
      const widget = load(kind);
      many.set(kind, (many.get(kind) ?? 0) + 1);
      const place = many.get(kind) > 1 ? `-${many.get(kind)}` : "";
      const state = host.querySelector("script.mb-state").textContent;
      const section = host.closest("section[id]")?.id;
      const address = makeAddress(kind + place, section);
      const model = makeModel(JSON.parse(state), address);
      if (widget.initialize) await widget.initialize({ model });
      host.append(el); // first, so that it knows its width
      const rendered = widget.render({ model, el });
      host.querySelector(".mb-fallback")?.remove();
      await rendered;
    } catch (error) {
      el.remove();
      console.error(`The widget "${host.dataset.widget}" failed:`, error);
    }
  }

  document.querySelectorAll(".mb-widget[data-widget]").forEach(start);
})();
