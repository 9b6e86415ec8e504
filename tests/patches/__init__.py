"""Proofs of the patches: each fails on the stock llama-server and passes on the patched one."""
