"""Benchmarks of the embedded engine: `python -m loadtest.bench_engine`.

servers   engines, Redis and LMCache of one's own, how they are asked    figures   medians and ranges
tiers     time to first token by where a prefix was found                     rates     prefill and decode speed
chat      a replay of many conversations, tiers on and off                    drafts    speculation on and off
baseline  `transformers`, as a server
"""
