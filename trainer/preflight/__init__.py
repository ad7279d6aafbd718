"""A look at a program before it is trained."""
