"""A reader of HTML pages for tests: elements, rows and texts, and whether everything is closed."""

from __future__ import annotations

import html.parser

#: Elements without an end.
_VOID = {"meta", "link", "input", "br"}


class Page(html.parser.HTMLParser):
    """The elements of a page; fails where one is not closed in order."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.elements: list[tuple[str, dict[str, str]]] = []
        self.texts: list[tuple[tuple[str, ...], str]] = []
        self.rows: list[tuple[dict[str, str], list[str]]] = []
        self.feed(text)
        self.close()
        assert not self.open, f"not closed: {self.open}"

    def handle_starttag(self, tag, attrs) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag == "tr":
            self.rows.append((dict(attrs), []))
        if tag in ("td", "th") and self.rows:
            self.rows[-1][1].append("")
        if tag not in _VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs) -> None:
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag) -> None:
        assert self.open and self.open[-1] == tag, f"</{tag}> inside {self.open[-3:]}"
        self.open.pop()

    def handle_data(self, data) -> None:
        self.texts.append((tuple(self.open) or ("",), data))
        if {"td", "th"} & set(self.open):
            self.rows[-1][1][-1] += data

    def of(self, tag: str) -> list[dict[str, str]]:
        """Attributes of all elements of a tag."""
        return [attrs for name, attrs in self.elements if name == tag]

    def row(self, beginning: str) -> list[str]:
        """Cells of the first row whose first cell contains a text, blanks made single."""
        for _, cells in self.rows:
            tidy = [" ".join(cell.split()) for cell in cells]
            if beginning in tidy[0]:
                return tidy
        raise AssertionError(f"no row {beginning!r}")

    def titles(self, inside: str = "svg") -> list[str]:
        """Texts of the titles inside an element."""
        return [t for stack, t in self.texts if stack[-1] == "title" and inside in stack]
