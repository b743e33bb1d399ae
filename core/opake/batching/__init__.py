"""What a model needs because vmap takes the batch dimension away: inputs, outputs, loss, cache, rotary tables."""
