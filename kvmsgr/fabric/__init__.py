"""What moves bytes. Knows links, regions, plans and counters; nothing of requests or of any event loop."""
