"""Helpers for those who write or test family plugins; opt-in, nothing here is imported by the library itself."""
