"""The device that something ran on, in words."""

import torch


def in_words(device: torch.device) -> str:
    """A device by its name."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    if device.type != "cpu":
        return device.type
    threads = torch.get_num_threads()
    return f"CPU, {threads} thread{'' if threads == 1 else 's'}"
