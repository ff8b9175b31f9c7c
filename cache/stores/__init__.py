"""Where bytes are kept: in this process (memory), on this machine (disk), on many (redis), each bounded, none trusted.

`base` says what a shared store does, `breaker` keeps a bad one from harming a request.
"""
