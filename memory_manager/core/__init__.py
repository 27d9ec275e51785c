"""The compiled core: one engine's block pool, trie and page tables as arrays, and what is done to them."""
