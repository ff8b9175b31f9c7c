"""`make bench-routing`: chats replayed over several embedded engines behind a gateway, by routing policy.

`model` writes a tiny random model, `fleet` starts engines and routers, `replay` drives the chats, `overhead` measures
what a decision costs with many upstreams and a large index, `__main__` makes the tables.
"""
