"""What crosses between devices in a step, and what each device holds."""
