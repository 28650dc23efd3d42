"""A database engine on which nothing was tested."""
