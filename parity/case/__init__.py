"""What a case is: a structure and a seed, the tensors that follow, and how cases are drawn."""
