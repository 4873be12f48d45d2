"""A small real LLM engine that embeds kvmsgr: prefill in one process, decode in another, logits equal to the last bit.

Reading order: `model` and `arithmetic` compute, `cache` holds pages, `scheduler` cuts prompts into chunks, `engine`
puts these together and knows nothing of kvmsgr. `node`, `prefill` and `decode` are all there is to embedding a
Messenger. `reference` runs the same engine in one process; `demo` starts everything and compares.
"""
