"""What the examples show is true: the notebook runs, and its cells say what they should."""

import contextlib
import io
import json
from pathlib import Path
from typing import Any

NOTEBOOK = Path(__file__).parents[2] / "examples/audit.ipynb"


def test_the_notebook_runs():
    cells = [c for c in json.loads(NOTEBOOK.read_text())["cells"] if c["cell_type"] == "code"]
    names: dict[str, Any] = {}
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        for cell in cells:
            exec(compile("".join(cell["source"]), str(NOTEBOOK), "exec"), names)
    text = said.getvalue()
    assert "exact" in text
    assert "row noise 3" in text
    assert "at most 72 bits" in text
    assert names["result"].recall > 0.3
