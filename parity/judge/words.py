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
PROTOCOL = {
    "call fails under another default dtype": "the call fails under another default dtype",
    "default dtype is float64": "the call gives something else under another default dtype",
    "call fails under a checkpoint": "the call fails under a checkpoint that is not reentrant",
    "differs under a checkpoint": "the call gives something else under a checkpoint that is not reentrant",
    "call fails under no_grad": "the call fails without gradients",
    "outputs differ from those with gradients": "the call gives something else without gradients",
    "second call of the same inputs": "a second call fails",
    "called again after": "a second call gives something else",
    "a call right after": "a second call gives something else",
    "that an earlier call returned": "a later call changes what the first returned",
    "another forward comes before": "another forward before its backward spoils a call",
    "a second forward before": "another forward before its backward spoils a call",
    "of one leaf alone": "the gradient of one input alone cannot be had",
    "alone is not that": "the gradient of one input alone is another",
    "a second backward": "a second backward fails, or does not add the same gradient",
}
"""What does not hold of the protocol, by words of the message of its row; of others the gate's."""
