"""What happens when the package is imported, or started as a command."""
