"""How an upstream library is driven, whichever release is installed: one module a library, used by implementations and checks."""
