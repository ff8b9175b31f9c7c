"""A GET to a process of our own: is it up, and what does it say?"""

import asyncio
import json
import re
from typing import Any


async def get(host: str, port: int, path: str, timeout: float = 2.0) -> tuple[int, Any]:
    """Status and decoded JSON body; (0, None) when nothing answers, and None for a body that is not JSON."""
    try:
        async with asyncio.timeout(timeout):
            reader, writer = await asyncio.open_connection(host, port)
            try:
                writer.write(f"GET {path} HTTP/1.0\r\nhost: {host}:{port}\r\n\r\n".encode())
                head, _, body = (await reader.read(-1)).partition(b"\r\n\r\n")
            finally:
                writer.close()
    except (OSError, TimeoutError):
        return 0, None
    status = re.match(rb"HTTP/1\.[01] (\d{3}) ", head)
    try:
        decoded = json.loads(body)
    except ValueError:
        decoded = None
    return int(status[1]) if status else 0, decoded
