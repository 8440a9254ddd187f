"""What plain torch takes: its operators' results and its allocator, without values."""
