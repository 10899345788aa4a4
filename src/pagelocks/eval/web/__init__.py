"""Pages for a browser that need nothing but themselves: no network, no file beside them.

Whatever is put in is escaped: text as HTML, data as JSON in which no tag can end or begin.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined


def write_page(path: Path, template: str, **values: Any) -> None:
    """Fill one of this folder's templates, and write it as UTF-8.

    Parameters
    ----------
    path : where; a missing folder is made
    template : name of a file here
    values : what it asks for; a name that is missing is an error
    """
    pages = Environment(
        loader=PackageLoader(__name__, ""), autoescape=True, undefined=StrictUndefined, trim_blocks=True
    )
    text = pages.get_template(template).render(values)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
