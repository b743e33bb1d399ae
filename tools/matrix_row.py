"""One line of the matrix's table: `python tools/matrix_row.py NAME RESULT`, run by the Python of that row."""

import platform
import sys
from importlib.metadata import version

LIBRARIES = ("transformers", "torch", "peft", "numpy")

if __name__ == "__main__":
    name, result = sys.argv[1:]
    versions = [f"{library} {version(library)}" for library in LIBRARIES]
    print("  ".join([f"{name:9}", f"python {platform.python_version()}", *versions, result]))
