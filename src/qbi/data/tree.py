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

from qbi.errors import DataError, printable

LARGEST_FILE, LARGEST_ARCHIVE = 2**28, 2**33
"""Bytes of one file, and of all wanted ones together, that are read out of an archive: more is a bomb or a mistake."""

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
    total = 0
    try:
        if path.name.lower().endswith(".zip"):
            with zipfile.ZipFile(path) as archive:
                for info in archive.infolist():
                    if not info.is_dir() and wanted(info.filename):
                        total += info.file_size
                        _refuse_bombs(path, info.filename, info.file_size, total)
                        yield info.filename, archive.read(info)
            return
        with tarfile.open(path, "r|*") as archive:
            for member in archive:
                total += member.size
                _refuse_bombs(path, member.name, member.size, total)
                if member.isfile() and wanted(member.name):
                    content = archive.extractfile(member)
                    assert content is not None
                    yield member.name, content.read()
    except (tarfile.TarError, zipfile.BadZipFile, lzma.LZMAError, zlib.error, EOFError, OSError) as problem:
        raise DataError(f"{path}: the archive cannot be read to its end ({problem}); fetch it again.") from problem


def _refuse_bombs(path: Path, name: str, size: int, total: int) -> None:
    """Even to skip a member of a compressed archive, all of it is unpacked."""
    if size > LARGEST_FILE or total > LARGEST_ARCHIVE:
        raise DataError(
            f"{path}: {printable(name)[:80]} unpacks to {size:,} bytes; an archive of samples holds no such file."
        )
