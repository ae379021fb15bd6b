"""Data: built-in sets, folders and streams, and augmentation of whole batches on the device."""
