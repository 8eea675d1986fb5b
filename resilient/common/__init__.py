"""What any room may use and that knows none but the errors: files written whole and their digests, the user's cache,
optional packages, checks of arguments, processes that die with their parent."""
