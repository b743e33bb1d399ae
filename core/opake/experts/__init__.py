"""Mixture-of-experts models under transforms: the router's auxiliary loss, and experts chosen as `eager`."""
