"""What any room may use and that knows none of them: files written whole, optional packages, processes that die with
their parent."""
