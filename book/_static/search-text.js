/* What a search shows of a page is its text: no code, no output, no data of
   widgets, and nothing of the frame around the article. */
(() => {
  const NO_TEXT = `pre, .math, .cell_output, .mb-widget, .headerlink,
    .bd-header-article, .bd-sidebar-secondary, #jb-print-docs-body, footer`;
  const textOf = Search.htmlToText;
  Search.htmlToText = (html, anchor) => {
    const page = new DOMParser().parseFromString(html, "text/html");
    page.querySelectorAll(NO_TEXT).forEach((part) => part.remove());
    return textOf(page.documentElement.outerHTML, anchor);
  };
})();
