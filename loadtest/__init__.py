"""Load tests: locust users, trace replay, a stub upstream, peers side by side, the simulator."""
