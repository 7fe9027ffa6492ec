"""English text that every Python carries: the docstrings of its standard library."""

import ast
import sysconfig
from pathlib import Path

from qbi.data.text import Corpus
from qbi.errors import DataError

MODULES = [
    "argparse",
    "asyncio/base_events.py",
    "asyncio/queues.py",
    "asyncio/tasks.py",
    "ast",
    "base64",
    "bdb",
    "bisect",
    "calendar",
    "cmd",
    "codecs",
    "collections/__init__.py",
    "configparser",
    "contextlib",
    "copy",
    "csv",
    "ctypes/util.py",
    "dataclasses",
    "datetime",
    "decimal",
    "difflib",
    "doctest",
    "email/message.py",
    "enum",
    "fileinput",
    "fractions",
    "ftplib",
    "functools",
    "gettext",
    "glob",
    "gzip",
    "heapq",
    "html/parser.py",
    "http/client.py",
    "http/cookies.py",
    "http/server.py",
    "imaplib",
    "importlib/abc.py",
    "inspect",
    "io",
    "ipaddress",
    "json/__init__.py",
    "logging/__init__.py",
    "logging/handlers.py",
    "mailbox",
    "mimetypes",
    "multiprocessing/managers.py",
    "numbers",
    "optparse",
    "os",
    "pathlib",
    "pdb",
    "pickle",
    "pickletools",
    "platform",
    "plistlib",
    "poplib",
    "pprint",
    "profile",
    "pyclbr",
    "pydoc",
    "queue",
    "random",
    "re",
    "sched",
    "secrets",
    "selectors",
    "shelve",
    "shlex",
    "shutil",
    "smtplib",
    "socket",
    "socketserver",
    "sqlite3/dbapi2.py",
    "ssl",
    "statistics",
    "string",
    "subprocess",
    "symtable",
    "sysconfig",
    "tarfile",
    "tempfile",
    "textwrap",
    "threading",
    "timeit",
    "tokenize",
    "trace",
    "traceback",
    "types",
    "typing",
    "unittest/case.py",
    "unittest/mock.py",
    "urllib/parse.py",
    "urllib/request.py",
    "uuid",
    "warnings",
    "weakref",
    "webbrowser",
    "xml/dom/minidom.py",
    "xmlrpc/client.py",
    "zipfile",
    "zoneinfo/__init__.py",
]

SHORTEST = 12
"""Words below which a docstring is not a text."""


def builtin_text() -> Corpus:
    """Docstrings of at least a dozen words; the label tells those of classes and modules from those of functions."""
    root = Path(sysconfig.get_path("stdlib"))
    texts: dict[str, int] = {}
    for module in MODULES:
        for path in (root / f"{module}.py", root / module / "__init__.py", root / module):
            if path.is_file():
                texts.update(_docstrings(path))
                break
    if not texts:
        raise DataError(f"{root}: no sources of the standard library here; give text of your own with --data.")
    return Corpus("standard library docstrings", tuple(texts), tuple(texts.values()), ("function", "class"))


def _docstrings(path: Path) -> dict[str, int]:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    found = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            text = ast.get_docstring(node)
            if text and len(text.split()) >= SHORTEST:
                found[text] = int(isinstance(node, ast.Module | ast.ClassDef))
    return found
