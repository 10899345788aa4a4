"""Benchmarks: kernels alone, and decoding in vLLM beside dense attention."""
