"""The pages of one request: block tables and what they stand on."""
