"""How the machines of a job reach each other: their addresses, tried both ways, and what is known of a link."""
