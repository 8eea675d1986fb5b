"""DHP: context-parallel groups of as many ranks as each sequence needs."""
