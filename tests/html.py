"""Pages of reports, parsed: tags, ids, links and text."""

from __future__ import annotations

from collections import Counter
from html.parser import HTMLParser


class Page(HTMLParser):
    """Count tags and ids of a page that is fed to it, and collect its links and text."""

    def __init__(self):
        super().__init__()
        self.tags, self.ids, self.links, self.text = Counter(), Counter(), [], []

    def handle_starttag(self, tag, attrs):
        self.tags[tag] += 1
        for key, value in attrs:
            if key == "id":
                self.ids[value] += 1
            if key in ("src", "href", "xlink:href"):
                self.links.append(value)

    def handle_data(self, data):
        self.text.append(data)
