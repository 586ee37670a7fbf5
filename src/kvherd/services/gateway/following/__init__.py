"""What workers hold, from their own KV events: followed, believed or not."""
