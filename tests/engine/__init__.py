"""A test engine: all of an inference engine but the model, to drive the client's halves."""
