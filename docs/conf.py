"""The documentation site (`make site`): Sphinx with furo and myst-nb over the pages of this folder, as they stand on code hosts too.

Notebooks are shown as they are. `QBI_NOTEBOOKS=force` (`make site NOTEBOOKS=execute`) runs them.
"""

import os
from pathlib import Path
from typing import Any

from sphinx.application import Sphinx

import qbi

project = "qbi"
author = "The qbi maintainers"
release = version = qbi.__version__
language = "en_GB"

extensions = ["myst_nb", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
exclude_patterns = ["data", "tables", "figures", "**.ipynb_checkpoints"]

myst_heading_anchors = 4
nb_execution_mode = os.environ.get("QBI_NOTEBOOKS", "off")
nb_execution_raise_on_error = True
nb_execution_timeout = 600

default_role = "code"  # docstrings have names in single backticks
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
autodoc_member_order = "bysource"
napoleon_use_ivar = True
python_maximum_signature_line_length = 88
nitpick_ignore_regex = [
    ("py:(class|obj|exc|data)", ".*")
]  # types in signatures; what pages refer to is a link, and is looked at

html_theme = "furo"
html_title = "qbi"
html_static_path = ["_static"]
html_css_files = ["pictures.css"]
html_js_files = [("recall.js", {"defer": "defer"}), ("bits.js", {"defer": "defer"})]
html_copy_source = False
html_show_sourcelink = False


def setup(app: Sphinx) -> None:
    """Called by Sphinx."""
    app.connect("source-read", _with_notebooks)
    app.connect("autodoc-process-docstring", _keep, priority=400)
    app.connect("autodoc-process-docstring", _put_back, priority=600)


def _with_notebooks(app: Sphinx, page: str, content: list[str]) -> None:
    """The list of tutorials gets every notebook beside it, however many there are."""
    names = sorted(path.stem for path in (Path(app.srcdir) / "tutorials").glob("*.ipynb"))
    if page == "tutorials/index" and names:
        content[0] += "\n".join(["", "```{toctree}", ":hidden:", "", *names, "```", ""])


WHOLE = ("attribute", "data", "property")
_kept: dict[str, list[str]] = {}


def _keep(_app: Sphinx, what: str, name: str, _found: object, _options: Any, lines: list[str]) -> None:
    """Sentences about fields are kept before napoleon, which takes what stands before a colon for a type."""
    if what in WHOLE:
        _kept[name] = list(lines)


def _put_back(_app: Sphinx, what: str, name: str, _found: object, _options: Any, lines: list[str]) -> None:
    if what in WHOLE:
        lines[:] = _kept.pop(name)
