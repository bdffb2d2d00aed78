"""CPU templates."""
