"""Memory that holds caches, and the layer counters that say how far a forward pass has come."""
