"""Attention in one kernel: two products around a softmax whose rows never reach memory."""
