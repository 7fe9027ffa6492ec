"""The reference has every public name, each with an example, and the examples are true."""

import doctest
import re
from pathlib import Path

import torch
from torch import nn

import qbi

PAGE = (Path(__file__).parents[2] / "docs/reference.md").read_text(encoding="utf-8")
EXAMPLES = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
NAMED = re.findall(r"(?:\.\. auto\w+::|\{py:data\}) qbi\.([\w.]+)", PAGE)
REGISTRIES = {
    "defences.registry.DEFENCES",
    "detection.detectors.DETECTORS",
    "report.formats.FORMATS",
    "data.open.SOURCES",
    "uses.operation",
}


def test_every_public_name_stands_there_once_and_nothing_else():
    assert sorted(NAMED) == sorted([*qbi.__all__, *REGISTRIES])


def test_every_name_has_an_example():
    shown = "\n".join(EXAMPLES)
    without = [
        name
        for name in NAMED
        if ">>>" not in (getattr(getattr(qbi, name, None), "__doc__", "") or "")
        and not re.search(rf"\b{name.split('.')[-1]}\b", shown)
    ]
    assert without == []


def test_the_examples_of_the_page_are_true():
    runner = doctest.DocTestRunner(optionflags=doctest.NORMALIZE_WHITESPACE)
    for number, text in enumerate(EXAMPLES):
        names = {"qbi": qbi, "torch": torch, "nn": nn}
        runner.run(doctest.DocTestParser().get_doctest(text, names, f"example {number} of reference.md", None, None))
    assert runner.summarize().failed == 0
    assert runner.tries >= 15


def test_constants_have_an_example_of_their_own():
    """Their class' docstring would pass for one."""
    shown = "\n".join(EXAMPLES)
    constants = [name for name in qbi.__all__ if not callable(getattr(qbi, name))]
    assert constants
    assert [name for name in constants if f"qbi.{name}" not in shown] == []
