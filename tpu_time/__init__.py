"""A compiled TPU program becomes seconds, bytes and dollars."""
