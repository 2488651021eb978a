"""Run as a script: enters a host of the testbed, then becomes the given command.

    python -I -S enter.py CGROUP_PROCS NAMESPACE PARENT_PID HOST_NAME HOSTS_FILE COMMAND...

It joins the cgroup, then the network namespace, and mounts a fresh /sys, whose class/net shows the interfaces of the
namespace it is mounted in (`ip netns exec` does the same). HOST_NAME is set as the machine's name, and HOSTS_FILE is mounted over /etc/hosts. The command is killed when the process that started it ends. It is a script, so that
no function of the caller, which may have threads, runs between fork and exec.
"""

import ctypes
import os
import signal
import socket
import sys

_CLONE_NEWNS, _CLONE_NEWUTS, _CLONE_NEWNET = 0x00020000, 0x04000000, 0x40000000
_MS_BIND, _MS_REC, _MS_SLAVE, _MNT_DETACH = 4096, 16384, 1 << 19, 2
_PR_SET_PDEATHSIG = 1


def enter(cgroup_procs: str, namespace: str, parent: int, host_name: str, hosts_file: str) -> None:
    """Move this process into the cgroup and the namespace."""
    libc = ctypes.CDLL(None, use_errno=True)

    def call(what: str, result: int) -> None:
        if result != 0:
            sys.exit(f"testbed: {what} was refused: {os.strerror(ctypes.get_errno())}")

    call("prctl", libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL))
    if os.getppid() != parent:
        sys.exit("testbed: the process that started this one is gone")
    with open(cgroup_procs, "w") as procs:
        procs.write(str(os.getpid()))
    descriptor = os.open(namespace, os.O_RDONLY)
    call(f"entering {namespace}", libc.setns(descriptor, _CLONE_NEWNET))
    os.close(descriptor)
    call("a mount namespace", libc.unshare(_CLONE_NEWNS))
    call("keeping mounts apart", libc.mount(b"none", b"/", None, _MS_REC | _MS_SLAVE, None))
    libc.umount2(b"/sys", _MNT_DETACH)
    call("mounting /sys", libc.mount(b"sysfs", b"/sys", b"sysfs", 0, None))
    call("a name of its own", libc.unshare(_CLONE_NEWUTS))
    socket.sethostname(host_name)
    call("mounting /etc/hosts", libc.mount(hosts_file.encode(), b"/etc/hosts", None, _MS_BIND, None))


if __name__ == "__main__":
    _, procs_file, namespace_file, parent_pid, name, hosts, *command = sys.argv
    enter(procs_file, namespace_file, int(parent_pid), name, hosts)
    try:
        os.execvp(command[0], command)
    except OSError as failure:
        sys.exit(f"testbed: {command[0]}: {failure.strerror}")
