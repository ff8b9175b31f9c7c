"""`make bench-http`: CPU per request and latency of the gateway against nginx, interleaved in one run.

`targets` starts the servers, `load` drives them with wrk and reads their CPU time, `__main__` makes the rounds and the
table. What is compared is CPU time per request of the server's own processes: it is steadier than wall time on a shared
machine.
"""
