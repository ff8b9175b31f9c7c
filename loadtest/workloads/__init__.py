"""What users ask: request bodies by kind, reproducible from a seed; nothing here sends anything."""

from loadtest.workloads.conversations import AgentLoop, Chat, document
from loadtest.workloads.questions import Questions

__all__ = ["AgentLoop", "Chat", "Questions", "document"]
