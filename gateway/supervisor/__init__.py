"""The process behind `warmgate serve`."""

from gateway.supervisor.listening import StartError
from gateway.supervisor.supervise import Backoff, Supervisor, engine_command, say

__all__ = ["Backoff", "StartError", "Supervisor", "engine_command", "say"]
