"""Plan, model and data in; private model and run folder out."""
