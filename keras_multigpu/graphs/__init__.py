"""Models as graphs of layer calls: reads them, estimates costs, and places the calls."""
