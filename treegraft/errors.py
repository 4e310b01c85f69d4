"""The one error type that a person who uses TreeGraft can cause and can mend, and what its sentences are made of."""

import errno


class UserError(ValueError):
    """Bad input: the message is one sentence that says what is wrong, where, and what to do.

    Library code raises it; the command line alone turns it into exit code 2 without a traceback.
    """


def one_line(error: BaseException) -> str:
    """The first line of an error's message, short enough for a sentence."""
    lines = str(error).strip().splitlines()
    return lines[0].strip().rstrip(".:")[:300] if lines else type(error).__name__


def is_disk_full(error: BaseException | str) -> bool:
    """Whether an error, of whatever type or library, says that the disk is full."""
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        return True
    return "No space left on device" in str(error) or "os error 28" in str(error)
