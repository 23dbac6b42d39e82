"""The programs that we are measured beside, each in a process of its own, with its own threads and memory."""
