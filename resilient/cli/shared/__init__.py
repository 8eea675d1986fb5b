"""What several commands share: options of a planned job, output files, standard output."""
