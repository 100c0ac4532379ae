"""A vLLM server whose traffic is recorded, for one more environment variable: `python -m examples.vllm_server`."""
