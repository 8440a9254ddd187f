"""How its decoder is planned (`plans.py`) and run (`components.py`): from the noise of a whole clip, in passes."""
