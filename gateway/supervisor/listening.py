"""Listening sockets, and clear words when a port cannot be had."""

import errno
import socket


class StartError(Exception):
    """`warmgate serve` cannot start; the message is one sentence. ``told``: the cause was printed already."""

    def __init__(self, message: str, *, told: bool = False) -> None:
        super().__init__(message)
        self.told = told


def bind(host: str, port: int, count: int) -> list[socket.socket]:
    """``count`` listening TCP sockets on one address; the kernel spreads connections over them. Raises StartError."""
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (socket.gaierror, UnicodeError):
        raise StartError(f"listen.host '{host}' is not an address of this machine") from None
    family, _, _, _, where = min(found, key=lambda item: item[0] != socket.AF_INET)
    sockets: list[socket.socket] = []
    try:
        # Bound without SO_REUSEPORT first: with it, a port that another gateway holds would be shared silently.
        with _bound(family, where, shared=False) as probe:
            if count == 1:
                sockets.append(probe.dup())
            where = probe.getsockname()
        sockets += [_bound(family, where, shared=True) for _ in range(count - len(sockets))]
        for item in sockets:
            item.listen(2048)
    except OSError as error:
        for item in sockets:
            item.close()
        raise StartError(_why(error, host, port)) from None
    return sockets


def free_port() -> int:
    """A loopback port that nobody holds now."""
    with _bound(socket.AF_INET, ("127.0.0.1", 0), shared=False) as probe:
        return probe.getsockname()[1]


def _bound(family: int, where: tuple, *, shared: bool) -> socket.socket:
    item = socket.socket(family, socket.SOCK_STREAM)
    try:
        item.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if shared:
            item.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        item.bind(where)
    except OSError:
        item.close()
        raise
    return item


def _why(error: OSError, host: str, port: int) -> str:
    if error.errno == errno.EADDRINUSE:
        return f"port {port} on {host} is already in use; stop what listens there, or choose another with --port"
    if error.errno in (errno.EACCES, errno.EPERM):
        return f"not allowed to listen on port {port}; choose one above 1023 with --port"
    if error.errno == errno.EADDRNOTAVAIL:
        return f"listen.host '{host}' is not an address of this machine"
    return f"cannot listen on {host} port {port}: {error.strerror}"
