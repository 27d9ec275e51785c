"""The frontend process: text in, text out; it owns no token's K/V and no block."""
