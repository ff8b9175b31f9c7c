"""KV blocks of prompt prefixes: their identity, their stored form, and the tiers below the device that hold them."""
