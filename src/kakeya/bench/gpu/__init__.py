"""`kakeya bench gpu`: the engine on one CUDA device, beside what its memory and its matrix units allow."""
