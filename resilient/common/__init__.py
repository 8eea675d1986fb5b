"""What any room may use and that knows none but the errors: files written whole, optional packages, arguments."""
