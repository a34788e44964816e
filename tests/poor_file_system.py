"""A process in which some system calls on files fail, as they do on file systems that cannot do what they ask for.

A filter of the kernel (seccomp) refuses them, so that libraries in other languages are refused, too. Run as a program:
`poor_file_system.py ERRNO CALL,CALL... PROGRAM ARGUMENT...` runs a Python program with these calls refused.
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import struct
import subprocess
import sys

CALLS = {
    "x86_64": {
        "link": 86,
        "linkat": 265,
        "chmod": 90,
        "fchmod": 91,
        "fchmodat": 268,
        "flock": 73,
        "utimensat": 280,
        "fsync": 74,
        "fallocate": 285,
        "setpriority": 141,
        "sched_getaffinity": 204,
        "statfs": 137,
        "fstatfs": 138,
        "fadvise64": 221,
    },
    "aarch64": {
        "linkat": 37,
        "fchmod": 52,
        "fchmodat": 53,
        "flock": 32,
        "utimensat": 88,
        "fsync": 82,
        "fallocate": 47,
        "setpriority": 140,
        "sched_getaffinity": 123,
        "statfs": 43,
        "fstatfs": 44,
        "fadvise64": 223,
    },
}
"""Numbers of system calls."""

_LOAD, _JUMP_IF_EQUAL, _RETURN = 0x20, 0x15, 0x06
_ALLOW, _FAIL = 0x7FFF0000, 0x00050000
_KILL = 0x80000000
_SET_NO_NEW_PRIVS, _SET_SECCOMP, _FILTER = 38, 22, 2


class _Program(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("steps", ctypes.c_char_p))


def refuse(calls: list[str], number: int) -> None:
    """From now on these calls fail in this process with this error."""
    _filter(calls, _FAIL | number)


def kill_at(calls: list[str]) -> None:
    """From now on these calls end this process, or that of its children which makes one, as SIGKILL does."""
    _filter(calls, _KILL)


def _filter(calls: list[str], action: int) -> None:
    numbers = [CALLS[platform.machine()][call] for call in calls if call in CALLS[platform.machine()]]
    steps = [struct.pack("<HBBI", _LOAD, 0, 0, 0)]
    steps += [struct.pack("<HBBI", _JUMP_IF_EQUAL, len(numbers) - at, 0, one) for at, one in enumerate(numbers)]
    steps += [struct.pack("<HBBI", _RETURN, 0, 0, _ALLOW), struct.pack("<HBBI", _RETURN, 0, 0, action)]
    libc = ctypes.CDLL(None, use_errno=True)
    program = _Program(len(steps), b"".join(steps))
    if libc.prctl(_SET_NO_NEW_PRIVS, 1, 0, 0, 0) or libc.prctl(_SET_SECCOMP, _FILTER, ctypes.byref(program), 0, 0):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def run_without(calls: str, number: int, program: str, *arguments: str) -> str:
    """What a Python program prints on both outputs whose `calls` fail with the error `number`."""
    command = [sys.executable, __file__, str(number), calls, program, *arguments]
    found = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False, env=found)
    assert not done.returncode, done.stdout
    return done.stdout


if __name__ == "__main__":
    refuse(sys.argv[2].split(","), int(sys.argv[1]))
    assert errno.errorcode[int(sys.argv[1])]
    _, _, _, text, *sys.argv[1:] = sys.argv
    exec(text)
