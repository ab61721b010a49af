"""Loss families, one file each: settings, how cases are drawn, the tensors of a case, the definition. They know no library."""
