"""Which cases an implementation gets: of the drawn ones, of those moved to what it takes, and one by its name."""
