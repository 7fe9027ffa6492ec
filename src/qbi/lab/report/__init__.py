"""Documents, tables and pictures of the laboratory."""
