"""kvmsgr moves paged KV caches from prefill nodes to decode nodes, layer by layer, while the prefill computes."""
