"""Sockets that any room may open: where they listen and lead, who is let in there, and the way to etcd."""
