"""The tests of the conformance suite, one class a concern; `opake.testing.suite` puts them together."""
