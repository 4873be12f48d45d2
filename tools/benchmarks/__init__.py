"""Benchmarks that print each figure beside the limit the same run measured."""
