"""KV blocks of prompt prefixes: their identity, their stored form, and the tiers below the device that hold them.

    blocks    what a block is: chain digests, layout ids          codec     its stored form
    stack     the tiers as the engine sees them                   transfer  what the engine polls
    mover     the I/O thread                                      tiers     a remote tier, and the guard around it
    host      host memory        remote  Redis        lmcache  LMCache's multiprocess server

How an engine uses them (one engine thread; nothing here blocks it):

    codec = Codec(layout.digest, block_bytes)
    stack = TierStack(
        host=HostTier(2 * 2**30, block_bytes),
        remote=GuardedTier(RedisTier("redis://127.0.0.1:6379/1", codec), block_bytes),
        block_bytes=block_bytes, block_tokens=32, step=prefill_chunk // 32,
    )
    # a request arrives; the device holds the first `d` of its full blocks
    blocks = chain(prompt, 32, salt=tenant)[: (len(prompt) - 1) // 32]  # the last token is always computed
    stack.touch(blocks[:d], tenant)
    lookup = stack.lookup(blocks[d:], tenant, on_done=wake)  # remote blocks begin to move while the request waits
    # its turn has come (at the latest when `lookup.done`)
    decision = stack.decide(lookup)
    if decision.blocks:
        staging = rows[: decision.blocks]  # memoryviews of block_bytes each, of memory allocated once: the page
        # faults of fresh memory take longer than the copy
        transfer = stack.load(lookup, decision, staging, on_done=wake)
        # … other sequences run on; when `transfer.done`, or the request is cancelled (`transfer.abandon()`):
        pool.load(pages[: transfer.loaded], staging)  # recompute from block d + transfer.loaded
    # blocks that a second prompt used, or that the pool is about to evict
    wanted = stack.missing(blocks)
    stack.store([blocks[i] for i in wanted], pool.export(wanted), tenant, uses=2)
    stack.observe_prefill(tokens, seconds)  # after each prefill step; what "never slower" is measured against
    stack.close()
"""
