// Questions to predict. The build marks them (`predict.py`); here their
// options become buttons. A click locks the choice, opens the output and the
// reading, and says whether it was right. What was chosen stays in the browser.
(() => {
  const KEY = "mb-predicted";
  const t = window.mbWord; // in the language of the page
  const page = /(chapters|labs)\/\w+(?=\.html$)/.exec(location.pathname)?.[0];
  const questions = [...document.querySelectorAll(".mb-predict")];
  if (!page || !questions.length) return;

  const all = (() => {
    try {
      return JSON.parse(localStorage.getItem(KEY)) ?? {};
    } catch {
      return {};
    }
  })();
  const chosen = all[page]?.chosen ?? {};
  const keep = () => {
    const known = questions.filter((q) => chosen[q.id]);
    const right = known.filter((q) => chosen[q.id] === rightOf(q)).length;
    all[page] = { chosen, right, of: questions.length };
    try {
      localStorage.setItem(KEY, JSON.stringify(all));
    } catch {
      // A browser that keeps nothing: the page works as long as it is open.
    }
    return [known.length, right];
  };
  const rightOf = (q) => /mb-right-(\w)/.exec(q.className)[1];
  const made = (name, props = {}, ...inside) => {
    const node = Object.assign(document.createElement(name), props);
    node.append(...inside);
    return node;
  };

  // What stands between a question and the next: folds and the reading.
  const follows = (a, b) =>
    a.compareDocumentPosition(b) & Node.DOCUMENT_POSITION_FOLLOWING;
  const after = (number, selector) =>
    [...document.querySelectorAll(selector)].filter(
      (node) =>
        follows(questions[number], node) &&
        !(questions[number + 1] && follows(questions[number + 1], node)),
    );

  // A bar directly below another one opens and closes with it, unseen.
  const cellBelow = (cell) => {
    let next = cell.nextElementSibling;
    while (next?.matches(".mb-reading")) next = next.nextElementSibling;
    return next?.matches(".tag_hide-output") ? next : null;
  };
  const isAnswer = (node) =>
    node?.matches("details.hide") && node.querySelector(".cell_output");
  const heads = new Map();
  for (const bar of document.querySelectorAll(".tag_hide-output > details")) {
    const cell = isAnswer(bar) ? cellBelow(bar.parentElement) : null;
    const lower = cell?.firstElementChild;
    if (!isAnswer(lower)) continue;
    const head = heads.get(bar) ?? bar;
    heads.set(lower, head);
    lower.classList.add("mb-joined");
    cell.hidden = !head.open;
    head.addEventListener("toggle", () => {
      lower.open = head.open;
      cell.hidden = !head.open;
    });
  }

  // How far off a number was, where both options are numbers of one unit.
  const numberIn = (text) =>
    /^\(\w\) (?:about |at most |nearly |大?约 |最多 |至多 |接近 |将近 )?(\d[\d\s\u202f]*(?:\.\d+)?)\s*([^\d.。]*)[.。]?$/.exec(
      text.trim(),
    );
  const off = (said, is) => {
    const [a, b] = [numberIn(said), numberIn(is)];
    if (!a || !b || (a[2] && b[2] && a[2] !== b[2])) return "";
    const [x, y] = [a, b].map((n) => Number(n[1].replace(/\s/g, "")));
    if (!x || !y) return "";
    const low = x < y;
    const factor = Math.max(x, y) / Math.min(x, y);
    if (factor < 1.5) {
      const gap = Number(Math.abs(x - y).toPrecision(3));
      return low
        ? t(" Off by {0}: too low.", gap)
        : t(" Off by {0}: too high.", gap);
    }
    const times = Number(factor.toPrecision(2));
    return low
      ? t(" Off by a factor of {0}: too low.", times)
      : t(" Off by a factor of {0}: too high.", times);
  };

  questions.forEach((question, number) => {
    const inside = question.querySelector(".mb-option");
    const place = inside ? question : question.nextElementSibling;
    const right = rightOf(question);
    const [reading] = after(number, ".mb-reading");
    const verdict = made("span", { className: "mb-verdict" });
    verdict.setAttribute("role", "status");
    const group = made("span", { className: "mb-answers" });
    group.setAttribute("role", "group");
    group.setAttribute("aria-label", t("Your prediction"));
    const buttons = [...place.querySelectorAll(".mb-option")].map((option) => {
      const letter = /mb-option-(\w)/.exec(option.className)[1];
      const button = made(
        "button",
        { type: "button", className: option.className },
        ...option.childNodes,
      );
      button.dataset.letter = letter;
      button.addEventListener("click", () => choose(letter));
      if (option === place.querySelector(".mb-option")) option.before(group);
      option.remove();
      group.append(button);
      return button;
    });
    group.after(verdict);
    for (const word of place.querySelectorAll(".mb-or")) word.hidden = true;
    const peek = made("button", {
      type: "button",
      className: "mb-peek",
      textContent: t("Show the answer"),
    });
    const fold = reading.closest("details");
    peek.addEventListener("click", () => {
      show();
      reading.tabIndex = -1;
      reading.focus();
    });
    // A fold of its own hides the reading already.
    const wait = () => {
      if (fold) return;
      reading.hidden = true;
      verdict.after(peek);
    };
    const folds = after(number, "details.hide").filter(
      (node) => node.querySelector(".cell_output") && follows(node, reading),
    );
    for (const each of folds) {
      each.addEventListener("toggle", () => each.open && show());
    }
    const show = () => {
      reading.hidden = false;
      peek.remove();
      for (const each of fold ? [...folds, fold] : folds) each.open = true;
    };
    const mark = (letter) => {
      for (const button of buttons) {
        const own = button.dataset.letter;
        button.setAttribute("aria-pressed", own === letter);
        button.disabled = own !== letter;
        button.classList.toggle("mb-is-right", own === right);
        button.classList.toggle("mb-is-wrong", own === letter && own !== right);
      }
      const textOf = (l) =>
        buttons.find((button) => button.dataset.letter === l).textContent;
      verdict.textContent =
        letter === right
          ? t("Right.")
          : t("Not quite: it is ({0}).", right) +
            off(textOf(letter), textOf(right));
    };
    const choose = (letter) => {
      if (chosen[question.id]) return;
      chosen[question.id] = letter;
      mark(letter);
      show();
      score();
    };
    question.mbReset = () => {
      for (const button of buttons) {
        button.removeAttribute("aria-pressed");
        button.disabled = false;
        button.classList.remove("mb-is-right", "mb-is-wrong");
      }
      verdict.textContent = "";
      for (const each of fold ? [...folds, fold] : folds) each.open = false;
      wait();
    };
    if (chosen[question.id]) {
      mark(chosen[question.id]);
      show();
    } else {
      wait();
    }
  });

  // The score at the page's end; in a quiz a line that stays in sight.
  const line = made("p", { className: "mb-score" });
  const told = made("span");
  told.setAttribute("role", "status");
  const again = made("button", {
    type: "button",
    className: "mb-peek",
    textContent: t("Start over"),
  });
  again.addEventListener("click", () => {
    for (const question of questions) {
      delete chosen[question.id];
      question.mbReset();
    }
    score();
  });
  line.append(told, " ", again);
  const list = made("p", { className: "mb-missed" });
  const quiz = document.querySelector(".mb-quiz");
  if (quiz) {
    line.classList.add("mb-sticky");
    const share = made("button", {
      type: "button",
      className: "mb-peek",
      textContent: t("Copy a link to my result"),
    });
    share.addEventListener("click", async () => {
      const letters = questions.map((q) => chosen[q.id] ?? "-").join("");
      const link = `${location.href.split("#")[0]}#result=${letters}`;
      try {
        await navigator.clipboard.writeText(link);
        share.textContent = t("Copied");
      } catch {
        prompt(t("The link to your result:"), link);
      }
    });
    line.append(" ", share);
    const letters = /^#result=([a-d-]+)$/.exec(location.hash)?.[1];
    if (letters?.length === questions.length) {
      const right = questions.filter((q, n) => rightOf(q) === letters[n]);
      quiz.textContent = t(
        "Whoever sent you this link got {0} of {1} right. Can you do better?",
        ...[right.length, questions.length],
      );
    }
  }
  const headings = [...document.querySelectorAll(".bd-article :is(h2, h3)")];
  const sectionOf = (question) =>
    headings.filter((heading) => follows(heading, question)).at(-1);
  const missed = () =>
    questions
      .filter((q) => chosen[q.id] && chosen[q.id] !== rightOf(q))
      .map((q) => {
        const heading = sectionOf(q);
        const text = heading.firstChild.textContent.split(/[:：]/)[0];
        return made("a", {
          href: `#${heading.closest("section").id}`,
          textContent: text,
        });
      });
  const score = () => {
    const [known, right] = keep();
    again.hidden = !known;
    told.textContent = known
      ? t(
          "You have predicted {0} of {1}, {2} right.",
          ...[known, questions.length, right],
        )
      : t("{0} predictions wait on this page.", questions.length);
    const links = quiz && known === questions.length ? missed() : [];
    list.textContent = "";
    links.forEach((link, n) => list.append(n ? t(", ") : t("Missed: "), link));
  };
  const article = document.querySelector("article.bd-article");
  article?.append(line, list);
  score();
})();
