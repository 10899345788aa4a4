"""A tokenizer of single bytes, made here: a character of several bytes is several tokens."""

from __future__ import annotations

from html.parser import HTMLParser
from typing import Any

CHAT = "{% for m in messages %}[{{ m.role }}] {{ m.content | trim }}\n{% endfor %}[assistant] "


def byte_tokenizer(template: bool = True) -> Any:
    """256 bytes, a token that ends an answer, and a chat template that strips a turn, or none."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    inner = Tokenizer(models.BPE({letter: n for n, letter in enumerate(letters)}, []))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    made = PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="<end>", pad_token="!")
    made.chat_template = CHAT if template else None
    return made


class Page(HTMLParser):
    """What a page is made of: elements in order, the text of scripts, every address it could fetch."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str]] = []
        self.cells: list[list[str]] = []  # of table rows
        self.open = False
        self.scripts: list[str] = []
        self.titles: list[str] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.tags.append(tag)
        self.attributes += [(name, value or "") for name, value in attrs]
        for opened, kept in (("script", self.scripts), ("title", self.titles)):
            if tag == opened:
                kept.append("")
        if tag == "tr":
            self.cells.append([])
        if tag in ("td", "th"):
            self.cells[-1].append("")
            self.open = True

    def handle_data(self, data: str) -> None:
        if self.tags and self.tags[-1] in ("script", "title"):
            kept = self.scripts if self.tags[-1] == "script" else self.titles
            if not kept[-1]:
                kept[-1] = data
        if self.open:
            self.cells[-1][-1] += data

    def handle_endtag(self, tag: str) -> None:
        self.open = self.open and tag not in ("td", "th")

    def fetched(self) -> list[str]:
        """Addresses outside the page itself."""
        names = ("src", "href", "xlink:href", "action", "data", "poster", "srcset")
        found = [value for name, value in self.attributes if name in names]
        return [value for value in found if not value.startswith(("#", "data:"))]
