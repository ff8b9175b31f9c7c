"""Answers remembered: canonical requests, entries, freshness, flights and curated answers."""
