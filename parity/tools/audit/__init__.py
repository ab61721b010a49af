"""`parity audit`: for each implementation and setting, whether the setting is honoured.

A setting is changed from its default on cases where the definition changes, and the implementation runs again on the same
tensors. `probes` has the changes, `verdicts` what came out, `source_lines` where the installed release reads the setting,
`table` the output.
"""
