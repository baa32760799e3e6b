"""Long runs under load: nothing leaks, nothing gets stuck, and every text is what it would be alone."""
