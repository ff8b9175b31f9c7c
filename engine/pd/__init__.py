"""Prefill on one engine, decode on another, by vLLM's `kv_transfer_params` protocol.

    offers    the prefill side: holds a computed prompt's blocks until they are fetched, or the lease ends
    pulls     the decode side: fetches them, and believes what is proven
    wire      what passes between the two, and the thread that moves it

A request with `{"do_remote_decode": true}` is answered with parameters; the same request, sent to another engine with
these parameters (`do_remote_prefill`), takes up the prompt's keys and values, the last partial block and the logits
behind the last token included. So the decode side computes nothing of the prompt, and chooses every token itself, with
the numbers that it would have computed. What is late, torn, missing or of another layout is computed.
"""
