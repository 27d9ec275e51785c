"""Speculative decoding: drafts are proposed, verified by sample-and-match, and rolled back by shortening."""
