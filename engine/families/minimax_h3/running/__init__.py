"""How its components are planned (`plans.py`) and run (`components.py`): in tiles and sections of their own."""
