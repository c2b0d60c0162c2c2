"""Training and evaluation: functions of objects and plain values that Hydra built."""
