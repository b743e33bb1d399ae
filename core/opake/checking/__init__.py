"""What `opake families check` does, at run time and without a test runner; the full suite is `opake.testing`."""
