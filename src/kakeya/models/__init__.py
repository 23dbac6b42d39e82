"""What a checkpoint is: catalogue and download, readers, and the decoder network."""
