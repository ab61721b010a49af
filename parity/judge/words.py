"""The gates in plain words; without torch."""

GATES = {
    "structure": "a NaN, an infinity or a shape that the definition has not",
    "exact": "a count, or a yes or no, is another",
    "scalar": "the value of a sum or a mean",
    "zero": "not 0 where the mask implies exactly 0",
    "norm": "the length of the whole error",
    "max": "the largest error of one entry",
    "row": "the largest error of one row, such as a token",
    "slope": "a common factor: all too large, or all too small",
    "relation": "two calls that must agree exactly do not",
    "protocol": "the call changed what it must leave alone",
    "pooled slope": "a common factor over all cases together",
}
"""What each gate looks at."""
