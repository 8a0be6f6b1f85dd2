"""The HTTP port: OpenAI's API, vLLM's additions to it, health and metrics."""
