"""What makes the Chinese pages quick to build.

Sphinx parses every message twice, and for each word of a Chinese index it goes
through a list of all Latin ones.
"""

from functools import cache

import sphinx.search
import sphinx.transforms.i18n
from sphinx.search.zh import SearchChinese

publish = sphinx.transforms.i18n.publish_msgstr
published = {}


def publish_once(app, source, *arguments):
    """As Sphinx's, which the transform calls to see, and again to take."""
    if source in published:
        return published.pop(source)
    message = publish(app, source, *arguments)
    published[source] = message.deepcopy()
    return message


class Search(SearchChinese):
    """Words of the index: Chinese ones as jieba cuts them, others stemmed."""

    def init(self, options):
        super().init(options)
        self.stem = cache(self.stem)

    def stem(self, stemmed_word):
        word = stemmed_word.lower()
        stem = self.stemmer.stemWord(word)
        return word if len(stem) < 3 <= len(word) else stem


def use(app, config):
    """Take these over where the pages are Chinese."""
    if config.language == "zh_CN":
        sphinx.search.languages["zh"] = Search
        sphinx.transforms.i18n.publish_msgstr = publish_once
