"""A folder or an archive of files, read the same way and in the same order.

Archives are read in place, in one pass, without unpacking; member names that point outside are never written
anywhere, since nothing is written at all.
"""

import lzma
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path

from qbi.errors import DataError

ARCHIVE_ENDINGS = (".tar", ".tar.gz", ".tgz", ".tar.xz", ".tar.bz2", ".zip")


def is_archive(path: Path) -> bool:
    """Whether the name is that of an archive that can be read."""
    return path.name.lower().endswith(ARCHIVE_ENDINGS)


def files(root: Path, wanted: Callable[[str], bool]) -> Iterator[tuple[str, bytes]]:
    """Every wanted file below a folder or inside an archive, as (relative name, content)."""
    if not root.exists():
        raise DataError(f"{root}: no such file or folder.")
    if root.is_dir():
        yield from _folder(root, wanted)
    elif is_archive(root):
        yield from _archive(root, wanted)
    else:
        raise DataError(f"{root}: neither a folder nor an archive ({', '.join(ARCHIVE_ENDINGS)}).")


def _folder(root: Path, wanted: Callable[[str], bool]) -> Iterator[tuple[str, bytes]]:
    for path in sorted(root.rglob("*")):
        name = path.relative_to(root).as_posix()
        if wanted(name) and path.is_file():
            yield name, path.read_bytes()


def _archive(path: Path, wanted: Callable[[str], bool]) -> Iterator[tuple[str, bytes]]:
    try:
        if path.name.lower().endswith(".zip"):
            with zipfile.ZipFile(path) as archive:
                for name in archive.namelist():
                    if not name.endswith("/") and wanted(name):
                        yield name, archive.read(name)
            return
        with tarfile.open(path, "r|*") as archive:
            for member in archive:
                if member.isfile() and wanted(member.name):
                    content = archive.extractfile(member)
                    assert content is not None
                    yield member.name, content.read()
    except (tarfile.TarError, zipfile.BadZipFile, lzma.LZMAError, zlib.error, EOFError, OSError) as problem:
        raise DataError(f"{path}: the archive cannot be read to its end ({problem}); fetch it again.") from problem
