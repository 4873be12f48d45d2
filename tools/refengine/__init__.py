"""A small real LLM engine that embeds kvmsgr: prefill on one node, decode on others, logits equal to the last bit.

Reading order: `model` and `arithmetic` compute one rank's share, `spec` and `cache` say how pages are kept, `scheduler`
cuts prompts into chunks, `engine` puts these together and knows nothing of kvmsgr. `node`, `prefill` and `decode` are
all there is to embedding a Messenger; where a node has several ranks, `workers`, `worker` and `collective` run them in
processes of their own. `reference` runs the same engine in one process; `demo` starts everything and compares, and
`matrix` does so for every mix of two sides.
"""
