"""The paper's evaluation, item by item: independent cells, seeded by name, stored as they come."""
