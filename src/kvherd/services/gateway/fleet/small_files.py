"""Files that an operator names: read whole, and never more than such a file can be."""

import errno
import os
import stat
from pathlib import Path

MOST_BYTES = 4 * 2**20


def read_small(path: Path, *, most_bytes: int = MOST_BYTES) -> bytes:
    """What the file holds. Raises `OSError`, also for what is too large, and for what is no file with an end of its
    own: a pipe would be waited for, and a device read for ever.
    """
    mode = path.stat().st_mode
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
    if not stat.S_ISREG(mode):
        raise OSError(errno.EINVAL, "it is no regular file")
    with path.open("rb") as file:
        data = file.read(most_bytes + 1)
    if len(data) > most_bytes:
        raise OSError(errno.EFBIG, f"it is larger than {most_bytes} bytes")
    return data
