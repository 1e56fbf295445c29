"""Pictures of values for notebooks and terminals."""
