"""Everything that the tests of the project share: the conformance suite, as a third party would switch it on."""

pytest_plugins = ["opake.testing", "pytester"]
