"""A vLLM server: options, start, stop, load, floors."""
