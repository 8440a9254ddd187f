"""One request from plan to frames: attempts and rescue, the loop over clips, fused and plain passes, results."""
