"""The tiny world: module families, and what is made from them (corpus, rows, problems)."""
