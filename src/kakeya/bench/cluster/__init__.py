"""`kakeya bench cluster`: what a cluster on Ray keeps when parts of it die, and what its front end costs."""
