"""The embedded inference engine: its own process, an OpenAI-compatible server over a Llama-family model."""
