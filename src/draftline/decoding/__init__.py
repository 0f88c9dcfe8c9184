"""Drafting, greedy and speculative decoding, and what they measure: acceptance length and speed."""
