"""What only an appendix needs."""
