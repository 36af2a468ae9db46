"""Small fixtures and pictures, each with the script that makes it."""
