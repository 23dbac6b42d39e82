"""What both servers share: keys, threads for calls that wait, reading streams, the process's life."""
