"""What `make bench` prints of the records of cases/bench, comparisons per CPU second, and the comparison of two results files."""
