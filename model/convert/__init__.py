"""Conversion of weights: ours, HF safetensors, OLMo-core. One table, both directions derived from it."""
