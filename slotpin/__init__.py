"""slotpin: an async reverse proxy that keeps llama-server's KV cache for the conversation that owns it."""

__version__ = "0.1.0"
