"""A backend of ecoffload for a toy device: memory of this machine, copied with memmove."""
