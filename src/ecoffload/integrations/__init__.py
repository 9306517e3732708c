"""What plugs the engine into hosts that other people write. A package for each host; none is imported here."""
