"""The model families that ship with opake: one declarative module a family, found by entry point."""
