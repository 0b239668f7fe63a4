"""What people run: generate, status, replan, plan, bench."""
