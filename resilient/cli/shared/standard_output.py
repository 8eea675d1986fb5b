"""What commands print, on streams of any encoding: drawings get simpler, and no text is refused; errors are one line.

Must not import torch.
"""

from __future__ import annotations

import codecs
import errno
import io
import os
import sys
from typing import Any

from rich.console import Console
from typer.core import TyperGroup

from resilient.cli.shared.errors import usage_error
from resilient.cli.shared.usage import told_usage

_PLAIN = dict(zip("·…─–▪▁▂▃▄▅▆▇█▏▎▍▌▋▊▉▐▕", "..--#_.-~=+*##########", strict=True))
"""For each character of the drawings, ours and rich's, one of ASCII: columns stay where they are."""

_OF_OUTPUT = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EPIPE)


class Commands(TyperGroup):
    """The commands, whatever standard output is: of another encoding than UTF-8, a full disk, or read no further."""

    def main(self, *args: Any, **kwargs: Any) -> Any:
        """Run a command; see click."""
        _open_closed_streams()
        codecs.register_error(__name__, _simplify)
        for stream in (sys.stdout, sys.stderr):
            if isinstance(stream, io.TextIOWrapper):
                stream.reconfigure(errors=__name__)
        try:
            return super().main(*args, **kwargs)
        except OSError as error:
            if not is_of_output(error):
                raise
            text = (
                f"error: the output cannot be written ({error.strerror}); make room where it goes, or send it elsewhere"
            )
            Console(stderr=True, highlight=False, emoji=False).print(text, markup=False, style="red", soft_wrap=True)
            _drop_output()
            raise SystemExit(2) from None

    def invoke(self, ctx: Any) -> Any:
        """Run a command, and say in one line what is wrong where its arguments cannot be read; see click."""
        try:
            return super().invoke(ctx)
        except Exception as error:  # of a class that depends on the release of typer
            told = told_usage(error, " ".join((ctx.command_path, ctx.invoked_subcommand or "")).strip())
            if told is None:
                raise
            raise usage_error(told) from None


def _drop_output() -> None:
    """Have what standard output still keeps written nowhere: the interpreter would try again as it ends."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.stdout.fileno())
    os.close(nowhere)


def _open_closed_streams() -> None:
    """Put /dev/null where a standard stream is closed: what is opened next would get its number, and its text."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)


def is_of_output(error: Exception) -> bool:
    """Return whether an error is one of writing to what was open already, such as standard output."""
    return isinstance(error, OSError) and error.filename is None and error.errno in _OF_OUTPUT


def _simplify(error: UnicodeError) -> tuple[str | bytes, int]:
    """Replace what a stream's encoding lacks; other people's texts as Python escapes them."""
    if not isinstance(error, UnicodeEncodeError):
        raise error
    lacking = error.object[error.start : error.end]
    return "".join(_PLAIN.get(each) or each.encode("ascii", "backslashreplace").decode() for each in lacking), error.end
