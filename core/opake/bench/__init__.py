"""Timings of the fused ops against their rivals, on the machine at hand."""
