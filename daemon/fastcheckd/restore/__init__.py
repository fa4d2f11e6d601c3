"""From a committed step back to bytes a trainer can map: from here if they are here, else from many peers at once."""
