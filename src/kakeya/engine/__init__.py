"""How a model runs: slabs, attention, runner, scheduler, sampler and the loop that joins them."""
