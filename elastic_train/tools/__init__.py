"""What people run beside a training: drills, their audit, checks, benchmarks. Training imports none of it."""
