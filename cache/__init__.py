"""What is remembered: stores (bytes), response (answers), prefix (KV blocks)."""
