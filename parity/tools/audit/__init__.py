"""`parity audit`: for each implementation and setting, whether the setting is honoured.

A setting is moved away from its default on cases where the definition moves, and the implementation is asked again on
the same tensors: `probes` says what is moved, `answers` what came of it, `places` where the installed release reads the
setting, `table` shows it.
"""
