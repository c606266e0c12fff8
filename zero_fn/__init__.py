"""What DeepSpeed does, as pure functions over ``torch.func``."""
