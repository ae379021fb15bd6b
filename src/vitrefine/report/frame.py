"""What the pages have in common: how their templates are read, and what stands in every head and foot."""

import datetime
import re
from importlib.resources import files

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup, escape

from vitrefine import __version__
from vitrefine.report import words


def environment() -> Environment:
    """Templates with what all of them use; every text is escaped."""
    made = Environment(
        loader=PackageLoader("vitrefine.report"), autoescape=True, trim_blocks=True, undefined=StrictUndefined
    )
    now = datetime.datetime.now(datetime.UTC)
    style = (files("vitrefine.report") / "templates" / "style.css").read_text(encoding="utf-8")
    made.globals |= {"version": __version__, "style": Markup(style), "date": f"{now.day} {now:%B %Y}"}
    made.filters["breakable"] = _breakable
    made.filters["first_upper"] = words.first_upper
    return made


def _breakable(spec: str) -> Markup:
    """A spec that may be broken where its parts meet."""
    return Markup("<wbr>").join(escape(piece) for piece in re.split(r"(?<=[_(,])(?=[^_(,])|(?=\+)", spec))
