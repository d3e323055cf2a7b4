// Which pages this browser has opened, what was predicted there, and the medals
// and scores of the game. All stay in the browser, and the map has a button to forget them.
(() => {
  const KEY = "mb-opened";
  const t = window.mbWord; // in the language of the page
  const read = () => {
    try {
      const kept = JSON.parse(localStorage.getItem(KEY));
      return new Set(Array.isArray(kept) ? kept : []);
    } catch {
      return new Set();
    }
  };
  const opened = read();
  const page = /(chapters|labs)\/\w+(?=\.html$)/.exec(location.pathname)?.[0];
  if (page && !opened.has(page)) {
    opened.add(page);
    try {
      localStorage.setItem(KEY, JSON.stringify([...opened]));
    } catch {
      // A browser that keeps nothing: the map shows no marks.
    }
  }
  const predictions = () => {
    try {
      return JSON.parse(localStorage.getItem("mb-predicted")) ?? {};
    } catch {
      return {};
    }
  };
  const line = document.querySelector(".mb-forget");
  if (!line) return;
  const pages = [...document.querySelectorAll(".mb-map [data-page]")].filter(
    (item) => /^(chapters|labs)\//.test(item.dataset.page),
  );
  const show = () => {
    const opened = read();
    const predicted = predictions();
    for (const item of pages) {
      item.querySelector(".mb-opened")?.remove();
      if (!opened.has(item.dataset.page)) continue;
      const mark = document.createElement("span");
      mark.className = "mb-opened";
      const { right, of } = predicted[item.dataset.page] ?? {};
      mark.textContent = of
        ? t("✓ opened, {0} of {1} right", right, of)
        : t("✓ opened");
      item.querySelector(".mb-to").after(" ", mark);
    }
    const count = pages.filter((i) => opened.has(i.dataset.page)).length;
    line.firstChild.textContent = t(
      "You have opened {0} of {1} pages. Only this browser knows. ",
      ...[count, pages.length],
    );
    button.disabled = !count;
  };
  const button = document.createElement("button");
  button.type = "button";
  button.textContent = t("Forget");
  button.addEventListener("click", () => {
    try {
      localStorage.removeItem(KEY);
      localStorage.removeItem("mb-predicted");
      localStorage.removeItem("mb-medals"); // of the game in chapter 5
      localStorage.removeItem("mb-scores");
    } catch {
      // Nothing was kept.
    }
    show();
  });
  line.append("", button);
  line.prepend(document.createTextNode(""));
  line.hidden = false;
  window.addEventListener("storage", show); // another tab went on reading
  show();
})();
