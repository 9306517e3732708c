"""The main job on real input: photographs through a vision tower, offloaded, reloaded and verified.

Needs the extra ``ecoffload[demo]``. ``images`` prepares photographs, ``tower`` encodes them, ``conversation`` plays the
turns; the command line shows what they return.
"""
