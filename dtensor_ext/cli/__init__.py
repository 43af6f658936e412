"""The command line: ``python -m dtensor_ext demo | run | rules``."""
