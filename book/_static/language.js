// The way to the same page in the other language keeps the place on it. Who
// chose Chinese, or whose browser asks for it, is offered it on an English page;
// nobody is led away. The choice stays in the browser.
(() => {
  const KEY = "mb-language";
  const way = document.querySelector(".mb-language");
  if (!way) return;
  const kept = () => {
    try {
      return localStorage.getItem(KEY);
    } catch {
      return null;
    }
  };
  const keep = (language) => {
    try {
      localStorage.setItem(KEY, language);
    } catch {
      // A browser that keeps nothing: it is offered again.
    }
  };
  const go = (event) => {
    keep(way.hreflang);
    event.currentTarget.hash = location.hash;
  };
  way.addEventListener("click", go);
  const asked = navigator.languages.find((one) => /^(zh|en)/i.test(one));
  const is = document.documentElement.lang;
  if (!/^zh/i.test(kept() ?? asked) || /^zh/i.test(is)) return;
  const offer = document.createElement("p");
  offer.className = "mb-offer";
  offer.lang = way.hreflang;
  const link = document.createElement("a");
  link.href = way.href;
  link.textContent = "阅读本页的中文版";
  link.addEventListener("click", go);
  const stay = document.createElement("button");
  stay.type = "button";
  stay.textContent = "继续看英文";
  stay.addEventListener("click", () => {
    keep(is);
    offer.remove();
  });
  offer.append(link, " ", stay);
  document.querySelector("article.bd-article")?.prepend(offer);
})();
