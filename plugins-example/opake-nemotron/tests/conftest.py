pytest_plugins = "opake.testing"
